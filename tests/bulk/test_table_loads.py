"""`bulk.import_table`: rows come into a table of a store that is open here, that a process of this
machine has open, or that a server has, by one call and with one outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.served import import_verbs
from kvstore.errors import (
    AccessDeniedError,
    KeyConflictError,
    NotUniqueError,
    TableAlteredError,
    UsageError,
)
from kvstore.remote.client import connect
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

SCHEMA = pa.schema([("id", pa.int64()), ("mail", pa.string()), ("zone", pa.string())])
INDEXES = {"by_mail": kvstore.unique("mail"), "by_zone": ["zone"]}
ROADS = ("here", "beside", "a guest", "served")


class Road(NamedTuple):
    """The store, and the table by which rows come into it."""

    store: kvstore.Store
    table: kvstore.Table


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Road]:
    with ExitStack() as stack:
        store = stack.enter_context(kvstore.open(tmp_path / "store", control=True))
        table = store.table("users", SCHEMA, "id", INDEXES)
        if request.param == "beside":
            table = stack.enter_context(connect(store.path)).table("users")
        elif request.param == "a guest":
            guest = kvstore.open(store.path, shared=True, role="guest")
            table = stack.enter_context(guest).table("users")
        elif request.param == "served":
            (tmp_path / "staging").mkdir()
            verbs = import_verbs([str(tmp_path / "staging")])
            address = ListenAddress(path=str(tmp_path / "socket"))
            running = stack.enter_context(serving(app(store, verbs=verbs), address))
            table = stack.enter_context(connect(running.url)).table("users")
        yield Road(store, table)


@pytest.fixture
def left(road: Road, tmp_path: Path) -> Callable[[], list[Path]]:
    """What a load has left in the places where it stages."""

    def found() -> list[Path]:
        places = [tmp_path / "staging", tmp_path / "store" / "ingest"]
        return [each for place in places if place.is_dir() for each in place.iterdir()]

    return found


def user(number: int, **other: Any) -> dict[str, Any]:
    return {"id": number, "mail": f"m{number}", "zone": f"z{number % 3}", **other}


def batches(*rows: dict[str, Any], then: Callable[[], object] = lambda: None) -> Iterator[Any]:
    """Rows as batches of one; `then` is called behind the first."""
    for number, row in enumerate(rows):
        yield pa.RecordBatch.from_pylist([row], SCHEMA)
        if not number:
            then()


def reader(*rows: dict[str, Any], **how: Any) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(SCHEMA, batches(*rows, **how))


def unread() -> pa.RecordBatchReader:
    """Rows that nobody may read."""

    def none() -> Iterator[pa.RecordBatch]:
        raise AssertionError("a row was read")
        yield

    return pa.RecordBatchReader.from_batches(SCHEMA, none())


def state_of(store: kvstore.Store) -> dict[int, dict[str, Any]]:
    """The rows, each of which the indexes find too."""
    table = store.table("users")
    found = {row["id"]: row for row in table.rows()}
    for row in found.values():
        assert list(table.find("by_mail", row["mail"])) == [row]
    by_zone = [row for zone in ("z0", "z1", "z2") for row in table.find("by_zone", zone)]
    assert {row["id"]: row for row in by_zone} == found
    return found


def test_loads_and_refusals_are_those_of_a_model(
    road: Road, left: Callable[[], list[Path]]
) -> None:
    pick = seeded()
    model: dict[int, dict[str, Any]] = {}
    refused = 0
    with bounds(RUN_BYTES_MAX=400):  # the sort spills
        for _ in range(12):
            ids = pick.sample(range(12), 4)
            rows = [user(number, mail=f"m{pick.randrange(24)}") for number in ids]
            then = model | {row["id"]: row for row in rows}
            if len({row["mail"] for row in then.values()}) < len(then):
                refused += 1
                with pytest.raises(NotUniqueError, match="index 'by_mail': mail='m"):
                    bulk.import_table(road.table, reader(*rows))
            else:
                stamp = bulk.import_table(road.table, pa.Table.from_pylist(rows, SCHEMA))
                its = road.store.table("users")
                assert {its.history(number)[0].timestamp for number in ids} == {stamp}
                model = then
            assert state_of(road.store) == model
            assert left() == []
    assert 0 < refused < 12
    assert all(each.added for each in road.store.imports.all())


@pytest.mark.parametrize(
    ("come", "error"),
    [
        (lambda its: its.put(user(9, mail="m2")), NotUniqueError),
        (lambda its: its.put(user(2, mail="other")), KeyConflictError),
        (lambda its: its.alter(add={"late": pa.int32()}), TableAlteredError),
        (lambda its: its.alter(drop_index="by_zone"), TableAlteredError),
    ],
)
def test_what_comes_between_the_build_and_the_add_refuses_a_load(
    road: Road,
    left: Callable[[], list[Path]],
    come: Callable[[kvstore.Table], object],
    error: type[Exception],
) -> None:
    its = road.store.table("users")
    rows = reader(user(1), user(2), then=lambda: come(its))
    with pytest.raises(error) as found:
        bulk.import_table(road.table, rows, on_conflict="error")
    if error is KeyConflictError:
        assert "first: id=2 of table 'users'" in str(found.value)
    assert its.get(1) is None
    assert road.store.imports.all() == []
    assert left() == []


def test_rows_expire_and_a_row_that_comes_twice_is_named(
    road: Road, left: Callable[[], list[Path]]
) -> None:
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    given = pa.Table.from_pylist([user(1), user(2)], SCHEMA)
    due = given.append_column("until", pa.array([later, None], pa.timestamp("us", "UTC")))
    stamp = bulk.import_table(road.table, due, expires="until", import_id=7)
    assert bulk.import_table(road.table, unread(), import_id=7) == stamp
    its = road.store.table("users")
    assert timedelta(0) < (its.ttl(1) or timedelta(0)) <= timedelta(hours=1)
    assert its.ttl(2) is None
    with pytest.raises(UsageError, match="no column 'when'"):
        bulk.import_table(road.table, given, expires="when")
    with pytest.raises(UsageError, match="id=3 of table 'users' came twice"):
        bulk.import_table(road.table, reader(user(3), user(3)))
    bulk.import_table(road.table, reader(user(3), user(3, mail="b")), duplicates="last")
    assert its.get(3)["mail"] == "b"
    with pytest.raises(UsageError, match="column 'id' is int64, not string"):
        bulk.import_table(road.table, pa.table({"id": ["x"]}))
    assert left() == []


def test_an_id_that_was_reverted_loads_nothing_and_says_so(road: Road) -> None:
    first = bulk.import_table(road.table, reader(user(1)), import_id=5)
    assert bulk.import_table(road.table, unread(), import_id=5) == first
    road.store.revert_import(5)
    with pytest.raises(UsageError, match=r"import 5 was reverted at .*under another id"):
        bulk.import_table(road.table, unread(), import_id=5)
    bulk.import_table(road.table, reader(user(2)), import_id=6)
    assert list(state_of(road.store)) == [2]


def test_a_server_is_asked_before_a_row_is_read(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "staging", tmp_path / "elsewhere"
    place.mkdir()
    elsewhere.mkdir()
    tokens = [Token("w" * 32, ("write",)), Token("a" * 32, ("admin",))]
    gone = f"memory://{tmp_path.name}/staging"
    with ExitStack() as stack:
        store = stack.enter_context(kvstore.open(tmp_path / "store"))
        store.table("users", SCHEMA, "id", INDEXES)

        def users(name: str, secret: str, *places: str) -> kvstore.Table:
            verbs = import_verbs(places) if places != ("none",) else ()
            address = ListenAddress(path=str(tmp_path / name))
            running = stack.enter_context(serving(app(store, tokens, verbs=verbs), address))
            return stack.enter_context(connect(running.url, token=secret)).table("users")

        mine = users("a", "a" * 32, str(place), gone)
        for table, staging, told in (
            (users("b", "w" * 32, str(place)), None, "needs the right 'admin'"),
            (users("c", "a" * 32, "none"), None, "takes no imports; name a place"),
            (users("d", "a" * 32), None, "takes no imports; name a place"),
            (mine, elsewhere / "run", f"takes imports from {place}, {gone}, and not from there"),
            (mine, f"{gone}-other/run", "takes imports from"),
        ):
            with pytest.raises(AccessDeniedError, match=told):
                bulk.import_table(table, unread(), staging=staging)
        with pytest.raises(UsageError, match="which this process does not see"):
            bulk.import_table(users("e", "a" * 32, str(tmp_path / "none")), unread())
        assert not list(elsewhere.iterdir())
        assert not list(place.iterdir())

        bulk.import_table(mine, reader(user(1)), staging=f"{gone}/run")
        bulk.import_table(mine, reader(user(2)), staging=place / "run")
        bulk.import_table(mine, reader(user(3)))
        assert list(state_of(store)) == [1, 2, 3]
        assert not list(place.iterdir())
        again = bulk.Import.create(f"{gone}/run")  # nothing is left there
        again.discard()


def test_a_directory_that_the_server_does_not_see_is_refused(tmp_path: Path) -> None:
    """A server of another machine: its place has not the directory that the client has made."""
    verbs = import_verbs([str(tmp_path)])
    with (
        kvstore.open(tmp_path / "store") as store,
        serving(app(store, verbs=verbs), ListenAddress(path=str(tmp_path / "socket"))) as running,
        connect(running.url) as client,
    ):
        with pytest.raises(UsageError, match="the server does not see the directory"):
            client.call("import_places", staging=str(tmp_path / "run"))
        assert client.call("import_places", staging=str(tmp_path))["places"] == [str(tmp_path)]
