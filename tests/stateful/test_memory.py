"""Calls that promise bounded memory keep the promise, also where values are large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import kvstore
from kvstore import Store
from tests.harness.traced import traced

COUNT, VALUE_BYTES = 100, 1 << 20
HELD_BYTES_MAX = 48 << 20
"""More bytes than chunks, sorts and batches may hold, and less than half of all data."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Large values among small ones, all of which were deleted in one commit and put again."""

    def put(number: int) -> None:
        with store.batch() as batch:
            batch.put(b"%04d" % number, bytes(VALUE_BYTES))
            for small in range(9):
                batch.put(b"%04d/%d" % (number, small), b"small")

    pa.array(np.zeros(1))  # has pyarrow import pandas, whose code is 24 MB
    path = tmp_path_factory.mktemp("large") / "store"
    with kvstore.open(path, durability="async") as store:
        for number in range(COUNT):
            put(number)
        with store.batch() as batch:
            for key, _ in store.scan():
                batch.delete(key)
        for number in range(COUNT):
            put(number)
        yield store


def drain(rows: Iterable[object]) -> None:
    for _ in rows:
        pass


PASSES: dict[str, Callable[[Store], object]] = {
    "first row": lambda s: next(s.scan()),
    "last row": lambda s: next(s.scan(reverse=True)),
    "scan": lambda s: drain(s.scan()),
    "changes by key": lambda s: drain(s.changes(1)),
    "latest changes": lambda s: drain(s.changes(1, revisions="latest")),
    "changes by time": lambda s: drain(s.changes(1, order="time")),
    "state": lambda s: drain(s.changes(0, revisions="latest")),
    "versions": lambda s: drain(s.replication.versions(since=None, upto=s.upper - 1)),
    "export": lambda s: drain(s.replication.export(since=None, upto=s.upper - 1).columns),
    "events with images": lambda s: drain(s.events(1, images="pre+post")),
    "feed": lambda s: drain(s.feed("f", start=0, images="pre").batches()),
    "verify": lambda s: s.verify().require_ok(),
}


@pytest.mark.traces_memory
@pytest.mark.parametrize("read", PASSES.values(), ids=PASSES.keys())
def test_a_pass_over_large_values_holds_few_of_them(
    store: Store, monkeypatch: pytest.MonkeyPatch, read: Callable[[Store], object]
) -> None:
    monkeypatch.setattr("kvstore.changes.windows.SORTED_CHANGES_BYTES_MAX", 8 << 20)
    with traced() as memory:
        read(store)
    assert memory.peak < HELD_BYTES_MAX


def test_preimages_are_cut_into_batches_of_bounded_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of deletes is one entry, which is handed out whole if images are not asked for."""
    monkeypatch.setattr("kvstore.changes.batches.ARROW_BYTES_MAX", 8 << 20)
    held = [batch.nbytes for batch in store.changes_batches(1, images="pre")]
    assert max(held) < 16 << 20
    rows = [row for batch in store.changes_batches(1, images="pre") for row in batch.to_pylist()]
    events = list(store.events(1, images="pre"))
    assert [(row["key"], row["op"], row["pre"], row["seq"]) for row in rows] == [
        (event.key, event.op, event.pre, event.sequence) for event in events
    ]


@pytest.mark.parametrize("revisions", ["all", "latest"])
def test_values_let_go_while_sorting_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revisions: str
) -> None:
    monkeypatch.setattr("kvstore.changes.windows.SORTED_CHANGES_BYTES_MAX", 4000)
    with kvstore.open(tmp_path / "s", durability="async") as store:
        for number in range(200):
            store.put(b"%d" % (number % 70), bytes([number]) * (number * 20))
            if number % 50 == 0:
                store.delete_range(b"2", b"3")
        by_key = list(store.changes(1, revisions=revisions))  # type: ignore[arg-type]
        monkeypatch.undo()
        assert by_key == list(store.changes(1, revisions=revisions))  # type: ignore[arg-type]
