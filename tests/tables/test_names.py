"""Names of columns: those of ours are refused for new columns, and any other name works, also one
that a parameter of a call has."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

import kvstore
from kvstore.errors import UsageError
from kvstore.remote.client import connect, connect_async
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.tables import TableCodec
from kvstore.tables.catalogue import ADDED_NAMES, define
from kvstore.tables.definition import definition_key
from kvstore.tables.joins import ROW_TIMESTAMP
from kvstore.tables.row_changes import CHANGE_FIELDS

OURS = [*sorted(ADDED_NAMES), "Row_Timestamp", "kvstore_gone", "KVSTORE_due"]
PARAMETERS = ["self", "key", "where", "expires", "columns", "as_of", "row", "name", "call", "args"]


def schema_with(name: str) -> pa.Schema:
    return pa.schema([("k", pa.int64()), (name, pa.int64())])


def test_each_column_that_we_add_has_a_name_of_ours() -> None:
    assert {field.name for field in CHANGE_FIELDS} | {ROW_TIMESTAMP} <= ADDED_NAMES


@pytest.mark.parametrize("name", OURS)
def test_a_new_column_has_no_name_of_ours(store: kvstore.Store, name: str) -> None:
    refused = pytest.raises(UsageError, match=f"cannot be called {name!r}.*choose another name")
    with refused:
        store.table("t", schema_with(name), key=["k"])
    with refused:
        store.table("t", schema_with(name), key=[name])
    table = store.table("t", schema_with("n"), key=["k"])
    with refused:
        table.alter(add={name: pa.int64()})
    listening = serving(app(store), ListenAddress("127.0.0.1", 0))
    with listening as running, connect(running.url) as client:
        with refused:
            client.table("u", schema_with(name), key=["k"])
        with refused:
            client.table("t").alter(add={name: pa.int64()})
    assert store.tables() == ["t"]


@pytest.mark.parametrize("name", ["_change_type", "row_timestamp"])
def test_a_table_of_an_older_release_with_such_a_column_is_used(
    store: kvstore.Store, name: str
) -> None:
    definition = define("t", 1, schema_with(name), ["k"])
    with store.transaction() as transaction:
        transaction.put_rows([definition_key("t")], [TableCodec(definition).stored])
    since = store.sync() - 1
    table = store.table("t", schema_with(name), key=["k"])
    table.put({"k": 1, name: 5})
    assert table.get(1) == {"k": 1, name: 5}
    assert list(table.rows()) == [{"k": 1, name: 5}]
    table.alter(add={"n": pa.int64()})
    labels = pa.table({"k": [1]})
    if name == "row_timestamp":
        for call in (
            lambda: table.join(labels, "k", None),
            lambda: kvstore.join(labels, [kvstore.Join(table)], key="k", at=None).read_all(),
        ):
            with pytest.raises(UsageError, match=f"{name!r}, which would be there twice"):
                call()
        assert table.join(labels, "k", None, columns=["n"]).read_all().num_columns == 3
        return
    with pytest.raises(UsageError, match=f"{name!r}, which would be there twice"):
        table.changes(since)
    assert table.changes(since, columns=["k"]).read_all().num_rows == 1


def test_a_column_may_have_the_name_of_a_parameter(store: kvstore.Store) -> None:
    schema = pa.schema([("k", pa.int64()), *((name, pa.int64()) for name in PARAMETERS)])
    table = store.table("t", schema, ["k"], {"by_self": ["self"]})
    table.put({"k": 1} | dict.fromkeys(PARAMETERS, 5))
    table.update(1, **dict.fromkeys(PARAMETERS, 6))
    assert table.get(1) == {"k": 1} | dict.fromkeys(PARAMETERS, 6)
    assert [row["self"] for row in table.find("by_self", 6)] == [6]
    with store.transaction() as transaction:
        transaction.table("t").update(1, **dict.fromkeys(PARAMETERS, 7))
    assert table.get(1, columns=["self"]) == {"self": 7}
    listening = serving(app(store), ListenAddress("127.0.0.1", 0))
    with listening as running, connect(running.url) as client:
        client.table("t").update(1, **dict.fromkeys(PARAMETERS, 8))
        assert client.table("t").get(1) == {"k": 1} | dict.fromkeys(PARAMETERS, 8)

        async def later() -> None:
            async with await connect_async(running.url) as there:
                table = await there.table("t")
                await table.update(1, **dict.fromkeys(PARAMETERS, 9))

        asyncio.run(later())
    assert table.get(1) == {"k": 1} | dict.fromkeys(PARAMETERS, 9)
