"""Imports into tables with unique indexes: no two rows have the same values afterwards."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import bulk, desc, unique
from kvstore.backup import Collection
from kvstore.bulk.loading import import_rows, stored_batches
from kvstore.bulk.manifest import EncodedBy
from kvstore.errors import ConflictError, ImportRefusedError, NotUniqueError
from tests.harness.bounds import bounds

pytestmark = pytest.mark.usefixtures("each_engine")

SCHEMA = pa.schema(
    [pa.field("id", pa.int64()), pa.field("mail", pa.string()), pa.field("day", pa.int32())]
)
INDEXES = {"mail": unique("mail", desc("day")), "day": ["day"]}
_NUMBERS = count()

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(0, 5),
            "mail": st.sampled_from([None, "a", "b\0", "c"]),
            "day": st.sampled_from([None, 1, 2]),
        }
    ),
    max_size=8,
)


def users(store: kvstore.Store) -> kvstore.Table:
    return store.table(f"users{next(_NUMBERS)}", SCHEMA, "id", INDEXES)


def load(table: kvstore.Table, rows: list[dict[str, Any]]) -> None:
    """Import rows; the last row of a key wins."""
    target = table.import_target()
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    stored = stored_batches(target.codec, batch)
    tables = [EncodedBy.of(target.codec)]
    import_rows(target.store, stored, "overwrite", "last", check=target.check, tables=tables)


def stage(table: kvstore.Table, rows: list[dict[str, Any]], directory: Path) -> Path:
    codec = table.codec()
    made = bulk.Import.create(directory)
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    for stored in stored_batches(codec, batch):  # the rows, then the entries of each index
        with made.writer() as writer:
            writer.write(pa.Table.from_batches([stored]).sort_by("key").to_batches()[0])
    made.seal(tables=[EncodedBy.of(codec)])
    return directory


def meets(rows: list[dict[str, Any]]) -> bool:
    """Whether two rows have the same values, none of them null."""
    found = [(row["mail"], row["day"]) for row in rows]
    whole = [values for values in found if None not in values]
    return len(set(whole)) < len(whole)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=ROWS, second=ROWS, chunk=st.sampled_from([1, 3, 1000]))
def test_an_import_is_added_exactly_if_its_rows_meet_no_other(
    store: kvstore.Store,
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    chunk: int,
) -> None:
    table = users(store)
    state: dict[int, dict[str, Any]] = {}
    for rows in (first, second):
        then = state | {row["id"]: row for row in rows}
        with bounds(SCAN_CHUNK=chunk):
            if rows and meets(list(then.values())):
                with pytest.raises(NotUniqueError, match="index 'mail': mail="):
                    load(table, rows)
            elif rows:
                load(table, rows)
                state = then
        assert {row["id"]: row for row in table.rows()} == state
    for row in first:  # writes see the rows of imports
        then = state | {row["id"]: row}
        if meets(list(then.values())):
            with pytest.raises(NotUniqueError):
                table.put(row)
        else:
            table.put(row)
            state = then


def test_the_error_names_the_values_and_the_row(store: kvstore.Store, tmp_path: Path) -> None:
    table = users(store)
    table.put({"id": 1, "mail": "a", "day": 1})
    with pytest.raises(NotUniqueError, match="mail='a', day=1 is taken by the row id=1") as caught:
        load(table, [{"id": 2, "mail": "a", "day": 1}])
    assert "\n" not in str(caught.value)
    assert store.imports.all() == []


@pytest.fixture
def staged(store: kvstore.Store, tmp_path: Path) -> tuple[kvstore.Table, Path]:
    table = users(store)
    table.put({"id": 1, "mail": "a", "day": 1})
    rows = [{"id": 2, "mail": "b", "day": 1}, {"id": 3, "mail": None, "day": 1}]
    return table, stage(table, rows, tmp_path / "staged")


@pytest.mark.parametrize("step", ["prepare", "link", "add"])
def test_a_row_that_comes_between_check_and_commit_is_seen(
    store: kvstore.Store, staged: tuple[kvstore.Table, Path], step: str
) -> None:
    table, directory = staged

    def put(reached: str) -> None:
        if reached == step:
            table.put({"id": 9, "mail": None, "day": 1})
            table.put({"id": 8, "mail": "b", "day": 1})
            table.put({"id": 3, "mail": "c", "day": 2})  # the import replaces it

    with pytest.raises(NotUniqueError, match="mail='b', day=1 is taken by the row id=8"):
        bulk.ingest(store, directory, progress=put)
    assert table.get(2) is None
    table.delete(8)
    bulk.ingest(store, directory)  # the same files, once the other row is gone
    assert table.get(2) == {"id": 2, "mail": "b", "day": 1}
    assert table.get(3)["mail"] is None


def test_an_import_that_was_interrupted_is_checked_again(
    store: kvstore.Store, staged: tuple[kvstore.Table, Path]
) -> None:
    table, directory = staged

    def stop(reached: str) -> None:
        if reached == "add":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bulk.ingest(store, directory, progress=stop)
    table.put({"id": 8, "mail": "b", "day": 1})
    with pytest.raises(NotUniqueError):
        bulk.ingest(store, directory)
    table.put({"id": 8, "mail": "b", "day": 2})
    bulk.ingest(store, directory)
    assert [row["id"] for row in table.find("mail", "b")] == [8, 2]


def test_a_transaction_that_read_before_the_import_conflicts(
    store: kvstore.Store, staged: tuple[kvstore.Table, Path]
) -> None:
    table, directory = staged
    transaction = store.transaction()
    transaction.table(table.name).put({"id": 7, "mail": "b", "day": 1})
    bulk.ingest(store, directory)
    with pytest.raises(ConflictError):
        transaction.commit()
    assert [row["id"] for row in table.find("mail", "b")] == [2]


def test_bytes_that_are_no_entry_are_refused(store: kvstore.Store, tmp_path: Path) -> None:
    table = users(store)
    codec = table.codec()
    made = bulk.Import.create(tmp_path / "staged")
    with made.writer() as writer:
        writer.put(codec.index_codec(codec.definition.index("mail")).prefix + b"\x99", b"")
    made.seal(tables=[EncodedBy.of(codec)])
    with pytest.raises(ImportRefusedError, match="no key of its table"):
        bulk.ingest(store, tmp_path / "staged")


def test_rows_of_a_backup_are_checked_as_they_come_into_a_store(
    store: kvstore.Store, tmp_path: Path
) -> None:
    collection = Collection(str(tmp_path / "backups"))
    with kvstore.open(tmp_path / "source", durability="async") as source:
        table = source.table("people", SCHEMA, "id", INDEXES)
        table.put({"id": 1, "mail": "a", "day": 1})
        table.put({"id": 1, "mail": "b", "day": 1})
        table.put({"id": 2, "mail": "a", "day": 1})
        collection.backup(source)
    table = store.table("people", SCHEMA, "id", INDEXES)
    table.put({"id": 9, "mail": "b", "day": 1})
    with pytest.raises(NotUniqueError, match="mail='b', day=1 is taken by the row id=9"):
        collection.restore_into(store)
    table.delete(9)
    collection.restore_into(store)
    assert [row["id"] for row in table.find("mail", "a")] == [2]
    assert [row["id"] for row in table.find("mail", "b")] == [1]
