"""Items that are made ahead come in order and complete, and errors come in the place of their
items."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.backup.shard.rows.part_reader import ahead


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
