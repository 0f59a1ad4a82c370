"""Indexes that come to tables with rows: built while the tables are in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from bulk.definitions import EncodedBy
from kvstore import unique
from kvstore.errors import NotUniqueError, UsageError
from kvstore.tasks import Worker
from kvstore.testing.bounds import bounds
from kvstore.upkeep import handlers, submit_index

pytestmark = pytest.mark.usefixtures("each_engine")

SCHEMA = pa.schema([("id", pa.int64()), ("zone", pa.string())])


@pytest.fixture
def store(tmp_path: Path, each_engine: str) -> Any:
    with kvstore.open(tmp_path / "store", durability="async") as opened:
        yield opened


@pytest.fixture
def places(store: kvstore.Store) -> kvstore.Table:
    table = store.table("places", SCHEMA, key="id")
    table.put_batch(pa.table({"id": range(20), "zone": [f"z{n % 3}" for n in range(20)]}))
    return table


def test_a_build_goes_on_where_it_was_and_misses_no_row(places: kvstore.Table) -> None:
    before = places.put({"id": 20, "zone": "z0"})
    places.alter(add_index={"by_zone": "zone"})
    with pytest.raises(UsageError, match="index 'by_zone' is not whole at that time; run"):
        places.find("by_zone", "z0")
    told: list[int] = []

    def stop(count: int) -> None:
        told.append(count)
        if len(told) == 2:
            raise KeyboardInterrupt

    with bounds(INDEX_CHUNK_ROWS=4):
        with pytest.raises(KeyboardInterrupt):
            places.build_index("by_zone", progress=stop)
        places.put({"id": 1, "zone": "z0"})
        places.put({"id": 19, "zone": "z9"})
        places.delete(18)
        built = places.build_index("by_zone", progress=told.append)
    assert told == [4, 8, 4, 8, 12]
    assert built is not None
    for zone in ("z0", "z1", "z2", "z9"):
        found = list(places.find("by_zone", zone))
        assert found == [row for row in places.rows() if row["zone"] == zone]
    with pytest.raises(UsageError, match="no index 'by_zone'"):
        places.find("by_zone", "z0", as_of=before)
    assert places.build_index("by_zone") is None


def test_a_build_is_a_task(store: kvstore.Store, places: kvstore.Table) -> None:
    places.alter(add_index={"by_zone": "zone"})
    submit_index(store, "places", "by_zone")
    assert Worker(store.tasks, handlers(store)).run_one() is not None
    assert [row["id"] for row in places.find("by_zone", "z0", limit=2)] == [0, 3]


def test_a_unique_index_over_rows_that_meet_is_told(places: kvstore.Table) -> None:
    places.alter(add_index={"by_zone": unique("zone")})
    with pytest.raises(NotUniqueError, match="index 'by_zone': zone='z0' is taken by the row id=0"):
        places.build_index("by_zone")
    for number in range(3, 20):
        places.delete(number)
    places.build_index("by_zone")
    with pytest.raises(NotUniqueError):
        places.put({"id": 99, "zone": "z1"})


def test_entries_that_imports_leave_behind_find_nothing_and_go(
    store: kvstore.Store, places: kvstore.Table, tmp_path: Path
) -> None:
    import bulk

    places.alter(add_index={"by_zone": "zone"})
    places.build_index("by_zone")
    before = store.sync() - 1
    codec = places.codec()
    rows = [{"id": number, "zone": "new"} for number in range(5)]
    batch = pa.RecordBatch.from_pylist(rows, codec.definition.schema)
    keys, values = codec.encode(batch)
    entries = codec.entries(codec.definition.index("by_zone"), batch)
    imported = bulk.Import.create(tmp_path / "rows")
    with imported.writer() as writer:
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
            writer.put(key, value)
        for entry in entries.to_pylist():
            writer.put(entry, b"")
    imported.seal(tables=[EncodedBy.of(codec)])
    bulk.ingest(store, tmp_path / "rows")
    assert [row["id"] for row in places.find("by_zone", "new")] == [0, 1, 2, 3, 4]
    assert [row["id"] for row in places.find("by_zone", "z0")] == [6, 9, 12, 15, 18]
    assert [row["id"] for row in places.find("by_zone", "z0", as_of=before, limit=2)] == [0, 3]
    assert places.tidy() == 5
    assert places.tidy() == 0
    assert [row["id"] for row in places.find("by_zone", "z0", as_of=before, limit=2)] == [0, 3]
