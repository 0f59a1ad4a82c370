"""A value that the revert of an import brought back: GC gives it the time of the revert."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock
from kvstore.backup import Collection
from kvstore.retention.gc import Move, Removing, garbage_of_keys
from tests.gc.garbage import KEYS, add_import, left_over, readable, stored
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of
from tests.joins.histories import pairs, table

pytestmark = pytest.mark.usefixtures("each_engine")


@pytest.mark.parametrize("small", [{}, {"SETTLE_STEP_ROWS": 1, "SCAN_CHUNK_BYTES": 1}])
@pytest.mark.parametrize("is_swept", [False, True], ids=["looked up", "swept"])
def test_the_time_of_a_value_is_the_same_before_and_after_gc(
    tmp_path: Path, small: dict[str, int], is_swept: bool
) -> None:
    listed = {"SETTLE_ROWS_MAX": 0} if is_swept else {}
    with (
        bounds(**small, **listed),
        kvstore.open(tmp_path / "db", durability="async", clock=ManualClock(100)) as store,
    ):
        below, _ = add_import(store, tmp_path / "below", {b"a": b"imported"})
        for key in KEYS[1:]:
            store.put(key, key)
        import_id, _ = add_import(store, tmp_path / "in", dict.fromkeys(KEYS[:4], b"row"))
        newer = store.put(b"d", b"newer")
        at = store.revert_import(import_id)
        now = store.put(b"z", b"z")
        collection = Collection(tmp_path / "collection")
        collection.backup(store)
        labels = table([(key, now) for key in KEYS])
        expected = [(b"imported", at), (b"b", at), (b"c", at), (b"newer", newer)]
        assert pairs(store.join(labels))[:4] == expected
        before = readable(store, at, now)
        store.gc(before=at)
        assert readable(store, at, now) == before
        assert pairs(store.join(labels)) == pairs(collection.join(labels))
        assert left_over(store, at) == []
        assert [(v.timestamp, v.value) for v in store.history(b"b")] == [(at, b"b")]
        assert stored(store, "data") == len(KEYS) + 1
        with pytest.raises(kvstore.errors.HistoryGoneError):
            store.revert_import(below)
        assert collection.verify("contents", store).backups == 1


def test_what_was_cleared_meanwhile_does_not_come_back(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db", durability="async", clock=ManualClock(100)) as store:
        store.put(b"a", b"1")
        store.put(b"b", b"1")
        import_id, _ = add_import(store, tmp_path / "in", {b"a": b"row", b"b": b"row"})
        at = store.revert_import(import_id)
        parts = parts_of(store)
        found = list(garbage_of_keys(parts.versions, [b"a", b"b"], at, entries_max=10))
        assert all(isinstance(each, Move) for each in found)
        removing = Removing(parts)
        batches = list(removing.batches(found, entries_max=10))
        store.clear_range(b"a", b"b")
        for batch in batches:
            removing.write(batch)
        assert list(store.scan()) == [(b"b", b"1")]
        assert stored(store, "data") == 1
        store.gc(before=at)
        assert pairs(store.join(table([(b"b", at)]))) == [(b"1", at)]
        assert list(removing.batches(found, entries_max=10)) == []
