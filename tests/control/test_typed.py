"""Rows of tables that come in bulk beside the owner of a store: the owner checks them itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.loading import stored_batches
from kvstore.bulk.manifest import EncodedBy
from kvstore.errors import ImportRefusedError, KeyConflictError, NotUniqueError, UsageError

pytestmark = pytest.mark.usefixtures("each_engine")

SCHEMA = pa.schema([("id", pa.int64()), ("mail", pa.string()), ("zone", pa.string())])


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", control=True) as store:
        users(store).put(user(1))
        yield store


@pytest.fixture
def client(owner: kvstore.Store) -> Iterator[kvstore.Client]:
    with kvstore.connect(owner.path) as client:
        yield client


def users(store: Any) -> kvstore.Table:
    indexes = {"by_mail": kvstore.unique("mail"), "by_zone": ["zone"]}
    found: kvstore.Table = store.table("users", SCHEMA, "id", indexes)
    return found


def user(number: int, **other: Any) -> dict[str, Any]:
    return {"id": number, "mail": f"m{number}", "zone": f"z{number % 3}", **other}


def staged(table: kvstore.Table, place: Path, *rows: dict[str, Any], is_named: bool = True) -> Path:
    """A sealed import of rows, which names the definition of their table or does not."""
    codec = table.codec()
    made = bulk.Import.create(place)
    for stored in stored_batches(codec, pa.RecordBatch.from_pylist(list(rows), SCHEMA)):
        with made.writer() as writer:
            writer.write(stored.sort_by("key"))
    made.seal(tables=[EncodedBy.of(codec)] if is_named else [])
    return place


def test_rows_and_entries_are_added_at_one_time_by_the_owner(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    place = staged(users(client), tmp_path / "staged", *map(user, range(1, 30)))
    stamp = bulk.ingest(client, place)
    assert bulk.ingest(client, place) == bulk.ingest(owner, place) == stamp
    table = owner.table("users")
    assert list(table.rows()) == list(map(user, range(1, 30)))
    assert [row["id"] for row in table.find("by_zone", "z1")] == list(range(1, 30, 3))
    assert {each.timestamp for each in table.history(7)} == {stamp}
    assert len(table.history(1)) == 2
    assert client.table("users").import_target().codec.definition.indexes


@pytest.mark.parametrize(
    ("come", "error", "told"),
    [
        pytest.param(
            lambda table: table.put(user(9, mail="m2")),
            NotUniqueError,
            "mail='m2' is taken by the row id=9",
            id="a row with the same values",
        ),
        pytest.param(
            lambda table: table.alter(add={"late": pa.int32()}),
            ImportRefusedError,
            "at revision 2, and its rows were made at 1",
            id="another definition",
        ),
    ],
)
def test_what_comes_behind_the_look_of_a_script_is_refused_by_the_owner(
    tmp_path: Path,
    owner: kvstore.Store,
    client: kvstore.Client,
    come: Callable[[kvstore.Table], None],
    error: type[Exception],
    told: str,
) -> None:
    place = staged(users(client), tmp_path / "staged", user(2), user(3))

    def step(name: str) -> None:
        if name == "add":
            come(owner.table("users"))

    with pytest.raises(error, match=told):
        bulk.ingest(client, place, progress=step)
    table = owner.table("users")
    assert [row["id"] for row in table.rows()] == [1, 9][: 1 + (error is NotUniqueError)]
    assert list(table.find("by_mail", "m3")) == []
    assert owner.imports.all() == []
    assert owner.path is not None
    assert not list((owner.path / "ingest").iterdir())
    if error is NotUniqueError:
        table.delete(9)
        owner.gc(keep=timedelta(0))
        bulk.ingest(client, place, on_conflict="error")
        assert [row["id"] for row in table.rows()] == [1, 2, 3]


def test_live_keys_of_a_table_refuse_an_import_that_asks_for_it(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    place = staged(users(client), tmp_path / "staged", user(2))

    def come(step: str) -> None:
        if step == "add":
            owner.table("users").put(user(2))

    with pytest.raises(KeyConflictError):
        bulk.ingest(client, place, on_conflict="error", progress=come)
    assert len(owner.table("users").history(2)) == 1


def test_rows_that_name_no_definition_are_refused_by_the_owner_too(
    tmp_path: Path, owner: kvstore.Store, client: kvstore.Client
) -> None:
    """A script that leaves its own checks out brings the files, and asks for them to be added."""
    assert owner.path is not None
    table = users(client)
    for number, (rows, is_named) in enumerate([([user(2)], False), ([user(2, mail="m1")], True)]):
        place = staged(table, tmp_path / f"staged-{number}", *rows, is_named=is_named)
        name = f"{bulk.read_manifest(place).import_id:016x}-0"
        shutil.copytree(place, owner.path / "ingest" / name)
        told = "is taken by the row id=1" if is_named else "which belong to tables"
        with pytest.raises(UsageError, match=told):
            client.work("add_import", None, directory=name)
        assert owner.imports.all() == []
        assert list(owner.table("users").rows()) == [user(1)]
