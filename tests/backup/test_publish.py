"""Tables that a collection publishes: Parquet files, and Delta tables read by other systems."""

from __future__ import annotations

import signal
import threading
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

import kvstore
from kvstore.backup import Collection
from kvstore.errors import KVStoreError, LockedError, UsageError
from kvstore.storage.contract import Storage
from kvstore.storage.memory_storage import MemoryBlob, MemoryConsensus
from kvstore.tables import Table, desc
from tests.backup.children import publish_until_killed

SCHEMA = pa.schema(
    [
        pa.field("Trip Id", pa.int64()),
        pa.field("vendor", pa.string()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("fare", pa.decimal128(9, 2)),
        pa.field("count", pa.uint32()),
        pa.field("nanos", pa.timestamp("ns")),
    ]
)
NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)


def trip(number: int, fare: int) -> dict[str, Any]:
    at = NOON + timedelta(hours=number)
    more = {"fare": Decimal(fare) / 4, "count": fare, "nanos": fare * 1000 + 1}
    return {"vendor": "AB"[number % 2], "Trip Id": number, "at": at, **more}


def history(place: Path) -> tuple[list[kvstore.Timestamp], list[list[dict[str, Any]]]]:
    """A collection of four windows, with the time of each window's end and the rows at that
    time."""
    ends, states = [], []
    with kvstore.open(place / "store") as store:
        trips = store.table("trips", SCHEMA, ["vendor", desc("Trip Id")])
        collection = Collection(place / "collection")

        def end(table: Table) -> None:
            collection.backup(store)
            ends.append(kvstore.Timestamp(collection.upper - 1))
            states.append(list(table.rows(as_of=ends[-1])))

        trips.put_batch([trip(n, n) for n in range(40)])
        end(trips)
        for number in (3, 4, 50):
            trips.put(trip(number, 900 + number))
        trips.delete("A", 6)
        trips.put(trip(60, 1))
        trips.delete("A", 60)
        end(trips)
        store.put(b"plain", b"no row of the table")
        end(trips)
        for number in range(0, 10, 2):
            trips.delete("A", number)
        trips.put(trip(2, 7))
        end(trips)
    return ends, states


def read(url: Path, version: int | None = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = DeltaTable(url, version=version).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: (row["vendor"], -row["Trip Id"]))


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in SCHEMA.names} for row in rows]


def test_each_window_becomes_a_commit_that_other_systems_read(tmp_path: Path) -> None:
    ends, states = history(tmp_path)
    collection, url = Collection(tmp_path / "collection"), tmp_path / "delta"
    first = collection.publish("trips", url, "delta", ends[0])
    assert (first.as_of, first.rows, first.commits) == (ends[0], 40, 1)
    report = collection.publish("trips", url, "delta")
    assert report.as_of == ends[-1]
    again = collection.publish("trips", url, "delta")
    assert (again.rows, again.commits) == (0, 0)
    versions = [each["version"] for each in DeltaTable(url).history()]
    assert versions == [2, 1, 0]  # the third window has no row of the table
    for version, state in ((0, states[0]), (1, states[1]), (2, states[3])):
        assert read(url, version) == plain(state)
    found = pl.read_delta(str(url)).sort("vendor", "Trip Id", descending=[False, True])
    assert found["fare"].to_list() == [row["fare"] for row in states[3]]
    files = DeltaTable(url).file_uris()
    [(total, rows)] = duckdb.sql(
        f"SELECT sum(count), count(*) FROM read_parquet({files})"
    ).fetchall()
    assert (total, rows) == (sum(row["count"] for row in states[3]), len(states[3]))


def test_a_parquet_file_has_the_types_of_the_table(tmp_path: Path) -> None:
    ends, states = history(tmp_path)
    collection, path = Collection(tmp_path / "collection"), tmp_path / "trips.parquet"
    report = collection.publish("trips", path, as_of=ends[1])
    found = pq.read_table(path)
    assert found.schema.field("nanos").type == pa.timestamp("ns")
    assert found.select(["vendor", "Trip Id", "fare"]).to_pylist() == [
        {name: row[name] for name in ("vendor", "Trip Id", "fare")} for row in states[1]
    ]
    assert report.rows == found.num_rows
    assert found.schema.metadata[b"kvstore.as_of"] == str(int(ends[1])).encode()
    narrow = collection.publish("trips", path, columns=["fare"])
    assert pq.read_schema(path).names == ["fare"]
    assert narrow.as_of == ends[-1]


def test_lists_structs_and_maps_are_published(tmp_path: Path) -> None:
    struct = pa.struct([("a", pa.uint8()), ("took", pa.duration("us")), ("at", pa.time32("s"))])
    fields = [
        ("tags", pa.list_(pa.string(), 2)),
        ("s", struct),
        ("m", pa.map_(pa.string(), pa.large_list(pa.uint32()))),
    ]
    rows = [
        {
            "id": 1,
            "tags": ["x", None],
            "s": {"a": 255, "took": timedelta(seconds=1), "at": time(0, 0, 2)},
            "m": {"k": [7, None], "": None},
        },
        {"id": 2, "tags": None, "s": None, "m": {}},
    ]
    with kvstore.open(tmp_path / "store") as store:
        table = store.table("docs", pa.schema([("id", pa.int64()), *fields]), "id")
        table.put_batch(rows)
        collection, url = Collection(tmp_path / "collection"), tmp_path / "delta"
        collection.backup(store)
        collection.publish("docs", url, "delta")
        table.update(2, tags=["a", "b"])
        collection.backup(store)
        assert collection.publish("docs", url, "delta").commits == 1
        collection.publish("docs", tmp_path / "docs.parquet")
    told = {"a": 255, "took": 10**6, "at": 2 * 10**9}
    wanted = [
        {"id": 1, "tags": ["x", None], "s": told, "m": [("k", [7, None]), ("", None)]},
        {"id": 2, "tags": ["a", "b"], "s": None, "m": []},
    ]
    found = DeltaTable(url).to_pyarrow_table().sort_by("id")
    assert found.to_pylist() == wanted
    own = pq.read_table(tmp_path / "docs.parquet")
    assert own["tags"].type == pa.list_(pa.string(), 2)
    assert own["s"].to_pylist() == [rows[0]["s"], None]


def test_an_alteration_replaces_the_rows_and_a_chain_that_begins_anew_too(tmp_path: Path) -> None:
    history(tmp_path)
    collection, url = Collection(tmp_path / "collection"), tmp_path / "delta"
    collection.publish("trips", url, "delta")
    with kvstore.open(tmp_path / "store") as store:
        trips = store.table("trips")
        trips.alter(add={"tip": (pa.int32(), 2)}, drop=["nanos"])
        collection.backup(store)
        collection.publish("trips", url, "delta")
        assert [row["tip"] for row in read(url)] == [2] * len(list(trips.rows()))
        assert "nanos" not in read(url)[0]
        trips.put({"vendor": "C", "Trip Id": 1})
        collection.backup(store)
        collection.publish("trips", url, "delta")
        assert read(url)[-1]["vendor"] == "C"


class CountingBlob(MemoryBlob):
    """Counts the reads of parts."""

    reads = 0

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        self.reads += "/part/" in name
        return super().get_range(name, start=start, length=length)

    def get(self, name: str) -> bytes | None:
        self.reads += "/part/" in name
        return super().get(name)


def test_a_table_that_was_made_anew_leaves_no_row_of_the_dropped_one(tmp_path: Path) -> None:
    history(tmp_path)
    collection, url = Collection(tmp_path / "collection"), tmp_path / "delta"
    collection.publish("trips", url, "delta")
    rows = [trip(1, 1), trip(90, 9)]
    with kvstore.open(tmp_path / "store") as store:
        for window in ("in one window", "in two"):
            store.table("trips").drop()
            if window == "in two":
                collection.backup(store)
                with pytest.raises(UsageError, match="no table 'trips'"):
                    collection.publish("trips", url, "delta")
            made = store.table("trips", SCHEMA, ["vendor", desc("Trip Id")])
            made.put_batch(rows)
            collection.backup(store)
            collection.publish("trips", url, "delta")
            assert read(url) == plain(list(made.rows())), window


def test_a_commit_reads_its_window_and_not_all_windows_for_the_definition(tmp_path: Path) -> None:
    blob = CountingBlob()
    collection = Collection("counted", storage=Storage(blob, MemoryConsensus()))
    with kvstore.open(None, engine="memory") as store:
        trips = store.table("trips", SCHEMA, ["vendor", desc("Trip Id")])
        for number in range(25):
            trips.put(trip(number, number))
            store.put(b"plain", b"%d" % number)  # so each window may have the definition's key
            if number == 20:
                trips.alter(add={"tip": (pa.int32(), 2)})
            collection.backup(store)
    blob.reads = 0
    assert collection.publish("trips", tmp_path / "delta", "delta").commits == 25
    assert blob.reads < 25 * 8  # four for each commit, and all windows for the alteration
    assert [row["tip"] for row in read(tmp_path / "delta")] == [2] * 25


def test_a_refusal_tells_why_and_writes_nothing(tmp_path: Path) -> None:
    ends, _ = history(tmp_path)
    collection, url = Collection(tmp_path / "collection"), tmp_path / "delta"
    with kvstore.open(tmp_path / "store") as store:
        wide = pa.schema([("id", pa.int64()), ("wide", pa.decimal256(50, 2))])
        store.table("wide", wide, "id").put({"id": 1, "wide": Decimal(1)})
        collection.backup(store)
    for table, more, told in (
        ("trip", {}, "there is no table 'trip' in the collection; there are trips, wide"),
        ("wide", {}, "column 'wide': no other system"),
        ("trips", {"columns": ["fare"]}, "columns without 'vendor', of its key"),
        ("trips", {"columns": ["cost"]}, "has no column 'cost'"),
        ("trips", {"format": "csv"}, "pass 'parquet' or 'delta'"),
        ("trips", {"format": "parquet", "url": "s3://bucket/x"}, "written to a path"),
    ):
        arguments: dict[str, Any] = {"url": url, "format": "delta", **more}
        with pytest.raises(UsageError, match=told):
            collection.publish(table, **arguments)
        assert not url.exists()
    assert collection.publish("wide", url, "delta", columns=["id"]).rows == 1
    with pytest.raises(UsageError, match="was not published from this table"):
        collection.publish("trips", url, "delta")
    collection.publish("trips", tmp_path / "later", "delta")
    with pytest.raises(UsageError, match="is published up to"):
        collection.publish("trips", tmp_path / "later", "delta", ends[0])


def test_of_two_publishers_the_slower_one_is_told_and_no_row_doubles(tmp_path: Path) -> None:
    ends, states = history(tmp_path)
    collection, url = Collection(tmp_path / "collection"), tmp_path / "delta"
    collection.publish("trips", url, "delta", ends[0])
    other = []

    def overtake(rows: int) -> None:
        if not other:
            other.append(rows)
            faster = Collection(tmp_path / "collection")
            # The rows are taken by a thread of Delta's own, which cannot begin another commit.
            thread = threading.Thread(target=faster.publish, args=("trips", url, "delta"))
            thread.start()
            thread.join()

    with pytest.raises(LockedError, match="has just committed"):
        collection.publish("trips", url, "delta", progress=overtake)
    assert read(url) == plain(states[-1])
    collection.publish("trips", url, "delta")
    assert read(url) == plain(states[-1])


def test_a_publisher_that_is_killed_at_any_step_continues_and_doubles_nothing(
    tmp_path: Path, spawn: Any
) -> None:
    """There are two kinds of steps: rows were given to Delta, and a commit was made. Each child
    gets one commit further."""
    _, states = history(tmp_path)
    seen = []
    for step in (0, 1, 0, 1, 0, 1, 9):
        child = spawn.Process(target=publish_until_killed, args=(str(tmp_path), step))
        child.start()
        child.join()
        seen.append(child.exitcode)
        if DeltaTable.is_deltatable(str(tmp_path / "delta")):
            assert read(tmp_path / "delta") in [plain(state) for state in states]
    assert seen[:4] == [-signal.SIGKILL] * 4
    assert seen[-1] == 0
    assert read(tmp_path / "delta") == plain(states[-1])
    assert [each["version"] for each in DeltaTable(tmp_path / "delta").history()] == [2, 1, 0]


def test_a_foreign_delta_table_is_left_alone(tmp_path: Path) -> None:
    history(tmp_path)
    write_deltalake(tmp_path / "delta", pa.table({"a": [1]}))
    with pytest.raises(KVStoreError, match="publish to an empty place"):
        Collection(tmp_path / "collection").publish("trips", tmp_path / "delta", "delta")
    assert DeltaTable(tmp_path / "delta").version() == 0
