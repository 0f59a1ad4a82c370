"""Thinning and labels: the kept instants read as the store was, and all others are gone."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import backup
from kvstore.backup.retention import Thinning
from kvstore.backup.shard import AsOf, Compact
from kvstore.base.clock import ManualClock
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from kvstore.spark.access import Access
from kvstore.spark.origins import find, open_origin
from tests.backup import test_crash as crash
from tests.backup.histories import change
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded
from tests.shard.rows import model_state, state_of
from tests.shard.test_rules import UPPER, Row, edges, histories, times
from tests.shard.test_rules import Store as Batches

State: TypeAlias = "dict[bytes, bytes]"

HOUR = 3600 * 10**9
DAY = 24 * HOUR
START = 1_700_000_000 * 10**9
POLICY: Any = {"keep_within": timedelta(hours=30), "hourly": 40, "daily": 5, "weekly": 2}


@settings(deadline=None, max_examples=50)
@given(histories(), edges, times, st.sets(times, max_size=4), st.data())
def test_compaction_leaves_the_state_at_each_kept_instant(
    rows: list[Row], cuts: list[int], since: int, chosen: set[int], data: st.DataObject
) -> None:
    store = Batches()
    kept = tuple(sorted(at for at in chosen if at < since))
    batches = store.cut(rows, cuts)
    first = data.draw(st.integers(0, len(batches) - 1))
    last = data.draw(st.integers(first + 1, len(batches)))
    merged = batches[first:last]
    lower, upper = merged[0].lower, merged[-1].upper
    found = store.read(merged, Compact(lower, since, kept))
    output = store.batch(lower, upper, found, since)
    assert output.rows <= sum(batch.rows for batch in merged)
    after = [*batches[:first], output, *batches[last:]]
    for as_of in (*kept, *range(since, UPPER)):
        assert state_of(store.read(after, AsOf(as_of))) == model_state(rows, as_of)


def test_a_policy_keeps_whole_hours_midnights_and_mondays() -> None:
    found = Thinning(timedelta(0), hourly=2, daily=2, weekly=2).instants(START)
    texts = sorted(str(kvstore.Timestamp(at))[:16] for at in found)
    assert texts == [
        "2023-11-06T00:00", "2023-11-13T00:00", "2023-11-14T00:00", "2023-11-14T21:00",
        "2023-11-14T22:00",
    ]  # fmt: skip
    assert kvstore.Timestamp(START).to_datetime().strftime("%A %H:%M") == "Tuesday 22:13"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def aged(tmp_path: Path, clock: ManualClock) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "aged", durability="async", clock=clock) as opened:
        yield opened


def states(store: kvstore.Store, times: list[int]) -> dict[int, State]:
    return {at: dict(store.scan(as_of=kvstore.Timestamp(at))) for at in times}


def live(store: kvstore.Store, clock: ManualClock, pick: random.Random) -> list[int]:
    """Some changes, a few hours apart; returns instants between and at them."""
    found: list[int] = []
    for _ in range(12):
        clock.advance(pick.randrange(1, 8) * HOUR + pick.randrange(HOUR))
        found.append(int(store.upper))
        change(store, pick, 1)
        found.append(int(store.upper) - 1)
    return found


def test_a_thinned_collection_reads_as_the_store_was_at_its_kept_instants_only(
    aged: kvstore.Store, clock: ManualClock, tmp_path: Path
) -> None:
    pick = seeded("KVSTORE_THIN_SEED")
    place = tmp_path / "collection"
    collection = backup.Collection(place, clock=clock)
    change(aged, pick, 3)
    every: list[int] = []
    labels: dict[str, int] = {}
    with bounds({"MERGE_FAN_IN": 2, "PART_BYTES_MAX": 3_000, "ROW_GROUP_ROWS_MAX": 9}):
        for number in range(5):
            every += live(aged, clock, pick)
            name = f"window-{number}"
            info = collection.backup(aged, label=name if number % 2 == 0 else None)
            if number % 2 == 0:
                labels[name] = info.upper - 1
                assert info.labels == (name,)
            with collection.open() as reader:
                old = [at for at in every if at >= reader.since]
                collection.expire(**POLICY)
                for at in pick.sample(old, min(3, len(old))):  # its snapshot keeps them
                    assert dict(reader.scan(as_of=at)) == states(aged, [at])[at]
            since = collection.expire(**POLICY)
    shown = collection.show()
    assert dict(shown.labels) == collection.labels() == labels
    assert since == shown.since == clock.wall_ns() - 30 * HOUR
    kept = [int(at) for at in shown.kept]
    assert {at for at in labels.values() if at < since} <= set(kept)
    assert len(kept) > len(labels)
    for at, state in states(aged, [*kept, *(at for at in every if at >= since)]).items():
        with collection.open(as_of=at) as reader:
            assert dict(reader.scan()) == state
            key = pick.choice(list(state) or [b"k"])
            assert reader.get(key) == state.get(key)
    for low, high in pairwise(kept):
        if high - low < 2:
            continue
        between = pick.randrange(low + 1, high)
        calls: list[Any] = [
            lambda at=between: collection.restore(tmp_path / "gone", at),
            lambda at=between: collection.open(at),
            lambda at=between: collection.scan_batches(at),
            lambda at=between: collection.open().get(b"k", at),
            lambda at=between: open_origin(find(Access(str(place))), covering=[at]),
        ]
        for call in calls:
            with pytest.raises(HistoryGoneError, match="nearest kept instants") as caught:
                call()
            assert caught.value.nearest == (low, high)
    for name in pick.sample(sorted(labels), 2):
        found = collection.restore(tmp_path / name, name)
        assert found == labels[name]
        with kvstore.open(tmp_path / name) as restored:
            assert dict(restored.scan()) == states(aged, [found])[found]
    at = kept[0]
    with open_origin(find(Access(str(place))), covering=[at]) as origin:
        assert origin.frontiers().since <= at
    assert collection.verify().parts == shown.batches or collection.verify().parts > 0


def test_a_list_searches_the_labels_of_each_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 40
    collection = backup.Collection(tmp_path / "collection")
    with kvstore.open(None, engine="memory") as store:
        for number in range(many):
            store.put(b"k", b"%d" % number)
            collection.backup(store, label=f"n{number}")
    passed: list[int] = []

    def counted(times: Iterable[int]) -> list[int]:
        found = sorted(times)
        passed.append(len(found))
        return found

    monkeypatch.setattr("kvstore.backup.overview.sorted", counted, raising=False)
    found = collection.list()
    assert [info.labels for info in found] == [(f"n{number}",) for number in range(many)]
    assert passed == [many]


def test_labels_are_taken_once_and_an_unlabelled_instant_expires(
    aged: kvstore.Store, clock: ManualClock, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "collection", clock=clock)
    first = aged.put(b"k", b"1")
    collection.backup(aged, label="first")
    clock.advance(DAY)
    aged.put(b"k", b"2")
    collection.backup(aged, token="t", label="second")
    assert collection.backup(aged, token="t", label="second").labels == ("second",)
    assert [info.labels for info in collection.list()] == [("first",), ("second",)]
    assert collection.label("again", first) == collection.label("again", "first") == first
    taken = [("first", "has the label"), ("now", "label"), ("2026", "label")]
    for name, problem in [*taken, ("Yesterday", "are times"), ("today", "are times")]:
        with pytest.raises(UsageError, match=problem):
            collection.label(name)
    with pytest.raises(UsageError, match="has the label 'first'"):
        collection.backup(aged, label="first")
    with pytest.raises(UsageError, match="no label of the collection; its labels are again"):
        collection.restore(tmp_path / "restored", "third")
    with pytest.raises(UsageError, match="before='third' is no time"):
        collection.expire("third")
    assert collection.expire("second") == collection.labels()["second"]
    clock.advance(DAY)
    since = collection.expire(keep=timedelta(hours=1))
    assert collection.restore(tmp_path / "restored", "again") == first
    with kvstore.open(tmp_path / "restored") as restored:
        assert dict(restored.scan()) == {b"k": b"1"}
    with pytest.raises(HistoryGoneError):
        collection.label("late", first + 1)
    for name in ("first", "again"):
        assert collection.unlabel(name) == first
    with pytest.raises(UsageError, match="no label 'first'"):
        collection.unlabel("first")
    clock.advance(DAY)
    assert collection.expire(keep=timedelta(hours=1)) >= since
    with pytest.raises(HistoryGoneError):
        collection.open(first)
    assert collection.labels() == {"second": collection.list()[0].upper - 1}
    with pytest.raises(UsageError, match="keep_within"):
        collection.expire(hourly=3, keep=timedelta(1))
    with pytest.raises(UsageError, match="one of the three"):
        collection.expire(keep_within=timedelta(1), keep=timedelta(1))


def test_the_space_of_an_unlabelled_instant_is_freed_where_since_stands_still(
    aged: kvstore.Store, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "collection")
    aged.put(b"k", b"1")
    collection.backup(aged, label="first")
    aged.put(b"k", b"2")
    newest = collection.backup(aged).upper - 1
    for _ in range(2):
        assert collection.expire(before=newest) == newest
        assert collection.show().rows == 2
    collection.unlabel("first")
    assert collection.expire(before=newest) == newest
    assert collection.show().rows == 1
    collection.verify("contents", aged)


def test_an_older_chain_gives_the_space_of_its_last_label_back_also_behind_a_stopped_expiry(
    aged: kvstore.Store, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "collection")
    aged.put(b"k", b"1")
    collection.backup(aged, label="first")
    aged.put(b"k", b"2")
    limit = collection.backup(aged).upper - 1
    assert collection.expire(before=limit) == limit
    aged.put(b"k", b"3")
    collection.backup(aged)
    collection.backup(aged, full=True)
    rows = collection.show().rows
    collection.unlabel("first")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collection.expire(before=limit, progress=stop)
    assert (collection.show().kept, collection.show().rows) == ([], rows)
    collection.expire(before=limit)
    found = collection.show()
    assert (found.chains, found.rows) == (2, rows - 2)  # the first row of each chain
    with collection.open(limit) as reader:
        assert reader.get(b"k") == b"2"


def test_a_get_between_kept_instants_names_them(aged: kvstore.Store, tmp_path: Path) -> None:
    collection = backup.Collection(tmp_path / "collection")
    first = aged.put(b"k", b"1")
    collection.backup(aged)
    collection.label("first", first)
    aged.put(b"k", b"2")
    newest = aged.put(b"k", b"3")
    collection.backup(aged)
    assert collection.expire(before=newest) == newest
    with collection.open() as reader:
        for call in (reader.get, lambda key, at: reader.get_many([b"j", key], [newest, at])):
            with pytest.raises(HistoryGoneError, match=r"read at one of them$") as caught:
                call(b"k", first + 1)
            assert caught.value.nearest is not None
            assert caught.value.nearest[0] == first
            with pytest.raises(NotYetWrittenError) as late:
                call(b"k", collection.upper)
            assert "row" not in str(late.value)


def test_an_ended_chain_with_a_label_stays_readable_at_it(
    aged: kvstore.Store, clock: ManualClock, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "collection", clock=clock)
    aged.put(b"k", b"1")
    collection.backup(aged, label="old")
    aged.put(b"k", b"2")
    collection.backup(aged)
    clock.advance(DAY)
    collection.backup(aged, full=True)
    clock.advance(DAY)
    collection.expire(keep=timedelta(hours=1))
    assert collection.show().chains == 2
    with collection.open("old") as reader:
        assert reader.get(b"k") == b"1"
        assert reader.get(b"k", "old") == b"1"
    wanted, drilled = {collection.labels()["old"], collection.upper - 1}, set[int]()
    for _ in range(100):  # random drills prove both chains, also where no row is of a kept time
        drilled.add(collection.drill().at)
        if wanted <= drilled:
            break
    assert wanted <= drilled
    collection.unlabel("old")
    collection.expire(keep=timedelta(hours=1))  # the instant is given up, and the chain with it
    assert collection.show().chains == 1


@crash.each_depth
def test_a_killed_thinning_keeps_each_kept_instant(
    spawn: Any, tmp_path: Path, depth: crash.Depth
) -> None:
    def check(place: Path, killed: bool) -> None:
        with kvstore.open(place / "store", durability="async") as store:
            collection = backup.Collection(place / "collection")
            at = collection.labels()["kept"]
            for _ in range(2):
                with collection.open("kept") as reader:
                    assert dict(reader.scan()) == dict(store.scan(as_of=at))
                limit = collection.upper - 1
                assert collection.expire(before=limit) == limit
            with pytest.raises(HistoryGoneError):
                collection.open(at + 1)
            collection.backup(store)
            collection.verify()
        shutil.rmtree(place / "collection")

    steps = crash.at_the_steps(spawn, "thin", tmp_path, check, depth, backups=2)
    assert steps > 20
