"""Tables of a store: rows at every time, in snapshots, transactions and batches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import Span, desc, unique
from kvstore.base.span import RESERVED
from kvstore.bulk.manifest import EncodedBy
from kvstore.errors import (
    ClosedError,
    ConflictError,
    FormatVersionError,
    ImportRefusedError,
    NotUniqueError,
    NotYetWrittenError,
    TableAlteredError,
    UsageError,
)

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
SCHEMA = pa.schema(
    [
        ("vendor", pa.string()),
        ("trip_id", pa.int64()),
        ("zone", pa.string()),
        ("pickup", pa.timestamp("us", "UTC")),
        ("fare", pa.float64()),
    ]
)
INDEXES = {"by_zone": ["zone", desc("pickup")]}


def trip(
    vendor: str = "A", number: int = 7, zone: str | None = "JFK", **more: Any
) -> dict[str, Any]:
    row = {"vendor": vendor, "trip_id": number, "zone": zone, "pickup": NOON, "fare": 12.5}
    return row | more


@pytest.fixture
def store(tmp_path: Path, each_engine: str) -> Any:
    with kvstore.open(tmp_path / "store", durability="async") as opened:
        yield opened


@pytest.fixture
def trips(store: kvstore.Store) -> kvstore.Table:
    return store.table("trips", SCHEMA, key=["vendor", "trip_id"], indexes=INDEXES)


def test_rows_are_there_at_every_time(store: kvstore.Store, trips: kvstore.Table) -> None:
    before = store.sync() - 1
    first = trips.put(trip())
    second = trips.update("A", 7, fare=15.0)
    third = trips.delete("A", 7)
    assert trips.get("A", 7) is None
    assert trips.get("A", 7, as_of=before) is None
    assert trips.get("A", 7, as_of=first) == trip()
    assert trips.get("A", 7, as_of=second, columns=["fare"]) == {"fare": 15.0}
    assert trips.get_many([("A", 7), ("B", 1)], as_of=second) == [trip(fare=15.0), None]
    assert list(trips.rows(as_of=third)) == []
    assert trips.scan(as_of=first).read_all().to_pylist() == [trip()]
    assert list(trips.find("by_zone", "JFK", as_of=second)) == [trip(fare=15.0)]
    assert [(each.timestamp, each.row) for each in trips.history("A", 7)] == [
        (third, None),
        (second, trip(fare=15.0)),
        (first, trip()),
    ]


def test_scans_take_prefixes_of_the_key_both_ways(trips: kvstore.Table) -> None:
    rows = [trip(vendor, number) for vendor in ("A", "B\x00", "C") for number in range(-3, 4)]
    trips.put_batch(pa.Table.from_pylist(rows[::-1], SCHEMA))
    assert trips.scan().read_all().to_pylist() == rows
    assert trips.scan().schema == trips.schema
    assert list(trips.rows("B\x00")) == rows[7:14]
    assert list(trips.rows("B\x00", reverse=True, limit=2)) == rows[7:14][::-1][:2]
    assert trips.scan(columns=["fare", "vendor"], limit=1).read_all().to_pylist() == [
        {"fare": 12.5, "vendor": "A"}
    ]
    assert trips.scan(columns=[]).read_all().num_rows == len(rows)


def test_of_many_that_insert_a_row_at_once_one_succeeds(
    store: kvstore.Store, trips: kvstore.Table
) -> None:
    """A row that was deleted is in nobody's way."""
    rows = [trip(fare=float(number)) for number in range(8)]

    def inserted(row: dict[str, Any]) -> bool:
        try:
            return trips.insert(row) is not None
        except NotUniqueError:
            return False

    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            done = list(threads.map(inserted, rows))
            assert done.count(True) == 1
            assert trips.get("A", 7) == rows[done.index(True)]
            trips.delete("A", 7)
    trips.insert(rows[1])
    with store.transaction() as transaction, pytest.raises(NotUniqueError):
        transaction.table("trips").insert(rows[2])
    with store.batch() as batch, pytest.raises(UsageError, match="use a transaction"):
        batch.table("trips").insert(trip(number=8))
    assert list(trips.rows()) == [rows[1]]


def test_rows_are_counted_and_deleted_by_their_keys(
    store: kvstore.Store, trips: kvstore.Table
) -> None:
    before = trips.put_batch([trip(v, n) for v in "ABC" for n in range(5)])
    keys = [("A", 1), ["B", 2], ("C", 99), ("A", 1)]
    gone = trips.delete_many(key for key in keys)
    assert trips.delete_many([]) is None
    assert (trips.count(), trips.count("A"), trips.count("A", 1)) == (13, 4, 0)
    assert trips.count("A", as_of=before) == 5
    assert len(list(trips.find("by_zone", "JFK"))) == 13
    assert store.history(trips.codec().key.whole_key(("A", 1)))[0].timestamp == gone
    with pytest.raises(UsageError, match="no key"):
        trips.delete_many(["A"])
    with store.snapshot(before) as snapshot:
        assert snapshot.table("trips").count("B") == 5
    with store.transaction() as transaction:
        transaction.table("trips").delete_many([("B", n) for n in range(5)])
        assert transaction.table("trips").count("B") == 0
    assert (trips.count(), trips.count("B")) == (9, 0)


def test_a_key_that_is_too_long_is_refused_by_each_write(
    store: kvstore.Store, trips: kvstore.Table
) -> None:
    for row in (trip("v" * 70_000), trip(zone="z" * 70_000)):
        for rows in (row, [row], pa.Table.from_pylist([row], SCHEMA)):
            write = trips.put if rows is row else trips.put_batch
            with pytest.raises(UsageError, match="at most 65536 are allowed"):
                write(rows)
    assert list(store.keys(RESERVED + b"\x01")) == []


def test_a_table_is_found_again_and_no_other_is_made_in_its_place(
    store: kvstore.Store, trips: kvstore.Table, tmp_path: Path
) -> None:
    trips.put(trip())
    with pytest.raises(UsageError, match="there is no table 'taxis'; there are trips"):
        store.table("taxis")
    store.close()
    with kvstore.open(tmp_path / "store") as again:
        assert again.tables() == ["trips"]
        found = again.table("trips")
        assert found.get("A", 7) == trip()
        assert (found.schema.names, found.key) == (SCHEMA.names, ["vendor", "trip_id"])
        assert found.indexes == {"by_zone": ["zone", desc("pickup")]}
        same = again.table("trips", SCHEMA, key=["vendor", "trip_id"])
        assert same.get("A", 7) == trip()
        for options, says in OTHERS.values():
            given: dict[str, Any] = {"schema": SCHEMA, "key": ["vendor", "trip_id"], **options}
            with pytest.raises(UsageError) as caught:
                again.table("trips", **given)
            assert says in str(caught.value)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a column besides": (
        {"schema": SCHEMA.append(pa.field("tip", pa.float64()))},
        "has no column 'tip'; open it by its name alone",
    ),
    "a column less": ({"schema": SCHEMA.remove(4)}, "a column 'fare' besides"),
    "another type": (
        {"schema": SCHEMA.set(4, pa.field("fare", pa.float32()))},
        "column 'fare' double, not float",
    ),
    "another key": ({"key": ["trip_id", "vendor"]}, "the key vendor, trip_id, not trip_id, vendor"),
    "a falling key": ({"key": ["vendor", desc("trip_id")]}, "not vendor, desc(trip_id)"),
    "another index": ({"indexes": {"by_zone": ["zone"]}}, "another index 'by_zone'"),
    "an event time": (
        {"key": ["vendor", "trip_id"], "event_time": "pickup"},
        "the key vendor, trip_id, not vendor, trip_id, desc(pickup)",
    ),
}


def test_plain_calls_leave_tables_alone(store: kvstore.Store, trips: kvstore.Table) -> None:
    store.put(b"a", b"1")
    feed = store.feed("feed", start=0)
    trips.put(trip())
    end = store.put(b"\xff" * 8, b"2")
    keys = [b"a", b"\xff" * 8]
    assert [key for key, _ in store.scan()] == keys
    assert [key for key, _ in store.scan(reverse=True, limit=1)] == keys[1:]
    assert [key for key, _ in store.scan(prefix=b"\xff")] == keys[1:]
    assert store.scan_batches().read_all().column("key").to_pylist() == keys
    assert [change.key for change in store.changes(0)] == keys
    assert [event.key for event in store.events(0)] == keys
    assert [event.key for batch in feed for event in batch.events] == keys
    assert store.changes_batches(0).read_all().column("key").to_pylist() == keys
    with store.transaction() as txn:
        assert [key for key, _ in txn.scan()] == keys
    assert store.floor(RESERVED[:-1] + b"\xfe") == (keys[1], b"2")
    asked = [key for key, _ in store.scan(start=RESERVED)]
    assert len(asked) == 3
    assert [event.key for event in store.events(0, span=Span(RESERVED))] == sorted(asked)
    for refused in (
        lambda: store.put(RESERVED, b""),
        lambda: store.delete(asked[0]),
        lambda: store.put_if(asked[1], b"", expected=None),
        lambda: store.pop(asked[1]),
        lambda: store.delete_range(RESERVED, RESERVED + b"a"),
        lambda: store.clear_range(RESERVED, b"\xff" * 20),
    ):
        with pytest.raises(UsageError, match="belongs to tables"):
            refused()
    with pytest.raises(UsageError, match="belongs to tables"), store.batch() as batch:
        batch.put(RESERVED + b"a", b"")
    store.delete_range(b"", b"\xff" * 20)
    assert list(store.scan()) == []
    assert trips.get("A", 7) == trip()
    assert store.floor(b"\xff" * 20) is None
    store.revert_range(b"", None, to=end)
    assert [key for key, _ in store.scan()] == keys
    with pytest.raises(UsageError, match="needs an end"):
        store.clear_range(b"", None)  # type: ignore[arg-type]  # what a user may pass
    now = store.now()
    for as_of in (None, now, [now, now]):
        last, below = store.floor_many([b"\xff" * 20, RESERVED], as_of=as_of)
        assert last == below
        assert last is not None
        assert last[0] == keys[-1]
    feed.close()
    store.drop_hold(store.holds.all()[0].name)
    store.clear_range(b"", b"\xff" * 20)
    assert list(store.scan()) == []
    assert trips.get("A", 7) == trip()
    assert len(trips.history("A", 7)) == 1


def test_transactions_see_their_rows_and_conflict(
    store: kvstore.Store, trips: kvstore.Table
) -> None:
    trips.put(trip())
    with store.transaction() as txn:
        table = txn.table("trips")
        table.update("A", 7, zone="LGA")
        table.put(trip("B", 1))
        assert list(table.rows()) == [trip(zone="LGA"), trip("B", 1)]
        assert list(table.find("by_zone", "JFK")) == [trip("B", 1)]
        assert trips.get("B", 1) is None
    assert list(trips.find("by_zone", "LGA")) == [trip(zone="LGA")]
    txn = store.transaction()
    table = txn.table("trips")
    found = list(table.find("by_zone", "EWR"))
    trips.put(trip("C", 1, "EWR"))  # a phantom
    table.put(trip("C", 2, fare=float(len(found))))
    with pytest.raises(ConflictError):
        txn.commit()


def test_batches_write_rows_beside_keys(store: kvstore.Store, trips: kvstore.Table) -> None:
    trips.put(trip())
    with store.batch() as batch:
        batch.put(b"key", b"value")
        table = batch.table("trips")
        table.put(trip(zone="LGA"))
        table.delete("B", 1)
    assert trips.get("A", 7) == trip(zone="LGA")
    assert trips.history("A", 7)[0].timestamp == batch.timestamp
    assert list(trips.find("by_zone")) == [trip(zone="LGA")]
    with pytest.raises(UsageError, match="cannot be read in a batch"), store.batch() as batch:
        batch.table("trips").get("A", 7)


def test_snapshots_have_the_columns_of_their_time(
    store: kvstore.Store, trips: kvstore.Table
) -> None:
    at = trips.put(trip())
    with store.snapshot() as snapshot:
        trips.alter(add={"tip": (pa.float64(), 1.0)}, drop=["fare"])
        trips.put(
            trip("B", 1) | {"tip": 2.0} if False else _without_fare(trip("B", 1)) | {"tip": 2.0}
        )
        old = snapshot.table("trips")
        assert list(old.rows()) == [trip()]
        assert list(old.find("by_zone", "JFK")) == [trip()]
        assert old.schema == SCHEMA.set(0, SCHEMA.field(0).with_nullable(False)).set(
            1, SCHEMA.field(1).with_nullable(False)
        )
        with pytest.raises(UsageError, match="cannot be written here"):
            old.put(trip())
        with pytest.raises(UsageError, match="a snapshot has one time"):
            old.get("A", 7, as_of=at)
    assert list(trips.rows()) == [
        _without_fare(trip()) | {"tip": 1.0},
        _without_fare(trip("B", 1)) | {"tip": 2.0},
    ]
    assert list(trips.rows(as_of=at)) == [trip()]


def test_a_snapshot_answers_up_to_its_time(store: kvstore.Store, trips: kvstore.Table) -> None:
    first = trips.put(trip(fare=1.0))
    with store.snapshot() as snapshot:
        later = trips.put(trip(fare=2.0))
        old = snapshot.table("trips")
        (version,) = old.history("A", 7)
        assert (version.timestamp, version.row) == (first, trip(fare=1.0))
        assert old.changes(0).read_all()["fare"].to_pylist() == [1.0]
        labels = pa.table({"vendor": ["A"], "trip_id": [7]})
        alone = old.join(labels, ["vendor", "trip_id"], at=None, columns=["fare"]).read_all()
        beside = kvstore.join(labels, [kvstore.Join(old, columns=["fare"])], at=None).read_all()
        assert alone["fare"].to_pylist() == beside["fare"].to_pylist() == [1.0]
        late = pa.table({**labels.to_pydict(), "ts": [int(later or 0)]})
        for ask in (
            lambda: old.join(late, ["vendor", "trip_id"]).read_all(),
            lambda: kvstore.join(late, [old]).read_all(),
            lambda: old.changes(first or 0, later),
        ):
            with pytest.raises(NotYetWrittenError):
                ask()
    for ask in (lambda: old.history("A", 7), lambda: old.join(labels, ["vendor", "trip_id"], None)):
        with pytest.raises(ClosedError):
            ask()


def _without_fare(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "fare"}


def test_of_two_that_alter_at_once_one_is_told(store: kvstore.Store, trips: kvstore.Table) -> None:
    other = store.table("trips")
    with store.transaction() as txn:
        txn.table("trips").put(trip())
        other.alter(add={"tip": pa.float64()})
        with pytest.raises(ConflictError):
            txn.commit()
    assert trips.schema.names[-1] == "tip"

    class Slow:
        def __init__(self) -> None:
            self.turn = 0

        def __call__(self, definition: Any) -> Any:
            other.alter(drop=["tip"])
            return definition

    from kvstore.tables.catalogue import change

    with pytest.raises(TableAlteredError, match="table 'trips' was altered by another call"):
        change(store.transaction, trips.codec().definition, Slow())
    assert trips.schema.names[-1] == "fare"


def test_rows_of_unique_indexes_do_not_meet(store: kvstore.Store) -> None:
    schema = pa.schema([("id", pa.int64()), ("mail", pa.string()), ("name", pa.string())])
    people = store.table("people", schema, key="id", indexes={"by_mail": unique("mail")})
    people.put({"id": 1, "mail": "a@b"})
    people.put_batch([{"id": 2, "mail": None}, {"id": 3, "mail": None}])
    for refused in (
        lambda: people.put({"id": 4, "mail": "a@b"}),
        lambda: people.update(2, mail="a@b"),
        lambda: people.put_batch([{"id": 4, "mail": "c"}, {"id": 5, "mail": "c"}]),
        lambda: people.put_batch(pa.table({"id": [4, 5], "mail": ["c", "c"]})),
        lambda: people.put_batch(pa.table({"id": [4, 5], "mail": ["c", "a@b"]})),
    ):
        with pytest.raises(
            NotUniqueError, match=r"index 'by_mail': mail='.*' is taken by the row id="
        ):
            refused()
    assert [row["id"] for row in people.rows()] == [1, 2, 3]
    people.put({"id": 1, "mail": "a@b", "name": "again"})
    people.delete(1)
    people.put({"id": 4, "mail": "a@b"})
    with pytest.raises(UsageError, match="use a transaction"), store.batch() as batch:
        batch.table("people").put({"id": 9})
    with store.transaction() as first, store.transaction() as second:
        first.table("people").put({"id": 10, "mail": "new"})
        second.table("people").put({"id": 11, "mail": "new"})
        first.commit()
        with pytest.raises(ConflictError):
            second.commit()


WRONG_CALLS: dict[str, tuple[Any, str]] = {
    "too few key values": (
        lambda t: t.get("A"),
        "1 values for a key of 2; the key is vendor, trip_id",
    ),
    "keys that are no tuples": (
        lambda t: t.get_many(["A"]),
        "table 'trips': 'A' is no key; pass (vendor, trip_id)",
    ),
    "one key in the place of many": (lambda t: t.get_many(7), "keys must be many, not int"),
    "too many key values": (lambda t: t.scan("A", 1, 2), "3 values for a key of 2"),
    "a null in the key": (lambda t: t.put(trip(None)), "'vendor': a key is never null"),
    "a null key": (lambda t: t.get("A", None), "column 'trip_id': a key is never null"),
    "a wrong key": (lambda t: t.get("A", "7"), "column 'trip_id': '7' is not an integer"),
    "a type for a key": (lambda t: t.get("A", int), "column 'trip_id': <class 'int'> is not"),
    "a join on a column without a name": (
        lambda t: t.join(pa.table({"a": ["A"], "ts": [1]}), on=["a", ""]).read_all(),
        "labels have no column ''",
    ),
    "an unknown column": (
        lambda t: t.put(trip(tip=1)),
        "has no column 'tip'; it has vendor, trip_id",
    ),
    "unknown columns": (lambda t: t.scan(columns=["tip"]), "has no column 'tip'"),
    "a column twice": (lambda t: t.scan(columns=["fare", "fare"]), "names one twice"),
    "a text for columns": (
        lambda t: t.get("A", 7, columns="fare"),
        "columns='fare'; pass a list of names",
    ),
    "a text for columns of many": (lambda t: t.get_many([("A", 7)], columns="fare"), "pass a list"),
    "a text for columns of a find": (
        lambda t: list(t.find("by_zone", "JFK", columns="fare")),
        "columns='fare'; pass a list of names",
    ),
    "columns that are a number": (lambda t: t.get("A", 7, columns=7), "columns=7; pass a list"),
    "an unknown index": (
        lambda t: t.find("by_fare", 1),
        "no index 'by_fare'; its indexes: by_zone",
    ),
    "too many values": (lambda t: t.find("by_zone", "a", NOON, 1), "3 values; its columns"),
    "no row": (lambda t: t.put([1]), "a row is a dict, not list"),
    "an update of no row": (lambda t: t.update("Z", 1, fare=1.0), "has no row ('Z', 1); put it"),
    "an update of the key": (lambda t: t.update("A", 7, vendor="B"), "'vendor' is in the key"),
    "an update of nothing": (lambda t: t.update("A", 7), "update of no column"),
    "a negative limit": (lambda t: t.scan(limit=-1), "limit=-1"),
    "a lossy value": (lambda t: t.put(trip(fare=1 << 60 | 1)), "is no double exactly"),
}


@pytest.mark.parametrize(("call", "says"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_a_wrong_call_writes_nothing(
    store: kvstore.Store, trips: kvstore.Table, call: Any, says: str
) -> None:
    trips.put(trip())
    upper = store.upper
    with pytest.raises(UsageError) as caught:
        call(trips)
    assert says in str(caught.value)
    assert store.upper == upper


def test_a_newer_row_format_is_told(store: kvstore.Store, trips: kvstore.Table) -> None:
    trips.put(trip())
    codec = trips.codec()
    key, value = codec.row(trip())
    with store.batch() as batch:
        batch.put_rows([key], [b"\x21" + value[1:]])
    for read in (
        lambda: trips.get("A", 7),
        lambda: list(trips.rows()),
        lambda: list(trips.find("by_zone", "JFK")),
    ):
        with pytest.raises(FormatVersionError, match="table 'trips' has format version 2"):
            read()


def test_restores_and_replicas_have_tables(
    store: kvstore.Store, trips: kvstore.Table, tmp_path: Path
) -> None:
    from kvstore import backup

    first = trips.put(trip())
    collection = backup.Collection(tmp_path / "backup")
    collection.backup(store)
    trips.alter(add={"tip": (pa.float64(), 1.0)})
    trips.put(trip("B", 1, tip=2.0))
    collection.backup(store)
    collection.restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored:
        found = restored.table("trips")
        assert list(found.rows()) == list(trips.rows())
        assert list(found.rows(as_of=first)) == [trip()]
        assert list(found.find("by_zone", "JFK")) == list(trips.find("by_zone", "JFK"))
        assert list(restored.scan()) == []
        found.put(trip("C", 1))
    store.checkpoint(tmp_path / "copy")
    with kvstore.open_read_only(tmp_path / "copy") as copy:
        assert list(copy.table("trips").rows()) == list(trips.rows())
        with pytest.raises(UsageError, match="to be read only"):
            copy.table("trips").put(trip())


def test_a_replica_follows_tables(store: kvstore.Store, tmp_path: Path) -> None:
    from kvstore import backup

    store.put(b"a", b"1")
    backup.replicate(store, tmp_path / "replica")
    trips = store.table("trips", SCHEMA, key=["vendor", "trip_id"], indexes=INDEXES)
    trips.put(trip())
    with kvstore.open(tmp_path / "replica") as copy:
        backup.replicate(store, copy)
        assert list(copy.scan()) == [(b"a", b"1")]
        assert copy.table("trips").get("A", 7) == trip()
        trips.alter(drop=["fare"])
        trips.update("A", 7, zone="LGA")
        backup.replicate(store, copy)
        assert copy.table("trips").get("A", 7) == _without_fare(trip(zone="LGA"))
        assert list(copy.table("trips").find("by_zone", "LGA")) == [copy.table("trips").get("A", 7)]


def test_tables_survive_gc(store: kvstore.Store, trips: kvstore.Table) -> None:
    for number in range(5):
        trips.put(trip(zone=f"Z{number}"))
    trips.alter(add={"tip": pa.float64()})
    store.gc(keep=timedelta(0))
    assert list(trips.rows()) == [trip(zone="Z4", tip=None)]
    assert list(trips.find("by_zone")) == [trip(zone="Z4", tip=None)]


def test_a_live_reader_follows_tables(tmp_path: Path, each_engine: str) -> None:
    if each_engine == "memory":
        pytest.skip("its own process alone can follow a store in memory")
    with kvstore.open(tmp_path / "store") as store, kvstore.follow(tmp_path / "store") as reader:
        store.put(b"a", b"1")
        trips = store.table("trips", SCHEMA, key=["vendor", "trip_id"], indexes=INDEXES)
        trips.put(trip())
        reader.refresh()
        assert list(reader.scan()) == [(b"a", b"1")]
        assert reader.table("trips").get("A", 7) == trip()
        trips.alter(drop=["fare"])
        trips.update("A", 7, zone="LGA")
        reader.refresh()
        found = reader.table("trips").find("by_zone", "LGA")
        assert list(found) == [_without_fare(trip(zone="LGA"))]


def test_an_import_brings_no_definitions(store: kvstore.Store, tmp_path: Path) -> None:
    from kvstore import bulk

    def staged(name: str, key: bytes) -> Path:
        imported = bulk.Import.create(tmp_path / name)
        with imported.writer() as writer:
            writer.put(b"a", b"1")
            writer.put(key, b"1")
        imported.seal()
        return tmp_path / name

    with pytest.raises(UsageError, match="which belong to tables; make the tables first"):
        bulk.ingest(store, staged("early", RESERVED + b"\x01\x00"))
    trips = store.table("trips", SCHEMA, key=["vendor", "trip_id"])
    key, value = trips.codec().row(trip())
    with pytest.raises(UsageError, match="which belong to tables"):
        bulk.ingest(store, staged("definition", RESERVED + b"\x00kvstore.tables\x00trips"))
    assert list(store.scan()) == []
    imported = bulk.Import.create(tmp_path / "rows")
    with imported.writer() as writer:
        writer.put(key, value)
    imported.seal(tables=[EncodedBy.of(trips.codec())])
    stamp = bulk.ingest(store, tmp_path / "rows")
    assert trips.get("A", 7, as_of=stamp) == trip()


def test_an_import_that_an_older_definition_encoded_is_refused(
    store: kvstore.Store, tmp_path: Path
) -> None:
    from kvstore import bulk

    trips = store.table("trips", SCHEMA, key=["vendor", "trip_id"])
    codec = trips.codec()

    def staged(name: str, tables: list[EncodedBy]) -> Path:
        imported = bulk.Import.create(tmp_path / name)
        with imported.writer() as writer:
            writer.put(*codec.row(trip()))
        manifest = imported.seal(tables=tables)
        assert bulk.read_manifest(tmp_path / name) == manifest
        return tmp_path / name

    made = EncodedBy.of(codec)
    with pytest.raises(UsageError, match="which belong to tables"):
        bulk.ingest(store, staged("nameless", []))
    with pytest.raises(ImportRefusedError, match="there is no table 'rides'"):
        bulk.ingest(store, staged("other", [made._replace(table="rides")]))
    old = staged("old", [made])
    trips.alter(add_index={"by_zone": ["zone"]})
    with pytest.raises(ImportRefusedError, match=r"'trips' is at revision 2.*made at 1; build it"):
        bulk.ingest(store, old)
    altered = made._replace(revision=2)
    with pytest.raises(ImportRefusedError, match="'trips' is not the table of its rows"):
        bulk.ingest(store, staged("foreign", [altered]))
    assert list(trips.rows()) == []
    assert not store.imports.all()

    def alter(step: str) -> None:
        if step == "add":
            trips.alter(add={"tip": pa.float64()})

    late = staged("late", [EncodedBy.of(trips.codec())])
    with pytest.raises(TableAlteredError):
        bulk.ingest(store, late, progress=alter)
    assert list(trips.rows()) == []


def test_pieces_of_a_store_leave_out_tables(store: kvstore.Store) -> None:
    trips = store.table("trips", SCHEMA, key=["vendor", "trip_id"], indexes=INDEXES)
    with store.batch() as batch:
        for number in range(500):
            batch.put(b"k%03d" % number, bytes(100))
    for number in range(500):
        trips.put(trip(number=number))
    store.upkeep.compact()
    plain = store.layout.splits(8)
    assert plain[-1].end == RESERVED
    rows = [key for each in plain for key, _ in store.scan(each.start, each.end)]
    assert rows == [b"k%03d" % number for number in range(500)]
    whole = store.layout.splits(8, with_tables=True)
    assert (whole[0].start, whole[-1].end) == (b"", None)
    assert store.layout.splits(2, Span(RESERVED))[-1].end is None
