"""Compaction and expiry: kept history stays restorable, and history that was given up is gone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import backup
from kvstore.backup.chains import Chains
from kvstore.backup.shard import Shard
from kvstore.backup.shard.state.state_log import StateLog
from kvstore.errors import (
    HistoryGoneError,
    UsageError,
)
from kvstore.limits import LEASE_NS
from kvstore.storage.local_files import FileConsensus
from tests.backup.histories import (
    Crash,
    live_through,
    parts_of,
    versions,
)
from tests.harness.bounds import bounds

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

ROLLUP = 16
"""Backups from one collection of the state to the next."""


@pytest.fixture
def frequent_rollups() -> Iterator[None]:
    with bounds(ROLLUP_EVERY=ROLLUP):
        yield


def two_chains(store: kvstore.Store, collection: backup.Collection) -> tuple[int, int]:
    """Two chains, an instant that only the older chain has (k is 1 then), and the newer chain's
    upper."""
    old = store.put(b"k", b"1")
    store.put(b"k", b"2")
    collection.backup(store)
    store.gc(before=store.upper)
    store.put(b"k", b"3")
    return old, collection.backup(store, full=True).upper


def test_compaction_keeps_every_instant(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=10)
    collection.compact()
    assert len(collection.list()) == 1
    for number, at in enumerate(instants[::40]):
        collection.restore(tmp_path / f"restored-{number}", as_of=at)
        with kvstore.open(tmp_path / f"restored-{number}") as restored:
            assert versions(restored, at) == versions(store, at)
    store.put(b"later", b"1")
    collection.backup(store)
    collection.verify("contents", store)


def test_long_work_tells_how_far_it_has_come(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    for _ in range(2):
        for number in range(5):
            store.put(b"k%d" % number, b"")
        collection.backup(store)
    told: list[int] = []

    def rows() -> list[int]:
        found, told[:] = told.copy(), []
        assert found == sorted(found)
        return [min(found), max(found)]

    collection.verify(progress=told.append)
    assert rows() == [5, 10]
    collection.verify("contents", store, progress=told.append)
    assert rows() == [5, 10]
    collection.restore(tmp_path / "whole", progress=told.append)
    assert rows() == [0, 10]
    collection.restore(tmp_path / "state", history=False, progress=told.append)
    assert rows() == [0, 5]
    collection.restore_into(store, progress=told.append)
    assert rows() == [0, 5]
    collection.compact(progress=told.append)
    assert rows() == [0, 10]
    upper = collection.show().upper
    collection.expire(upper, progress=told.append)
    assert rows() == [0, 5]


def test_work_that_its_progress_calls_off_changes_nothing(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=8)

    def call_off(rows: int) -> None:
        if rows:
            raise KeyboardInterrupt

    before = collection.list(), store.upper
    for work in (
        partial(collection.restore, tmp_path / "restored"),
        partial(collection.restore_into, store),
        partial(collection.verify, "contents", store),
        collection.compact,
    ):
        with pytest.raises(KeyboardInterrupt):
            work(progress=call_off)
    assert (collection.list(), store.upper) == before
    assert list(tmp_path.glob("*restor*")) == []
    with pytest.raises(KeyboardInterrupt):
        collection.expire(instants[50], progress=call_off)
    assert all(each.lower <= each.upper for each in collection.list())
    assert collection.expire(instants[50]) == instants[50]
    assert collection.scrub().orphans == ()
    collection.verify("contents", store)


def test_expired_instants_are_gone_and_later_ones_stay(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=11)
    before = collection.show()
    assert collection.expire(before=instants[100]) == collection.since == instants[100]
    assert collection.list()[0].lower == collection.show().since == instants[100]
    assert collection.show().bytes < before.bytes
    with pytest.raises(HistoryGoneError):
        collection.restore(tmp_path / "restored", as_of=instants[99])
    for number, at in enumerate((instants[100], instants[130], None)):
        instant = collection.restore(tmp_path / f"restored-{number}", as_of=at)
        with kvstore.open(tmp_path / f"restored-{number}") as restored:
            assert restored.since == instants[100]
            assert dict(restored.scan()) == dict(store.scan(as_of=instant))
            window = list(restored.changes(instants[100], instant))
            assert window == list(store.changes(instants[100], instant))
    collection.verify("contents", store)
    with pytest.raises(UsageError):
        collection.expire()


@pytest.mark.parametrize("call", ["finalise", "write_rollup", "forget"])
def test_a_chain_whose_removal_was_cut_short_is_removed_by_the_next_expiry(
    store: kvstore.Store,
    collection: backup.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    store.put(b"a", b"2")
    collection.backup(store, full=True)
    owner = {"finalise": Shard, "write_rollup": StateLog, "forget": Chains}[call]

    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, crash)
        with pytest.raises(Crash):
            collection.expire(before=collection.upper - 1)
    assert collection.restore(tmp_path / "restored") == collection.upper - 1
    collection.expire(before=collection.upper - 1)
    chains = {
        path.relative_to(tmp_path / "collection" / "blob").parts[0]
        for path in parts_of(tmp_path / "collection")
    }
    assert len(chains) == 1
    collection.backup(store)
    collection.verify("contents", store)


def test_a_restore_that_was_killed_keeps_space_only_until_its_lease_has_run_out(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    place = tmp_path / "backups"
    collection = backup.Collection(place, clock=clock)
    store.put(b"k", b"1")
    collection.backup(store)
    killed = collection.snapshot(None)
    killed.__enter__()
    store.put(b"k", b"2")
    collection.backup(store)
    collection.compact()
    assert len(parts_of(place)) == 3
    clock.advance(LEASE_NS + 1)
    collection.compact()
    assert len(parts_of(place)) == 1


def test_an_expiry_passes_a_restore_that_was_killed_once_its_lease_has_run_out(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    collection = backup.Collection(tmp_path / "backups", clock=clock)
    store.put(b"k", b"1")
    collection.backup(store)
    killed = collection.snapshot(None)
    killed.__enter__()
    store.put(b"k", b"2")
    upper = collection.backup(store).upper
    assert collection.expire(before=upper) == 0
    clock.advance(LEASE_NS + 1)
    assert collection.expire(before=upper) == upper - 1


def test_a_chain_that_is_being_restored_is_removed_by_the_next_expiry(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    collection = backup.Collection(tmp_path / "backups", clock=clock)
    old, upper = two_chains(store, collection)
    with collection.snapshot(old) as (_, snapshot):
        assert collection.expire(before=upper) == upper - 1
        assert pa.Table.from_batches(snapshot.read()).column("value").to_pylist() == [b"1"]
        assert collection.show().chains == 1
    assert len(parts_of(tmp_path / "backups")) == 2
    collection.expire(before=upper)
    assert len(parts_of(tmp_path / "backups")) == 1


def test_a_killed_restore_of_an_ended_chain_stops_no_expiry(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    collection = backup.Collection(tmp_path / "backups", clock=clock)
    old, upper = two_chains(store, collection)
    killed = collection.snapshot(old)
    killed.__enter__()
    collection.expire(before=upper)
    clock.advance(LEASE_NS + 1)
    collection.expire(before=upper)
    assert len(parts_of(tmp_path / "backups")) == 1


@pytest.mark.usual_limits
@pytest.mark.usefixtures("frequent_rollups")
@pytest.mark.parametrize("warm", [True, False])
def test_many_increments_leave_few_versions_of_the_state(
    store: kvstore.Store, tmp_path: Path, warm: bool
) -> None:
    """An opening reads a bounded log, because backups collect now and then."""
    place = tmp_path / "backups"
    collection = backup.Collection(place)
    for number in range(4 * ROLLUP):
        store.put(b"k%03d" % number, b"v")
        if not warm:
            collection = backup.Collection(place)
        collection.backup(store)
    (chain,) = (path.name for path in (place / "consensus").iterdir() if path.name != "collection")
    assert len(FileConsensus(place / "consensus").scan(chain, start=0, limit=1 << 20)) < (
        3 * ROLLUP
    )
    assert len(collection.list()) == 4 * ROLLUP
    collection.verify()
    collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored", create=False) as restored:
        assert len(list(restored.scan())) == 4 * ROLLUP


@pytest.mark.usual_limits
@pytest.mark.usefixtures("frequent_rollups")
def test_a_backup_a_day_for_months_leaves_few_writers_in_the_state(
    store: kvstore.Store, tmp_path: Path
) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    collection = backup.Collection(tmp_path / "backups", clock=clock)
    for number in range(120):
        clock.advance(86_400 * 10**9)
        store.put(b"k", b"%d" % number)
        collection.backup(store)
    with collection.snapshot(None) as (shard, _):
        assert len(shard.state.writers) <= ROLLUP + 5
    collection.compact()
    with collection.snapshot(None) as (shard, _):
        assert len(shard.state.writers) <= 5


@pytest.mark.parametrize("age", [timedelta(-1), 5])
def test_an_age_that_is_negative_or_no_timedelta_deletes_nothing(
    store: kvstore.Store, collection: backup.Collection, age: Any
) -> None:
    two_chains(store, collection)
    since, backups = collection.since, collection.list()
    with pytest.raises(UsageError, match="keep"):
        collection.expire(keep=age)
    with pytest.raises(UsageError, match="older_than"):
        collection.scrub(delete_orphans_older_than=age)
    assert (collection.since, collection.list()) == (since, backups)
