"""Indexes that come to tables with rows: built while the tables are in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk, unique
from kvstore.base.span import Span
from kvstore.bulk.manifest import EncodedBy
from kvstore.errors import NotUniqueError, UsageError
from kvstore.tables.definition import index_prefix, table_prefix
from kvstore.tasks import Worker
from kvstore.upkeep import handlers, submit_index
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of

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


def test_a_find_of_large_rows_takes_few_of_them_at_a_time(store: kvstore.Store) -> None:
    schema = pa.schema([("id", pa.int64()), ("zone", pa.string()), ("text", pa.binary())])
    docs = store.table("docs", schema, key="id", indexes={"by_zone": "zone"})
    sizes = [10] * 200 + [5000] * 1000
    rows = [{"id": at, "zone": "a", "text": bytes(size)} for at, size in enumerate(sizes)]
    docs.put_batch(pa.Table.from_pylist(rows, schema))
    fit = 500_000
    with bounds(ARROW_BYTES_MAX=fit):
        batches = list(docs.find("by_zone", "a").to_reader())
        assert list(docs.find("by_zone", "a")) == rows
        assert list(docs.find("by_zone", "a", limit=900, reverse=True)) == rows[:-901:-1]
    assert pa.Table.from_batches(batches).to_pylist() == rows
    surprised, mixed, *learned = [batch for batch in batches if batch.nbytes > fit // 10]
    assert max(surprised.num_rows, mixed.num_rows) <= 256  # twice as many rows as before
    assert max(batch.nbytes for batch in learned) < fit
    assert len(learned) < 25


def test_a_unique_index_over_rows_that_meet_is_told(places: kvstore.Table) -> None:
    places.alter(add_index={"by_zone": unique("zone")})
    with pytest.raises(NotUniqueError, match="index 'by_zone': zone='z0' is taken by the row id=0"):
        places.build_index("by_zone")
    for number in range(3, 20):
        places.delete(number)
    places.build_index("by_zone")
    with pytest.raises(NotUniqueError):
        places.put({"id": 99, "zone": "z1"})


def import_rows(
    store: kvstore.Store, places: kvstore.Table, staging: Path, zone: str
) -> tuple[int, kvstore.Timestamp]:
    """Import five existing rows with another zone; returns the import and its time."""
    codec = places.codec()
    rows = [{"id": number, "zone": zone} for number in range(5)]
    batch = pa.RecordBatch.from_pylist(rows, codec.definition.schema)
    keys, values = codec.encode(batch)
    entries = codec.entries(codec.definition.index("by_zone"), batch)
    imported = bulk.Import.create(staging)
    with imported.writer() as writer:
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
            writer.put(key, value)
        for entry in entries.to_pylist():
            writer.put(entry, b"")
    imported.seal(tables=[EncodedBy.of(codec)])
    return imported.import_id, bulk.ingest(store, staging)


def test_entries_that_imports_leave_behind_find_nothing_and_go(
    store: kvstore.Store, places: kvstore.Table, tmp_path: Path
) -> None:
    places.alter(add_index={"by_zone": "zone"})
    places.build_index("by_zone")
    before = store.sync() - 1
    codec = places.codec()
    import_rows(store, places, tmp_path / "rows", "new")
    assert [row["id"] for row in places.find("by_zone", "new")] == [0, 1, 2, 3, 4]
    assert [row["id"] for row in places.find("by_zone", "z0")] == [6, 9, 12, 15, 18]
    assert [row["id"] for row in places.find("by_zone", "z0", as_of=before, limit=2)] == [0, 3]
    assert places.tidy() == 0  # the import can be reverted
    assert [row["id"] for row in places.find("by_zone", "z0", as_of=before, limit=2)] == [0, 3]
    upper = store.upper
    store.gc(before=store.upper - 1)
    entries = store.count(prefix=index_prefix(codec.definition.number, 1))
    assert entries == 20
    changed = store.changes_batches(upper - 1, span=Span.of_prefix(b"")).read_all()
    assert changed.num_rows == 0  # plain readers do not see these deletes
    assert places.tidy() == 0
    assert [row["id"] for row in places.find("by_zone", "new")] == [0, 1, 2, 3, 4]


def test_an_entry_of_a_row_that_is_gone_finds_nothing(
    store: kvstore.Store, places: kvstore.Table, tmp_path: Path
) -> None:
    places.alter(add_index={"by_zone": "zone"})
    places.build_index("by_zone")
    import_rows(store, places, tmp_path / "rows", "new")
    for number in range(0, 20, 3):
        places.delete(number)
    assert list(places.find("by_zone", "z0")) == []
    assert places.find("by_zone", "z0").read_all().num_rows == 0


def test_an_import_that_is_reverted_gives_the_entries_of_its_rows_back(
    store: kvstore.Store, places: kvstore.Table, tmp_path: Path
) -> None:
    places.alter(add_index={"by_zone": "zone"})
    places.build_index("by_zone")
    first, _ = import_rows(store, places, tmp_path / "first", "one")
    second, _ = import_rows(store, places, tmp_path / "second", "two")
    places.tidy()
    store.gc(before=0)
    store.revert_import(second)
    assert [row["id"] for row in places.find("by_zone", "one")] == [0, 1, 2, 3, 4]
    store.revert_import(first)
    assert [row["id"] for row in places.find("by_zone", "z0")] == [0, 3, 6, 9, 12, 15, 18]


def require_found(places: kvstore.Table) -> None:
    """The index finds each row that there is, and no other."""
    rows = list(places.rows())
    for zone in ("z0", "z1", "z2", "z9", "a", "b", "c", "new"):
        assert list(places.find("by_zone", zone)) == [r for r in rows if r["zone"] == zone]


def test_an_index_that_is_built_later_has_the_rows_that_a_revert_brings_back(
    store: kvstore.Store, places: kvstore.Table, tmp_path: Path
) -> None:
    """Each import hides rows from the builder; a reverted one in between moves a row once more."""
    places.alter(add_index={"by_zone": "zone"})
    imports = [import_rows(store, places, tmp_path / zone, zone)[0] for zone in ("a", "b", "c")]
    store.revert_import(imports.pop())
    places.delete(4)
    places.alter(drop_index="by_zone")
    places.alter(add_index={"by_zone": "zone"})
    with bounds(INDEX_CHUNK_ROWS=2):
        places.build_index("by_zone")
    while imports:
        store.revert_import(imports.pop())
        require_found(places)


def test_an_index_has_the_rows_below_an_import_that_was_reverted_and_is_too_old_to_revert(
    store: kvstore.Store, places: kvstore.Table, tmp_path: Path
) -> None:
    """GC keeps the row below both imports, which is the newest once the later one is reverted."""
    places.alter(add_index={"by_zone": "zone"})
    first, _ = import_rows(store, places, tmp_path / "a", "a")
    between = store.put(b"between", b"1")
    second, _ = import_rows(store, places, tmp_path / "b", "b")
    store.revert_import(first)
    store.gc(before=between)
    places.build_index("by_zone")
    store.revert_import(second)
    require_found(places)


def test_a_build_begins_anew_where_gc_has_removed_what_hid_rows_from_it(
    store: kvstore.Store, places: kvstore.Table, tmp_path: Path
) -> None:
    places.alter(add_index={"by_zone": "zone"})
    hiding, _ = import_rows(store, places, tmp_path / "rows", "new")
    told: list[int] = []

    def stop(count: int) -> None:
        told.append(count)
        if count == 6:
            raise KeyboardInterrupt

    with bounds(INDEX_CHUNK_ROWS=2):
        with pytest.raises(KeyboardInterrupt):
            places.build_index("by_zone", progress=stop)
        store.revert_import(hiding)
        store.put(b"later", b"1")
        store.gc(before=store.upper - 1)
        places.build_index("by_zone", progress=told.append)
    assert told[:4] == [2, 4, 6, 2]
    require_found(places)


def test_a_dropped_index_leaves_no_entry_and_is_there_as_of_an_earlier_time(
    store: kvstore.Store, places: kvstore.Table, tmp_path: Path
) -> None:
    def entries() -> int:
        versions, at = parts_of(store).versions, store.upper - 1
        stored = versions.scan(Span.of_prefix(table_prefix(1)), at)
        return sum(len(keys) for keys, _ in stored) - 20  # without the rows

    places.alter(add_index={"kept": "zone", "by_zone": "zone"})
    for name in ("kept", "by_zone"):
        places.build_index(name)
    whole = store.upper - 1
    for _ in range(3):
        places.alter(drop_index="by_zone")
        assert entries() == 20
        places.alter(add_index={"by_zone": "zone"})
        places.put({"id": 3, "zone": "z9"})
        places.build_index("by_zone")
        assert entries() == 40
    assert [row["id"] for row in places.find("by_zone", "z9")] == [3]
    then = [row["id"] for row in places.find("by_zone", "z0", as_of=whole)]
    assert then == [0, 3, 6, 9, 12, 15, 18]
    places.alter(drop_index=["by_zone", "kept"])
    store.gc(before=store.upper - 1)
    assert entries() == 0
    assert len(list(places.rows())) == 20


def test_gc_goes_ahead_with_stale_entries_where_it_was(
    store: kvstore.Store, places: kvstore.Table, tmp_path: Path
) -> None:
    """A run that ends among the entries records its place, and the next run begins there."""
    places.alter(add_index={"by_zone": "zone"})
    places.build_index("by_zone")
    import_rows(store, places, tmp_path / "rows", "new")
    since, tidy = store.upper - 1, parts_of(store).collector.tidy
    passes: list[int] = []

    def stop() -> None:
        passes.append(1)
        if len(passes) == 3:
            raise InterruptedError

    with bounds(INDEX_CHUNK_ROWS=2):
        store.gc(before=since - 1)
        assert places.tidy() == 0
        with parts_of(store).committer.lock:
            parts_of(store).committer.move_since(since)
        with pytest.raises(InterruptedError):
            tidy(since, stop)
        passed = index_prefix(places.codec().definition.number, 1)
        left = store.count(prefix=passed)
        assert 20 < left <= 25
        assert tidy(since, lambda: passes.append(1)) == left - 20
        assert len(passes) < 3 + 13
        assert tidy(since, stop) == 0
    assert len(list(places.find("by_zone"))) == 20
