"""Imports whose rows expire: their times come with the rows, in every way that an import has."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kvstore
import kvstore.bulk.loading
from kvstore import ManualClock, Store, Timestamp
from kvstore.bulk.pushes.pushes import PushedRows
from kvstore.bulk.row_files import file_rows
from kvstore.errors import ImportRefusedError, KeyConflictError, UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.mvcc.expiry_records import EXPIRY, WAITING, longest_key
from kvstore.testing.model import state_after
from kvstore.timeline.expiries import sent_expiry
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

pytestmark = pytest.mark.tiny_limits

START = 1_700_000_000_000_000_000
HOUR = 3600 * 10**9


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock, each_engine: str) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as opened:
        yield opened


def rows(dues: dict[bytes, int | None], kind: pa.DataType | None = None) -> pa.RecordBatch:
    times = pa.array(list(dues.values()), pa.int64())
    if kind is not None and pa.types.is_timestamp(kind):
        times = times.cast(pa.timestamp("ns", "UTC")).cast(kind)
    keys = pa.array(list(dues), pa.binary())
    values = pa.array([b"v"] * len(dues), pa.binary())
    return pa.record_batch({"key": keys, "value": values, "expires": times})


def staged(
    place: Path, *batches: pa.RecordBatch, import_id: int | None = None
) -> kvstore.bulk.Import:
    made = kvstore.bulk.Import.create(place, import_id=import_id)
    for batch in batches:
        with made.writer() as writer:
            writer.write(batch)
    made.seal()
    return made


@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("us", "Europe/Berlin")], ids=str)
def test_rows_of_an_import_expire_at_their_times(
    store: Store, clock: ManualClock, tmp_path: Path, kind: pa.DataType
) -> None:
    dues = {b"%02d" % n: START + n * HOUR if n % 3 else None for n in range(12)}
    made = staged(tmp_path / "staged", rows(dues, kind))
    at = kvstore.bulk.ingest(store, made.staging, thorough=True)
    assert store.count() == 12
    assert store.ttl(b"00") is None
    for hour in range(1, 13):
        clock.set(START + hour * HOUR)
        alive = [key for key, due in dues.items() if due is None or due > START + hour * HOUR]
        assert list(store.keys()) == alive
    assert [v.timestamp for v in store.history(b"07")] == [START + 7 * HOUR, at]
    middle = START + 6 * HOUR
    state = dict(store.scan(as_of=middle))
    assert state_after(state, store.changes(middle, store.upper - 1)) == dict(store.scan())


def test_puts_of_a_part_writer_expire(store: Store, clock: ManualClock, tmp_path: Path) -> None:
    made = kvstore.bulk.Import.create(tmp_path / "staged")
    with made.writer() as writer:
        writer.put(b"a", b"v", expires=datetime.fromtimestamp(START // 10**9 + 60, UTC))
        writer.put(b"b", b"v")
        writer.write(rows({b"c": START + HOUR}))
        writer.put(b"d", b"v", expires="2100-01-01T00:00:00Z")
    made.seal()
    kvstore.bulk.ingest(store, made.staging, move=True)
    clock.advance(HOUR)
    assert list(store.keys()) == [b"b", b"d"]
    assert store.history(b"a")[0].timestamp == START + 60 * 10**9


@pytest.mark.parametrize("expires", [timedelta(hours=1), "-1h", "now", START // 10**9, 0, True])
def test_a_time_of_no_moment_is_refused(tmp_path: Path, expires: Any) -> None:
    with (
        kvstore.bulk.Import.create(tmp_path / "staged").writer() as writer,
        pytest.raises(UsageError),
    ):
        writer.put(b"k", b"v", expires=expires)


def test_columns_that_cannot_be_are_refused(tmp_path: Path) -> None:
    texts = pa.array(["2100"], pa.string())
    naive = pa.array([START], pa.timestamp("ns"))
    seconds = pa.array([START // 10**9], pa.int64())
    for number, column in enumerate([texts, naive, seconds, pa.array([-5], pa.int64())]):
        made = kvstore.bulk.Import.create(tmp_path / f"staged-{number}")
        row = {"key": pa.array([b"k"]), "value": pa.array([b"v"]), "expires": column}
        with made.writer() as writer, pytest.raises(UsageError, match="expires"):
            writer.write(pa.record_batch(row))
    made = kvstore.bulk.Import.create(tmp_path / "others")
    with made.writer() as writer:
        for key in (b"k" * KEY_BYTES_MAX, EXPIRY + b"k"):
            with pytest.raises(UsageError, match="expires"):
                writer.write(rows({key: START}))
        deleted = rows({b"k": START}).append_column("op", pa.array(["delete"]))
        with pytest.raises(UsageError, match="deletes"):
            writer.write(deleted)
        writer.write(rows({b"l" * longest_key(): START}))


UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6}
NEVER = 253_402_214_400
"""The last day of 9999 in seconds, which often stands for "never"."""


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("moment", [NEVER, 1_900_000_000, 400_000_000_000])
def test_a_due_time_of_another_unit_is_refused_in_every_load(
    store: Store, tmp_path: Path, unit: str, moment: int
) -> None:
    """As nanoseconds it has long passed, so the rows would be deleted right after the load."""
    given = moment * UNITS[unit]
    if given > 253_402_300_800 * 10**6:
        return  # a year behind 9999
    numbers = pa.array([START + HOUR, None, given], pa.int64())
    instants = numbers.cast(pa.timestamp("ns", "UTC"))
    schema = pa.schema([("key", pa.string()), ("value", pa.string())])
    table = store.table("t", schema, key=["key"])
    texts = pa.table({"key": ["a", "b", "c"], "value": ["v"] * 3})
    for number, column in enumerate([numbers, instants, pa.array(numbers.dictionary_encode())]):
        whole = texts.append_column("due", column)
        path = tmp_path / f"{number}.parquet"
        pq.write_table(whole, path)
        refused = pytest.raises(UsageError, match=rf"due.* has {given} in row [23]")
        with refused:
            kvstore.bulk.loading.import_files(table, [path], "overwrite", "error", expires="due")
        with refused:
            list(file_rows([path], key="key", value="value", expires="due"))
        rows = PushedRows(table.codec(), 2)
        with refused:
            rows.add(whole, "due")
        rows.close()
        named = whole.rename_columns(["key", "value", "expires"])
        with pytest.raises(UsageError, match=f"{given} in row 2"):
            store.put_many(named)
        made = kvstore.bulk.Import.create(tmp_path / f"staged-{number}")
        binary = pa.schema([("key", pa.binary()), ("value", pa.binary())])
        batch = texts.cast(binary).append_column("expires", column).to_batches()[0]
        with made.writer() as writer, pytest.raises(UsageError, match=f"{given} in row 2"):
            writer.write(batch)
    with kvstore.bulk.Import.create(tmp_path / "one").writer() as writer:
        for due in (given, Timestamp(given), Timestamp(given).to_datetime()):
            with pytest.raises(UsageError, match="expires"):
                writer.put(b"k", b"v", expires=due)
    for call in (store.put, lambda *_, expires: table.put({"key": "k"}, expires=expires)):
        with pytest.raises(UsageError, match="expires"):
            call(b"k", b"v", expires=given)
    assert store.count() == 0
    assert list(table.rows()) == []


@pytest.mark.parametrize("never", ["9999-12-31T00:00:00Z", datetime(9999, 12, 31, tzinfo=UTC)])
def test_a_due_time_behind_the_last_one_is_told(store: Store, never: Any) -> None:
    with pytest.raises(UsageError, match=r"lies behind the last time, 2262-04-11"):
        store.put(b"k", b"v", expires=never)
    with pytest.raises(UsageError, match=r"lies behind the last time, 2262-04-11"):
        sent_expiry(never)
    column = pa.array([None, NEVER]).cast(pa.timestamp("s", "UTC"))
    texts = pa.table({"key": ["a", "b"], "value": ["v", "v"], "expires": column})
    with pytest.raises(UsageError, match=r"'expires' has 253402214400 s in row 1.*2262"):
        store.put_many(texts)


def test_a_time_that_passed_before_the_rows_came_deletes_them_right_after(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    made = staged(tmp_path / "staged", rows({b"a": START - HOUR, b"b": START + HOUR}))
    clock.advance(2 * HOUR)
    at = kvstore.bulk.ingest(store, made.staging)
    assert dict(store.scan(as_of=at)) == {b"a": b"v", b"b": b"v"}
    assert list(store.scan()) == []
    deleted = [store.history(key)[0].timestamp for key in (b"a", b"b")]
    assert deleted[0] == at + 1
    assert deleted[1] in (at + 1, at + 2)  # a step of its own is a commit of its own


def test_an_import_cancels_the_expiry_of_what_it_replaces_and_a_put_that_of_the_import(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    for key in (b"a", b"b", b"c"):
        store.put(key, b"old", expires=timedelta(hours=1))
    made = staged(tmp_path / "staged", rows({b"a": None, b"b": START + 2 * HOUR, b"c": START}))
    kvstore.bulk.ingest(store, made.staging)
    store.put(b"c", b"new")
    clock.advance(HOUR)
    assert list(store.keys()) == [b"a", b"b", b"c"]
    clock.advance(HOUR)
    assert list(store.keys()) == [b"a", b"c"]


def test_what_a_revert_brings_back_does_not_expire(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    """Whether or not the import had times, and whether the old time has passed or lies ahead."""
    hours = {b"a": 1, b"b": 3, b"c": 1, b"d": 3, b"e": 3}
    for key, hour in hours.items():
        store.put(key, b"old", expires=Timestamp(START + hour * HOUR))
    dues = {b"a": START + 4 * HOUR, b"b": START + 4 * HOUR, b"c": None, b"d": None}
    made = staged(tmp_path / "staged", rows({**dues, b"e": START + 3 * HOUR, b"f": START + HOUR}))
    kvstore.bulk.ingest(store, made.staging)
    clock.advance(2 * HOUR)
    assert list(store.keys()) == [b"a", b"b", b"c", b"d", b"e"]
    store.revert_import(made.import_id)
    for _ in range(2):
        assert dict(store.scan()) == dict.fromkeys(hours, b"old")
        assert {store.ttl(key) for key in hours} == {None}
        store.gc(before=store.sync() - 1)
        clock.advance(10 * HOUR)
    assert store.verify().problems == ()


def test_of_two_imports_the_revert_of_the_later_one_leaves_no_expiry(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    made = [staged(tmp_path / f"{n}", rows({b"k": START + HOUR})) for n in range(2)]
    for each in made:
        kvstore.bulk.ingest(store, each.staging)
    store.revert_import(made[1].import_id)
    clock.advance(2 * HOUR)
    assert store.get(b"k") == b"v"


def test_a_record_that_waits_is_no_live_key_in_the_way(store: Store, tmp_path: Path) -> None:
    store.put(b"a", b"v", expires=timedelta(hours=1))
    store.delete(b"a")  # its record stays until its time
    made = staged(tmp_path / "staged", rows({b"a": START + HOUR, b"b": None}))
    kvstore.bulk.ingest(store, made.staging, on_conflict="error")
    again = staged(tmp_path / "again", rows({b"a": START + HOUR}))
    with pytest.raises(KeyConflictError) as refused:
        kvstore.bulk.ingest(store, again.staging, on_conflict="error")
    assert refused.value.keys == (b"a",)


def test_a_store_that_was_closed_meanwhile_deletes_the_rows_at_their_times(
    tmp_path: Path, clock: ManualClock, each_engine: str
) -> None:
    made = staged(tmp_path / "staged", rows({b"a": START + HOUR, b"b": START + 2 * HOUR}))
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        kvstore.bulk.ingest(store, made.staging)
    clock.advance(10 * HOUR)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        assert list(store.scan()) == []
        assert store.history(b"a")[0].timestamp == START + HOUR
        assert store.history(b"b")[0].timestamp == START + 2 * HOUR


def test_records_are_sorted_in_bounded_memory_over_parts_that_cross(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    pick = seeded("KVSTORE_SEED")
    dues = {b"%04d" % n: START + 1000 * pick.randrange(1, 1000) for n in range(600)}
    parts = [dict(list(dues.items())[first::3]) for first in range(3)]
    with bounds(RUN_BYTES_MAX=5000, RUN_BLOCK_BYTES=500):
        made = kvstore.bulk.Import.create(tmp_path / "staged")
        for part in parts:
            with made.writer() as writer:
                for first in range(0, len(part), 100):
                    writer.write(rows(dict(list(part.items())[first : first + 100])))
        manifest = made.seal()
    assert not [path for path in made.staging.iterdir() if path.is_dir()]
    assert (manifest.rows, manifest.has_expiries) == (1800, True)
    kvstore.bulk.ingest(store, made.staging, thorough=True)
    clock.set(now := START + 500_000)
    assert list(store.keys()) == [key for key, due in dues.items() if due > now]
    late = [key for key in dues if store.history(key)[0].timestamp != dues[key]]
    assert all(dues[key] > now for key in late)


def test_a_writer_that_is_abandoned_leaves_no_file(tmp_path: Path) -> None:
    made = kvstore.bulk.Import.create(tmp_path / "staged")
    with bounds(RUN_BYTES_MAX=1):
        writer = made.writer()
        writer.write(rows({b"a": START}))
        assert len(list(made.staging.iterdir())) == 3
        writer.abandon()
    assert list(made.staging.iterdir()) == []


def test_crafted_records_are_refused(store: Store, tmp_path: Path) -> None:
    """Rows among the records that no writer of expiries makes."""
    crafted = {
        "ends": [WAITING + b"short"],
        "no record": [EXPIRY + b"z"],
        "carried": [EXPIRY + b"kb"],
        "inside": [WAITING + bytes(16) + b"a", WAITING + b"\0" * 3, WAITING + bytes(15) + b"\1b"],
    }
    for name, keys in crafted.items():
        made = kvstore.bulk.Import.create(tmp_path / name)
        with made.writer() as writer:
            writer.write(rows({b"a": START + HOUR}))
        with made.writer() as writer:
            for key in sorted(keys):
                writer.put(key, b"v")
        made.seal()
        with pytest.raises(ImportRefusedError):
            kvstore.bulk.ingest(store, made.staging, thorough=True)
    assert list(store.scan()) == []
    plain = kvstore.bulk.Import.create(tmp_path / "plain")  # no format that has records
    with plain.writer() as writer:
        writer.put(WAITING + bytes(16) + b"a", b"")
    plain.seal()
    with pytest.raises(UsageError, match="belong to tables"):
        kvstore.bulk.ingest(store, plain.staging)


def test_put_many_takes_a_column(store: Store, clock: ManualClock) -> None:
    batch = rows({b"a": START + HOUR, b"b": None, b"c": START + 2 * HOUR})
    store.put_many(batch)
    with store.transaction() as txn:
        txn.put_many(pa.table({"key": [b"d"], "value": [b"v"]}), expires=timedelta(hours=1))
        txn.put_many(rows({b"e": START + 3 * HOUR, b"f": None}), expires=timedelta(hours=1))
    with pytest.raises(UsageError, match="ahead"):
        store.put_many(rows({b"g": START - 1}))
    clock.advance(HOUR + 10)
    assert list(store.keys()) == [b"b", b"c", b"e"]
    kinds = [pa.int64(), pa.timestamp("s", "UTC"), pa.uint64()]
    for kind in kinds:
        times = pa.array(np.array([START + 9 * HOUR]) // (1 if kind != kinds[1] else 10**9), kind)
        store.put_many(pa.table({"key": [b"h"], "value": [b"v"], "expires": times}))
        assert store.ttl(b"h") == timedelta(hours=8) - timedelta(microseconds=1)
