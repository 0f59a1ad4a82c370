"""Ctrl-C in a loop of commits: the store works on, each commit that had returned is there, and the
one under way is there or not, for this process and after a crash alike."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvstore
from kvstore import Store
from tests.harness.kills import run_until_killed
from tests.harness.soak import soaked


def put(store: Store, number: int) -> None:
    store.put(b"k%d" % (number % 7), b"%d" % number)


def delete_range(store: Store, number: int) -> None:
    with store.batch() as batch:
        batch.delete_range(b"k2", b"k5")
        batch.put(b"k%d" % (number % 7), b"%d" % number)


def expire(store: Store, number: int) -> None:
    store.put(b"k%d" % (number % 7), b"%d" % number, expires=timedelta(days=1))


def transact(store: Store, number: int) -> None:
    store.transact(lambda txn: txn.put(b"k1", b"%d after " % number + (txn.get(b"k0") or b"")))


def large(store: Store, number: int) -> None:
    """The change index has an entry that names keys only."""
    store.put_many({b"k%d" % at: b"%d" % number * 400 for at in range(7)})


def sync(store: Store, number: int) -> None:
    put(store, number)
    store.sync()


COMMITS: Mapping[str, Callable[[Store, int], None]] = {
    "put": put,
    "delete_range": delete_range,
    "expires": expire,
    "transact": transact,
    "large": large,
    "sync": sync,
}


def at_line(call: Callable[[], None], line: int, *, opcodes: bool) -> bool:
    """Make the call, and raise `KeyboardInterrupt` at its line number `line`, or its bytecode, in
    the code of commits. Whether it was reached."""
    left = itertools.count(line, -1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "/kvstore/commit/" not in frame.f_code.co_filename:
            return trace if event == "call" and "kvstore" in frame.f_code.co_filename else None
        frame.f_trace_opcodes = opcodes
        wanted = "opcode" if opcodes else "line"
        # A signal is handled between bytecodes of a block, and not in the entry of a lock's `with`.
        if event == wanted and frame.f_code.co_name in PLACES and not next(left):
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


PLACES = ("write_commits", "guarded", "publish", "advance", "write_meta", "add", "note_health")
"""Functions in which the stored bytes and memory may differ."""


def check(store: Store, before: dict[bytes, bytes], after: dict[bytes, bytes]) -> None:
    """The store shows the state before the commit or after it, by every read."""
    found = dict(store.scan())
    assert found in (before, after)
    keys = [b"k%d" % number for number in range(7)]
    assert store.get_many(keys) == [found.get(key) for key in keys]
    assert [store.get(key) for key in keys] == [found.get(key) for key in keys]
    with store.transaction() as txn:
        assert dict(txn.scan()) == found
        txn.put(b"k6", b"again")
    assert store.get(b"k6") == b"again"


@pytest.mark.parametrize("opcodes", [False, *soaked(True)], ids=["lines", "opcodes"])
@pytest.mark.parametrize("name", COMMITS)
def test_a_commit_that_is_interrupted_at_any_line_leaves_a_store_that_works(
    tmp_path: Path, name: str, opcodes: bool
) -> None:
    """The store was poisoned, reads included."""
    commit = COMMITS[name]
    with kvstore.open(tmp_path / "store", durability="async") as store:
        for number in range(7):
            put(store, number)
        model = kvstore.open(None, engine="memory")
        count = itertools.count(10)
        interrupts = 0
        for line in itertools.count():
            number = next(count)
            before = dict(store.scan())
            model.put_many({b"k%d" % at: b"" for at in range(7)})
            model.delete_range(b"", b"z")
            model.put_many(before)
            commit(model, number)
            reached = at_line(lambda at=number: commit(store, at), line, opcodes=opcodes)  # type: ignore[misc]
            check(store, before, dict(model.scan()))
            if not reached:
                break
            interrupts += 1
        model.close()
        assert interrupts > 8
        upper, rows = store.upper, dict(store.scan())
        assert store.verify().problems == ()
    with kvstore.open(tmp_path / "store") as again:
        assert again.upper >= upper
        assert dict(again.scan()) == rows
        assert again.verify().problems == ()


def put_until_interrupted(path: Path, said: Connection) -> None:
    """Put until Ctrl-C, again and again, and tell what is there."""
    is_putting = came = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if is_putting:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_signal)
    with kvstore.open(path, durability="async") as store:
        store.put(b"k", b"0")
        number, returned = 1, 0
        while True:
            came = False
            said.send(os.getpid())
            try:
                is_putting = True
                while not came:
                    store.put(b"k", b"%d" % number)
                    returned = number
                    number += 1
            except KeyboardInterrupt:
                pass
            is_putting = False
            found = store.get(b"k")
            assert found in (b"%d" % returned, b"%d" % (returned + 1)), (found, returned)
            assert [value for _, value in store.scan()] == [found]
            returned = int(found or b"0") + 1
            number = returned + 1
            store.put(b"k", b"%d" % returned)
            said.send("works")


@pytest.mark.parametrize("count", [12, *soaked(600)])
def test_control_c_in_a_loop_of_puts_leaves_a_store_that_works(
    tmp_path: Path, spawn: Any, count: int
) -> None:
    """A real SIGINT, in a process of its own."""
    works = 0

    def is_time(said: list[Any]) -> bool:
        nonlocal works
        works += said[-1] == "works"
        if works == count:
            return True
        if isinstance(said[-1], int):
            os.kill(said[-1], signal.SIGINT)
        return False

    run_until_killed(spawn, put_until_interrupted, (tmp_path / "store",), is_time, 0.0)
    assert works == count
    with kvstore.open(tmp_path / "store") as store:
        assert store.verify().problems == ()
