"""What is made ahead comes in order, whole, and with its errors where they belong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from backup.shard.beside import ahead, start


def test_items_come_in_order() -> None:
    assert list(ahead(iter(range(1, 100)))) == list(range(1, 100))
    assert list(ahead(iter([]))) == []


def test_an_error_comes_behind_the_items_before_it() -> None:
    def items() -> Iterator[str]:
        yield "first"
        raise ValueError("second")

    taken = ahead(items())
    assert next(taken) == "first"
    with pytest.raises(ValueError, match="second"):
        next(taken)


def test_who_stops_early_leaves_no_thread_and_nothing_open() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(threading.current_thread())

    def endless() -> Iterator[int]:
        yield from (n + 1 for n in items())

    taken = ahead(endless())
    next(taken)
    taken.close()  # type: ignore[attr-defined]
    del taken
    assert closed
    assert not [t for t in threading.enumerate() if t.name.startswith("kvstore-ahead")]


def test_a_call_is_made_in_another_thread_and_its_error_comes_with_its_result() -> None:
    assert start(threading.get_ident).result() != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        start(divmod, 1, 0).result()


def test_a_forked_process_makes_its_calls_in_threads_of_its_own() -> None:
    assert start(len, "ours").result() == 4
    child = os.fork()
    if not child:
        os._exit(start(len, "theirs").result(timeout=20))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6


def test_while_the_interpreter_ends_a_call_is_made_at_once() -> None:
    program = (
        "import atexit; from backup.shard.beside import start; start(len, '');"
        "atexit.register(lambda: print(start(len, 'last').result()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == "4\n"
