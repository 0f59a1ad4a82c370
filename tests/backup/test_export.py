"""Exports: the rows of a window are in one order, however its batches are cut."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.backup.rows import Exported, RowPosition, exported
from kvstore.backup.shard import OP_DELETE, OP_DELETE_RANGE, OP_PUT
from kvstore.base.span import Span

KEYS = [b"", b"\x00", b"a", b"a\x00", b"b", b"c"]
Row = tuple[bytes, int, int, bytes | None, bytes | None]
OPS = {"put": OP_PUT, "delete": OP_DELETE, "delete_range": OP_DELETE_RANGE}

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_a_key_cut_in_two_keeps_an_older_range_delete_behind_its_newer_versions(
    store: kvstore.Store,
    collection: backup.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once such a key failed the first backup, and each increment that no index shows to be small.
    Every later backup then failed too."""
    monkeypatch.setattr("kvstore.backup.rows.ARROW_BYTES_MAX", 1000)
    for window in range(2):
        store.put(b"k", b"older")
        store.delete_range(b"k", b"z")
        for number in range(100):
            store.put(b"k", b"%040d" % number)
        collection.backup(store)
        collection.verify("contents", store)
        collection.restore(tmp_path / f"restored-{window}")
        with kvstore.open(tmp_path / f"restored-{window}") as restored:
            assert restored.history(b"k") == store.history(b"k")
        monkeypatch.setattr("kvstore.changes.batches.FEW_CHANGES_BYTES", 0)


def write(store: kvstore.Store, place: Path, pick: random.Random) -> None:
    """Fifty commits of every kind to a handful of keys."""
    imports: list[int] = []
    for step in range(50):
        kind = pick.random()
        if kind < 0.6:
            store.put(pick.choice(KEYS), pick.randbytes(pick.choice([0, 3, 40])))
        elif kind < 0.7:
            store.delete(pick.choice(KEYS))
        elif kind < 0.8:
            store.delete_range(*sorted(pick.sample(KEYS, 2)))
        elif kind < 0.9:
            with store.batch() as batch:
                batch.delete_range(*sorted(pick.sample(KEYS, 2)))
                for key in pick.sample(KEYS, 2):
                    batch.put(key, b"beside")
        elif imports and kind < 0.94:
            store.revert_import(imports.pop())
        else:
            staged = bulk.Import.create(place / f"import-{step}")
            with staged.writer() as writer:
                for key in sorted(pick.sample(KEYS, 3)):
                    writer.put(key, b"imported")
            staged.seal()
            bulk.ingest(store, staged.staging, move=True)
            imports.append(staged.import_id)


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_any_window_are_whole_and_in_order_however_they_are_cut(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    pick = random.Random(seed)
    for name, tiny in {
        "kvstore.backup.rows.ARROW_BYTES_MAX": 50,
        "kvstore.backup.rows.ARROW_ROWS_MAX": 2,
        "kvstore.engine.api.SCAN_CHUNK": 2,
        "kvstore.changes.batches.ARROW_ROWS_MAX": 3,
        "kvstore.changes.batches.FEW_CHANGES_BYTES": 0,
        "kvstore.changes.batches.SORTED_CHANGES_MAX": 0,
    }.items():
        if pick.random() < 0.6:
            monkeypatch.setattr(name, tiny)
    write(store, tmp_path, pick)
    upto = store.sync() - 1
    expected = sorted(map(placed, store.replication.versions(since=None, upto=upto)))
    times = sorted({0, *(-timestamp for _, timestamp, *_ in expected)})
    for _ in range(6):
        since = pick.choice([None, *times[:-1]])
        wanted = [row for row in expected if -row[1] > (since or -1)]
        assert rows(exported(store, since=since, upto=upto)) == wanted
        at = pick.randrange(len(wanted))
        key, timestamp, op, *_ = wanted[at]
        after = RowPosition(key, -timestamp, -op)
        assert rows(exported(store, since=since, upto=upto, after=after)) == wanted[at + 1 :]
        cuts = [b"", *sorted(pick.sample(KEYS[1:], 2)), None]
        pieces = [
            row
            for start, end in pairwise(cuts)
            for row in rows(exported(store, since=since, upto=upto, span=Span(start or b"", end)))
        ]
        assert pieces == wanted


def placed(change: kvstore.Change) -> Row:
    """A change as a row of `rows`."""
    return change.key, -change.timestamp, -OPS[change.op], change.value, change.end_key


def rows(window: Exported) -> list[Row]:
    """The rows of a window, with fields chosen so that ascending order is the order of the rows."""
    return [
        (row["key"], -row["timestamp"], -row["op"], row["value"], row["end_key"])
        for batch in window.rows
        for row in batch.to_pylist()
    ]
