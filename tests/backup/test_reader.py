"""Reads from a collection equal the reads of its store, for every kind of history."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import backup
from kvstore.backup.reading import CollectionReader
from kvstore.backup.shard import MemoryBlob, MemoryConsensus, Storage
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    DeterminateError,
    HistoryGoneError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.storage.patience import Patience
from kvstore.tables import Table
from tests.backup.histories import KEYS, Instants, live_through, parts_of
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded
from tests.harness.storage_faults import FaultRates, FaultyBlob, FaultyConsensus, Weather

SEED = "KVSTORE_READER_SEED"
CLEAR = FaultRates(refused=0.0, lost_reply=0.0, torn=0.0, delayed=0.0, stale=0.0)


@pytest.fixture
def instants(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> Iterator[Instants]:
    with bounds(PART_WHOLE_BYTES_MAX=256, PART_BLOCK_BYTES=512):
        seed = seeded(SEED).randrange(1 << 32)
        yield live_through(store, collection, tmp_path / "staging", seed=seed)


def agree(reader: CollectionReader, store: kvstore.Store, at: int, pick: random.Random) -> None:
    """Every verb gives what the store gives."""
    as_of = kvstore.Timestamp(at)
    keys = [b"k%02d" % number for number in range(KEYS + 2)]
    assert reader.get_many(keys, as_of) == store.get_many(keys, as_of)
    for key in pick.sample(keys, 5):
        assert reader.get(key, as_of) == store.get(key, as_of)
        found, expected = (
            [version for version in versions if reader.since < version.timestamp < reader.upper]
            for versions in (reader.history(key), store.history(key))
        )
        assert found == expected
    assert list(reader.scan(as_of=as_of)) == list(store.scan(as_of=as_of))
    start, end = sorted(pick.sample(keys, 2))
    for reverse in (False, True):
        limit = pick.choice([None, 0, 1, 7])
        rows = reader.scan(start, end, as_of=as_of, reverse=reverse, limit=limit)
        assert list(rows) == list(store.scan(start, end, as_of=as_of, reverse=reverse, limit=limit))
    for prefix in (None, b"k1", b"x"):
        theirs = store.floor_many(keys, as_of, prefix)
        assert reader.floor_many(keys, as_of, prefix) == theirs
        assert reader.floor_many(keys, [as_of] * len(keys), prefix) == theirs
        assert reader.floor(keys[-1], as_of, prefix) == theirs[-1]
    batches = list(reader.scan_batches(as_of=as_of, batch_rows=3))
    assert all(0 < batch.num_rows <= 3 for batch in batches)
    assert sum(batch.num_rows for batch in batches) == store.count(as_of=as_of)
    since = kvstore.Timestamp(pick.randrange(max(reader.since, store.since), at + 1))
    for revisions in ("all", "latest"):
        for low in (since, 0) if revisions == "latest" else (since,):
            changed = list(store.changes(low, as_of, start, end, revisions))  # type: ignore[arg-type]
            assert list(reader.changes(low, as_of, start, end, revisions)) == changed  # type: ignore[arg-type]
            by_time = list(reader.changes(low, as_of, start, end, revisions, "time"))  # type: ignore[arg-type]
            assert sorted(by_time) == sorted(changed)
            assert [c.timestamp for c in by_time] == sorted(c.timestamp for c in changed)
    labels = pa.table({"id": keys, "ts": [at - pick.randrange(9) for _ in keys]})
    assert reader.join(labels).read_all() == store.join(labels).read_all()


def test_reads_equal_the_stores_as_of_any_time(
    store: kvstore.Store, collection: backup.Collection, instants: Instants, tmp_path: Path
) -> None:
    pick = random.Random(4)
    with collection.open(cache=tmp_path / "cache") as reader:
        for at in pick.sample(instants, 3):
            if at >= reader.since + 10:
                agree(reader, store, at, pick)
    with collection.open() as reader:
        agree(reader, store, reader.upper - 1, pick)


def test_reads_stay_right_over_compaction_and_expiry_beside_them(
    store: kvstore.Store, collection: backup.Collection, instants: Instants, tmp_path: Path
) -> None:
    pick = random.Random(5)
    other = backup.Collection(tmp_path / "collection")
    with collection.open(cache=tmp_path / "cache", cache_bytes=4000) as reader:
        rows = reader.scan(as_of=instants[-1])
        first = next(rows)
        other.compact()
        other.expire(before=instants[40])
        agree(reader, store, instants[30], pick)  # the lease of the reader holds it
        assert [first, *rows] == list(store.scan(as_of=instants[-1]))
        store.put(b"k01", b"after")
        other.backup(store)
        assert reader.get(b"k01") != b"after"
        assert reader.refresh() == other.upper
        assert reader.get(b"k01") == b"after"
        other.expire(before=instants[80])
        reader.refresh()
        assert reader.since == instants[80]
        with pytest.raises(HistoryGoneError):
            reader.get(b"k01", instants[79])
        agree(reader, store, instants[100], pick)
    other.expire(before=instants[100])
    assert other.since == instants[100]  # the leases have ended


def test_a_reader_whose_lease_ran_out_takes_another(
    store: kvstore.Store, collection: backup.Collection, instants: Instants, tmp_path: Path
) -> None:
    other = backup.Collection(tmp_path / "collection")
    with bounds(LEASE_NS=1), collection.open() as reader:
        store.put(b"k01", b"after")
        other.backup(store)
        other.expire(before=other.upper - 1)
        assert len(parts_of(tmp_path / "collection")) == 1
        assert reader.get_many([b"k01", b"k02"]) == store.get_many([b"k01", b"k02"])
        with pytest.raises(HistoryGoneError):
            reader.get(b"k01", instants[5])


def test_reads_of_many_rows_take_another_lease_too(
    store: kvstore.Store, collection: backup.Collection, instants: Instants, tmp_path: Path
) -> None:
    """A reader that was idle for long: backups beside it were merged meanwhile."""
    other = backup.Collection(tmp_path / "collection")
    keys = [b"k%02d" % number for number in range(KEYS)]

    def labels(reader: CollectionReader) -> pa.Table:
        return pa.table({"id": keys, "ts": [int(reader.upper) - 1 for _ in keys]})

    reads: list[Callable[[CollectionReader | kvstore.Store], object]] = [
        lambda of: list(of.scan(as_of=at)),
        lambda of: list(of.scan(reverse=True, as_of=at, limit=3)),
        lambda of: list(of.changes(0, at, revisions="latest")),
        lambda of: of.join(asked).read_all(),
    ]
    for number, read in enumerate(reads):
        with bounds(LEASE_NS=1), collection.open() as reader:
            at, asked = reader.as_of, labels(reader)
            store.put(b"k00", b"after %d" % number)
            other.backup(store)
            other.compact()
            assert read(reader) == read(store)
    with bounds(LEASE_NS=1), collection.open() as reader:
        at = reader.as_of
        rows, changes = reader.scan(as_of=at), reader.changes(reader.since)
        newest = reader.scan()
        store.put(b"k00", b"last")
        other.backup(store)
        other.expire(before=other.upper - 1)
        with pytest.raises(HistoryGoneError):
            next(rows)
        with pytest.raises(HistoryGoneError):
            next(changes)
        assert list(newest) == list(store.scan(as_of=reader.upper - 1))


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_a_reader_goes_on_after_a_storage_that_failed_at_any_step(
    store: kvstore.Store, stride: int
) -> None:
    """The leases have run out, the parts are gone, and each request in turn is the last one."""
    pick, left = seeded("KVSTORE_STEPS_SEED"), math.inf

    def request() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise DeterminateError("the bucket", "refused")

    patience = Patience(4, pause=lambda _: None, monotonic=itertools.count().__next__)
    place = Storage(MemoryBlob(patience=patience), MemoryConsensus())
    weather = Weather(0, CLEAR, on_call=request)
    failing = Storage(FaultyBlob(place.blob, weather), FaultyConsensus(place.consensus, weather))
    reading, other = (backup.Collection("c", storage=each) for each in (failing, place))
    first = store.put(b"a", b"first")
    other.backup(store)
    reads: list[Callable[[CollectionReader], object]] = [
        lambda of: of.get(b"a"),
        lambda of: of.refresh(),
        lambda of: list(of.scan()),
    ]
    for read in reads:
        for steps in range(pick.randrange(stride), 100, stride):
            other.backup(store, full=steps < stride)
            left = math.inf
            with bounds(LEASE_NS=1), reading.open() as reader:
                store.put(b"a", b"%d" % steps)
                other.backup(store)
                other.compact()
                left, failed = steps, False
                try:
                    read(reader)
                except DeterminateError:
                    failed = True
                left = math.inf
                assert reader.get(b"a") == store.get(b"a")
                assert reader.get(b"a", first) == b"first"
            if not failed:
                break
        assert stride < steps < 100 - stride


def test_times_outside_the_chains_are_refused(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    with pytest.raises(UsageError, match="no backup"):
        collection.open()
    store.put(b"a", b"1")
    collection.backup(store)
    between = store.put(b"a", b"2")
    store.gc(before=store.upper - 1)
    collection.backup(store, full=True)
    with collection.open() as reader:
        assert reader.get(b"a") == b"2"
        with pytest.raises(NotYetWrittenError):
            reader.get(b"a", reader.upper)
        old = collection.list()[0].upper
        assert reader.get(b"a", old - 1) == b"1"
        if reader.since > old:
            with pytest.raises(HistoryGoneError):
                reader.get(b"a", old)
        with pytest.raises(NotYetWrittenError):
            collection.open(as_of=reader.upper + 10**9)
    assert between < reader_upper(collection)
    with pytest.raises(ClosedError):
        reader.get(b"a")
    with collection.open(as_of=kvstore.Timestamp(old - 1)) as pinned:
        assert (pinned.as_of, pinned.get(b"a"), list(pinned.scan())) == (
            old - 1,
            b"1",
            [(b"a", b"1")],
        )


def reader_upper(collection: backup.Collection) -> kvstore.Timestamp:
    with collection.open() as reader:
        return reader.upper


def test_keys_that_expire_are_absent_after_their_time(tmp_path: Path) -> None:
    clock = kvstore.ManualClock(10**18)
    collection = backup.Collection(tmp_path / "collection", clock=clock)
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        store.put(b"a", b"1", expires=timedelta(seconds=5))
        store.put(b"b", b"2")
        before = kvstore.Timestamp(store.upper - 1)
        clock.advance(10 * 10**9)
        assert store.get(b"a") is None
        collection.backup(store)
        with collection.open() as reader:
            assert reader.get(b"a") is None
            assert reader.get(b"a", before) == b"1"
            assert list(reader.scan()) == [(b"b", b"2")]
            assert reader.history(b"a") == store.history(b"a")
            assert list(reader.changes("oldest")) == list(store.changes("oldest"))


def test_a_table_is_read_with_the_columns_of_its_time(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    table = store.table("people", schema, key=["id"], indexes={"by_name": ["name"]})
    table.put({"id": 1, "name": "Ada"})
    at = kvstore.Timestamp(store.upper - 1)
    table.put({"id": 2, "name": "Grace"})
    store.put(b"plain", b"1")
    collection.backup(store)
    with collection.open() as reader:
        assert rows_in(reader.table("people")) == rows_in(table)
        assert rows_in(reader.table("people", at)) == [{"id": 1, "name": "Ada"}]
        assert reader.table("people").get(2) == table.get(2)
        for name in ("Ada", "Grace", "none"):
            found = reader.table("people").find("by_name", name)
            assert list(found) == list(table.find("by_name", name))
        assert list(reader.scan()) == [(b"plain", b"1")]
        with pytest.raises(UsageError, match="no table"):
            reader.table("cities")


def rows_in(table: Table) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pa.Table.from_batches(table.scan()).to_pylist()
    return rows


def test_every_damaged_byte_of_a_part_is_an_error_or_the_right_answer(
    store: kvstore.Store, collection: backup.Collection, instants: Instants, tmp_path: Path
) -> None:
    pick = random.Random(6)
    keys = [b"k%02d" % number for number in range(KEYS)]
    expected = store.get_many(keys, instants[-1])
    collection.compact()
    (path,) = parts_of(tmp_path / "collection")
    whole = path.read_bytes()
    errors = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[pick.randrange(len(whole))] ^= 1 << pick.randrange(8)
        cut = whole[: pick.randrange(len(whole))]
        for data in (bytes(damaged), cut):
            path.write_bytes(data)
            with collection.open() as reader:
                try:
                    assert reader.get_many(keys, instants[-1]) == expected
                except CorruptionError as error:
                    errors += path.stem in error.where
    assert errors > 60


def test_a_damaged_part_that_was_mended_is_fetched_anew(
    store: kvstore.Store, collection: backup.Collection, instants: Instants, tmp_path: Path
) -> None:
    collection.compact()
    (path,) = parts_of(tmp_path / "collection")
    whole = path.read_bytes()
    keys = [b"k%02d" % number for number in range(KEYS)]
    with collection.open(cache=tmp_path / "cache") as reader:
        path.write_bytes(bytes(len(whole)))
        with pytest.raises(CorruptionError):
            reader.get_many(keys)
        path.write_bytes(whole)
        assert reader.get_many(keys) == store.get_many(keys, reader.as_of)


def test_a_cache_stays_at_its_place(
    store: kvstore.Store,
    collection: backup.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program may change its directory while it reads."""
    store.put(b"k", b"v")
    collection.backup(store)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with collection.open(cache="cache") as reader:
        monkeypatch.chdir(tmp_path / "other")
        assert reader.get(b"k") == b"v"
    assert [path for path in (tmp_path / "cache").rglob("*") if path.stat().st_size > 1]
    with pytest.raises(UsageError, match="cache s3://bucket/cache is a URL"):
        collection.open(cache="s3://bucket/cache")
