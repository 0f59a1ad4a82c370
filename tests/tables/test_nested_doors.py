"""Lists, structs and maps come in by every door, and go out by every one, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import backup
from kvstore.bulk.loading import import_files
from kvstore.bulk.outside import export_table
from kvstore.errors import UsageError
from kvstore.tables.row_codec import conform, dicts
from tests.tables import nested_arrays
from tests.tables.drawn import NESTED, NESTED_EXAMPLES
from tests.tables.nested_arrays import RefusedError
from tests.tables.test_doors import DOORS, SHARED, NotToldError, Stores


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    found = Stores(tmp_path)
    yield found
    found.close()


ARRAYS = ("put_batch", "transaction", "client")
"""The doors that take arrays of any type. Files are written of arrays that the column has."""


@pytest.mark.parametrize("name", DOORS)
@given(data=st.data())
@settings(max_examples=20, suppress_health_check=SHARED)
def test_every_door_takes_exactly_or_refuses(
    name: str, data: st.DataObject, stores: Stores
) -> None:
    check_door(name, data, stores)


def check_door(name: str, data: st.DataObject, stores: Stores) -> None:
    column = data.draw(nested_arrays.columns())
    source = data.draw(nested_arrays.sources(column)) if name in ARRAYS else column
    array = data.draw(nested_arrays.arrays_of(source).filter(len))
    stores.renew()
    store = stores.store
    schema = pa.schema([("n", pa.int64()), ("x", column)])
    table = store.table(f"t{stores.__dict__['_left']}", schema, key=["n"])
    expected: list[Any] | None = None
    if nested_arrays.takes(column, source):
        try:
            meanings = nested_arrays.meanings(array)
            expected = [nested_arrays.held(column, source, value) for value in meanings]
        except RefusedError:
            expected = None
    numbers = pa.array(range(len(array)), pa.int64())
    if name not in ARRAYS:
        if expected is None:
            return
        codec = table.codec()
        batch = pa.record_batch([numbers, array], ["n", "x"])
        whole = codec.decode(*codec.encode(conform(codec.definition, batch)))
        array = whole.column("x")
    rows = pa.table({"n": numbers, "x": array})
    before = store.upper
    refusal = None
    try:
        if name == "dicts":
            table.put_batch([row for each in rows.to_batches() for row in dicts(each)])
        else:
            DOORS[name](stores, table, rows)
    except UsageError as error:
        refusal = error
    except NotToldError:
        return
    assert (refusal is not None) is (expected is None), refusal
    if expected is None:
        assert list(store.changes(before - 1, store.upper - 1)) == []
        return
    found = table.scan().read_all().sort_by("n")["x"].combine_chunks()
    assert nested_arrays.meanings(found) == expected
    far = stores.client.table(table.name)
    assert nested_arrays.meanings(far.scan().read_all()["x"].combine_chunks()) == expected
    for row in table.rows():
        assert str(table.get(row["n"])) == str(far.get(row["n"])) == str(row)
    images = table.changes(before - 1, store.upper - 1).read_all().sort_by("n")["x"]
    assert nested_arrays.meanings(images.combine_chunks()) == expected
    assert store.verify().ok
    for suffix in ("parquet", "arrow", "jsonl", "csv"):
        out = stores.place / f"out.{suffix}"
        try:
            export_table(store, table.name, out)
        except UsageError as error:
            assert "which Parquet lacks" in str(error)  # noqa: PT017  # decimals below their point
            assert suffix == "parquet"
            continue
        if suffix == "parquet":
            out_column = pq.read_table(out)["x"].combine_chunks()
            assert nested_arrays.meanings(out_column) == expected
        table.delete_range(prefix=())
        import_files(table, [out], "overwrite", "last")
        found = table.scan().read_all().sort_by("n")["x"].combine_chunks()
        assert nested_arrays.meanings(found) == expected


SCHEMA = pa.schema(
    [pa.field("n", pa.int64()), *(pa.field(name, type_) for name, (type_, _) in NESTED.items())]
)
ROW = {"n": 1, **NESTED_EXAMPLES}
EMPTY = {"n": 2, **dict.fromkeys(NESTED)}


def test_rows_come_out_of_backups_snapshots_joins_and_history(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        table = store.table("docs", SCHEMA, "n")
        table.put_batch([ROW, EMPTY])
        first = store.upper - 1
        table.update(1, floats=[])
        with store.snapshot(first) as snapshot:
            assert list(snapshot.table("docs").rows()) == [ROW, EMPTY]
        assert [row and row["floats"] for _, row in table.history(1)] == [[], ROW["floats"]]
        labels = pa.table({"n": [2, 1, 1], "ts": [first, first, store.upper - 1]})
        joined = table.join(labels, on="n").read_all()
        deep = joined.select(["deep"]).to_batches()
        told = [row["deep"] for batch in deep for row in dicts(batch)]
        assert told == [None, ROW["deep"], ROW["deep"]]
        assert joined["floats"].to_pylist() == [None, ROW["floats"], []]
        collection = backup.Collection(tmp_path / "b")
        collection.backup(store)
        with collection.open() as view:
            assert view.table("docs").get(1) == {**ROW, "floats": []}
        table.revert(first, prefix=())
        assert table.get(1) == ROW


def test_a_filter_of_a_field_decides_here_and_by_a_client(stores: Stores) -> None:
    stores.renew()
    table = stores.store.table("docs", SCHEMA, "n")
    table.put_batch([ROW, EMPTY])
    far = stores.client.table("docs")
    for condition, wanted in (
        (pc.field("struct", "a") == -3, [1]),
        (pc.list_value_length(pc.field("floats")) == 3, [1]),
        (pc.field("map").is_null(), [2]),
    ):
        for each in (table, far):
            assert each.scan(filter=condition).read_all()["n"].to_pylist() == wanted
    for each in (table, far):
        with pytest.raises(UsageError, match="filter"):
            each.scan(filter=pc.field("floats") == pc.scalar([0.5])).read_all()
