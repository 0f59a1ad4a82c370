"""Readers beside GC: holds, snapshots, open scans and passes over changes keep their history."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock, Store
from kvstore.engine.api import DATA
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import HoldLostError
from tests.gc.garbage import KEYS, add_import, stored

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_hold_and_open_snapshot_keep_since_back(store: Store) -> None:
    held = store.put(b"k", b"1")
    hold = store.hold("backup", at=held)
    pinned = store.put(b"k", b"2")
    snapshot = store.snapshot()
    store.put(b"k", b"3")
    report = store.gc(before=store.now())
    assert report.held_back
    assert store.since == held
    hold.release()
    store.gc(before=store.now())
    assert store.since == pinned
    assert snapshot.get(b"k") == b"2"
    snapshot.close()
    assert not store.gc(before=store.now()).held_back
    assert store.since > pinned


def test_hold_over_its_budget_is_lost_and_its_owner_told(tmp_path: Path) -> None:
    clock = ManualClock()
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        store.put(b"k", b"1")
        hold = store.hold("slow", max_age=timedelta(seconds=5))
        clock.advance(6_000_000_000)
        report = store.gc(keep=timedelta(seconds=1))
        assert [lost.name for lost in report.lost_holds] == ["slow"]
        assert store.since == clock.wall_ns() - 1_000_000_000
        with pytest.raises(HoldLostError, match="budget"):
            hold.move(store.upper - 1)


def test_pass_over_changes_that_is_open_stays_valid_while_gc_runs(store: Store) -> None:
    start = store.put(b"k0", b"v" * 5000)
    for number in range(1, 20):
        store.put(b"k%d" % number, b"v" * 5000)
    changes = store.changes(start, order="time")
    first = next(changes)
    store.batch()
    for number in range(1, 20):
        store.delete(b"k%d" % number)
    store.gc(before=store.now())
    assert store.since == start
    assert [first.key, *(change.key for change in changes)] == [b"k%d" % n for n in range(1, 20)]
    store.gc(before=store.now())
    assert store.since > start


@pytest.mark.usual_limits  # the rows are more than a scan reads at once
def test_scans_that_are_open_see_their_state_through_gc_compaction_and_imports(
    store: Store, tmp_path: Path
) -> None:
    with store.batch() as batch:
        for number in range(20_000):
            batch.put(b"%08d" % number, b"old")
    forward, backward = store.scan(), store.scan(reverse=True)
    columns = iter(store.scan_batches(batch_rows=100))
    seen, turned, first = [next(forward)], [next(backward)], next(columns)
    store.delete_range(b"0", b"1")
    add_import(store, tmp_path / "in", {b"%08d" % number: b"new" for number in range(0, 20_000, 7)})
    store.gc(before=store.now(), compact=True)
    assert stored(store, DATA) == sum(1 for _ in store.scan()) == 2_858
    seen.extend(forward)
    turned.extend(backward)
    assert seen == turned[::-1] == [(b"%08d" % number, b"old") for number in range(20_000)]
    assert first.num_rows + sum(batch.num_rows for batch in columns) == 20_000


def test_snapshots_stay_whole_while_writers_and_gc_run(store: Store) -> None:
    """Each commit writes one number to all keys; a snapshot sees one number for as long as it is
    open."""
    wrong = []

    def write() -> None:
        for number in range(200):
            with store.batch() as batch:
                batch.delete_range(b"a", b"z")
                for key in KEYS:
                    batch.put(key, b"%d" % number)

    def collect() -> None:
        while writer.is_alive():
            store.gc(before=store.upper - 1)

    with store.batch() as batch:
        for key in KEYS:
            batch.put(key, b"0")
    writer = threading.Thread(target=write)
    collector = threading.Thread(target=collect)
    writer.start()
    collector.start()
    while writer.is_alive():
        with store.snapshot() as snapshot:
            first, values = dict(snapshot.scan()), snapshot.get_many(KEYS)
            again = dict(snapshot.scan(reverse=True))
            if first != again or len({*values, *first.values()}) != 1 or len(first) != len(KEYS):
                wrong.append((snapshot.as_of, first, values, again))
    writer.join()
    collector.join()
    assert wrong == []
    assert store.verify().problems == ()


@pytest.mark.parametrize("step_ns", [0, -5, 7])
def test_a_hold_taken_for_the_next_sync_is_on_disk_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_ns: int
) -> None:
    """This also holds where no time has passed since the last sync, or the clock has gone back."""
    clock = ManualClock(1_700_000_000 * 10**9)
    with kvstore.open(tmp_path / "store", engine="rocksdb", clock=clock) as store:
        store.put(b"k", b"v")
        store.sync()
        calls: list[str] = []
        for name in ("write", "sync"):
            monkeypatch.setattr(RocksEngine, name, _noted(getattr(RocksEngine, name), name, calls))
        store.hold("backup", durable=False)
        assert calls == ["write"]
        clock.set(clock.wall_ns() + step_ns)
        store.sync()
        assert calls[-1] == "sync"


def _noted(call: Callable[..., None], name: str, calls: list[str]) -> Callable[..., None]:
    def noted(*args: object) -> None:
        calls.append(name)
        call(*args)

    return noted
