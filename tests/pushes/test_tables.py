"""Pushes of typed rows: each store has the rows of its shard with their entries, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import ManualClock, Span, Store, bulk, unique
from kvstore.bulk.manifest import EncodedBy
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.bulk.pushes.push_log import PushMode
from kvstore.bulk.pushes.pushes import import_id_of
from kvstore.errors import UsageError
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.tables import Table
from kvstore.tables.definition import rows_prefix, table_prefix
from kvstore.timeline.reserved import FIRST_ROW
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded
from tests.pushes.made import drain

SCHEMA = pa.schema([("id", pa.int64()), ("zone", pa.string()), ("fare", pa.float64())])
START = 1_700_000_000 * 10**9


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def stores(clock: ManualClock) -> Iterator[list[Store]]:
    with ExitStack() as opened:
        yield [
            opened.enter_context(kvstore.open(None, engine="memory", clock=clock)) for _ in range(2)
        ]


def trips_of(store: Store, **more: Any) -> Table:
    return store.table("trips", SCHEMA, "id", **{"indexes": {"by_zone": "zone"}, **more})


def rows(numbers: range, generation: int = 0) -> pa.Table:
    zones = [None if n % 9 == 8 else f"z{(n + generation) % 4}" for n in numbers]
    return pa.table(
        {"id": list(numbers), "zone": zones, "fare": [n + generation for n in numbers]}, SCHEMA
    )


def push_rows(
    pushes: Pushes, table: Table, *batches: pa.Table, shards: int = 1, **how: Any
) -> bulk.Push:
    with pushes.begin(shards, table=table, **how) as building:
        for batch in batches:
            building.add(batch)
        return building.seal()


def pullers_of(pushes: Pushes, stores: list[Store]) -> list[Puller]:
    return [Puller(store, pushes, name=f"s{at}", shard=at) for at, store in enumerate(stores)]


def sorted_rows(table: Table, as_of: int | None = None) -> list[dict[str, Any]]:
    return sorted(table.rows(as_of=as_of), key=lambda row: row["id"])


def require_same_by_index(table: Table, as_of: int | None = None) -> None:
    """Every look-up by the index equals a scan with a filter."""
    every = sorted_rows(table, as_of)
    for zone in (None, "z0", "z1", "z2", "z3"):
        found = sorted(table.find("by_zone", zone, as_of=as_of), key=lambda row: row["id"])
        assert found == [row for row in every if row["zone"] == zone]


def state_of(store: Store) -> list[tuple[bytes, bytes]]:
    """All rows of tables, and their entries."""
    return list(store.scan(FIRST_ROW))


def test_two_shards_have_their_rows_with_their_entries(pushes: Pushes, stores: list[Store]) -> None:
    tables = [trips_of(store) for store in stores]
    pullers = pullers_of(pushes, stores)
    pick = seeded()
    for generation in range(2):
        given = rows(range(generation * 40, 120), generation)
        order = [*range(given.num_rows)]
        pick.shuffle(order)
        with bounds(RUN_BYTES_MAX=900):  # the sort spills
            push = push_rows(pushes, tables[0], *given.take(order).to_batches(7), shards=2)
        assert push.rows == 2 * given.num_rows
        for puller in pullers:
            drain(puller)
    added = stores[0].upper - 1
    expected = rows(range(40), 0).to_pylist() + rows(range(40, 120), 1).to_pylist()
    assert sorted((row for t in tables for row in t.rows()), key=lambda row: row["id"]) == expected
    for at, (store, table) in enumerate(zip(stores, tables, strict=True)):
        require_same_by_index(table)
        span = Span.of_prefix(rows_prefix(1))
        assert all(bulk.shard_of(key, 2) == at for key in store.keys(span.start, span.end))
        assert store.verify().problems == ()

    pushes.revert(2)
    for puller in pullers:
        drain(puller)
    first = rows(range(120), 0).to_pylist()
    assert sorted((row for t in tables for row in t.rows()), key=lambda row: row["id"]) == first
    for table in tables:
        require_same_by_index(table)
    assert sorted_rows(tables[0], added) == [
        row for row in expected if row["id"] in {r["id"] for r in tables[0].rows()}
    ]
    require_same_by_index(tables[0], added)


def test_rows_of_a_push_expire_with_their_entries(
    pushes: Pushes, stores: list[Store], clock: ManualClock
) -> None:
    store = stores[0]
    trips = trips_of(store)
    dues = pa.array(
        [None if n % 3 else START + n * 10**9 for n in range(12)], pa.timestamp("ns", "UTC")
    )
    with pushes.begin(table=trips) as building:
        building.add(rows(range(12)).append_column("until", dues), expires="until")
        building.add(rows(range(20, 22)))
        building.seal()
    drain(Puller(store, pushes, name="s"))
    clock.advance(5 * 10**9)
    left = [n for n in (*range(12), 20, 21) if n % 3 or n > 5]
    assert [row["id"] for row in sorted_rows(trips)] == left
    span = Span.of_prefix(table_prefix(1))
    assert sum(1 for _ in store.keys(span.start, span.end)) == 2 * len(left)
    require_same_by_index(trips)


def test_a_column_of_the_table_tells_when_rows_of_a_push_expire(
    pushes: Pushes, stores: list[Store], clock: ManualClock
) -> None:
    schema = SCHEMA.append(pa.field("until", pa.timestamp("ns", "UTC")))
    dues = pa.array(
        [None if n % 3 else START + n * 10**9 for n in range(12)], pa.timestamp("ns", "UTC")
    )
    tables = [
        store.table("trips", schema, "id", {"by_zone": "zone"}, expires="until") for store in stores
    ]
    push_rows(pushes, tables[0], rows(range(12)).append_column("until", dues), shards=2)
    for puller in pullers_of(pushes, stores):
        drain(puller)
    clock.advance(5 * 10**9)
    left = [n for n in range(12) if n % 3 or n > 5]
    assert sorted(row["id"] for table in tables for row in table.rows()) == left
    for table in tables:
        require_same_by_index(table)


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda store: None, "there is no table 'trips'"),
        (lambda store: trips_of(store, indexes=None), "has other columns or indexes"),
        (lambda store: trips_of(store).alter(add={"tip": pa.float64()}), "at revision 2"),
        (lambda store: [store.table("other", SCHEMA, "id"), trips_of(store)], "has other columns"),
    ],
    ids=["unknown", "another schema", "altered", "another number"],
)
def test_a_store_with_another_table_refuses_by_name_and_changes_nothing(
    pushes: Pushes, stores: list[Store], prepare: Callable[[Store], Any], told: str
) -> None:
    made, serving = stores
    prepare(serving)
    before = state_of(serving)
    push_rows(pushes, trips_of(made), rows(range(9)))
    push = push_rows(pushes, trips_of(made), rows(range(9)), mode="replace")
    with pushes.begin() as building:
        with building.writer() as writer:
            writer.put(b"next", b"1")
        building.seal()
    drain(Puller(serving, pushes, name="s"))
    for number in (1, push.number):
        [status] = pushes.status(number).stores
        assert status.state == "refused"
        assert "ImportRefusedError" in status.error
        assert "'trips'" in status.error
        assert told in status.error
    assert serving.get(b"next") == b"1"
    assert state_of(serving) == before
    assert [record.rows for record in serving.imports.all()] == [1]


@pytest.mark.parametrize("is_first", [True, False], ids=["first part", "second part"])
def test_rows_of_a_newer_release_are_refused_by_name_and_change_nothing(
    pushes: Pushes, tmp_path: Path, is_first: bool
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        trips, job = trips_of(store), "a" * 32
        trips.put({"id": 1, "zone": "z1"})
        before = state_of(store)
        made = bulk.Import.begin_at(pushes.bucket(job, 0), import_id_of(job, 0), None)
        for number, is_newer in ((2, is_first), (3, not is_first)):
            key, value = trips.codec().row({"id": number})
            with made.writer() as writer:
                writer.put(key, bytes([value[0] + 0x10 * is_newer]) + value[1:])
        pushes.seal(job, [made.seal(tables=[EncodedBy.of(trips.codec())])])
        with bulk.pull(store, pushes.where, name="s", every=0.01) as puller:
            puller.wait(1, timeout=60)
            told = puller.status["pushes"]["1"]
            assert (state_of(store), store.imports.all()) == (before, [])
            assert [*(tmp_path / "store" / "ingest").iterdir()] == []
            push_rows(pushes, trips, rows(range(2, 5)))
            puller.wait(2, timeout=60)
        assert told["state"] == "refused"
        assert "FormatVersionError" in told["error"]
        assert "a row of table 'trips' has format version 2, this release reads 1" in told["error"]
        assert [row["id"] for row in sorted_rows(trips)] == [1, 2, 3, 4]


class Watched(MemoryBlob):
    """A bucket that calls `on_part` when a file of rows is fetched."""

    on_part: Callable[[], object] = staticmethod(lambda: None)

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        if "part-" in name:
            self.on_part()
        return super().get_range(name, start=start, length=length)


def test_an_alteration_during_the_fetch_refuses_the_push(stores: list[Store]) -> None:
    store, blob = stores[0], Watched()
    trips, pushes = trips_of(store), Pushes.over(blob, "watched")
    push_rows(pushes, trips, rows(range(9)))
    altered: list[None] = []
    blob.on_part = lambda: altered or altered.append(trips.alter(add={"tip": pa.float64()}))
    drain(Puller(store, pushes, name="s"))
    [status] = pushes.status(1).stores
    assert altered
    assert (status.state, list(trips.rows()), store.imports.all()) == ("refused", [], [])
    assert "at revision 2" in status.error


@pytest.mark.parametrize("shards", [1, 2])
def test_a_push_that_replaces_is_the_new_whole_of_the_table(
    pushes: Pushes, stores: list[Store], shards: int
) -> None:
    tables = [trips_of(store) for store in stores[:shards]]
    others = [store.table("others", SCHEMA, "id") for store in stores[:shards]]
    pullers = [
        Puller(store, pushes, name=f"s{at}", shard=at) for at, store in enumerate(stores[:shards])
    ]
    push_rows(pushes, tables[0], rows(range(60)), shards=shards)
    for at, puller in enumerate(pullers):
        drain(puller)
        others[at].put({"id": 1})
        tables[at].put({"id": 1000 + at, "zone": "z1"})
    before = [sorted_rows(table) for table in tables]
    push_rows(pushes, tables[0], rows(range(30, 80), 1), shards=shards, mode="replace")
    for puller in pullers:
        drain(puller)
    found = sorted((row for t in tables for row in t.rows()), key=lambda row: row["id"])
    assert found == rows(range(30, 80), 1).to_pylist()
    for store, table, other in zip(stores, tables, others, strict=False):
        require_same_by_index(table)
        span = Span.of_prefix(table_prefix(1))
        assert sum(1 for _ in store.keys(span.start, span.end)) == 2 * len(sorted_rows(table))
        assert list(other.rows()) == [{"id": 1, "zone": None, "fare": None}]
    pushes.revert(2)
    for puller in pullers:
        drain(puller)
    assert [sorted_rows(table) for table in tables] == before
    for table in tables:
        require_same_by_index(table)


def test_newer_rows_stay_with_their_entries(
    pushes: Pushes, stores: list[Store], clock: ManualClock
) -> None:
    store = stores[0]
    trips = trips_of(store)
    puller = Puller(store, pushes, name="s")
    push_rows(pushes, trips, rows(range(20)))
    drain(puller)
    clock.advance(10**9)
    built = store.sync() - 1
    clock.advance(10**9)
    trips.update(3, zone="z9")
    trips.update(4, fare=0.5)
    trips.delete(5)
    trips.put({"id": 100, "zone": "z1"})
    whole = rows(range(5, 12), 1)
    push_rows(pushes, trips, whole, mode="replace", keep_newer=True, built_at=built)
    drain(puller)
    assert pushes.status(2).stores[0].state == "added", pushes.status(2).stores[0].error
    found = {row["id"]: row for row in trips.rows()}
    assert set(found) == {3, 4, 100, *range(6, 12)}
    assert (found[3]["zone"], found[4]["fare"]) == ("z9", 0.5)
    require_same_by_index(trips)
    assert [row["id"] for row in trips.find("by_zone", "z9")] == [3]


def test_a_value_of_a_unique_index_moves_between_rows_in_a_push_that_replaces(
    pushes: Pushes, stores: list[Store]
) -> None:
    store = stores[0]
    mails = trips_of(store, indexes={"mail": unique("zone")})
    puller = Puller(store, pushes, name="s")
    mails.put({"id": 1, "zone": "ada"})
    moved = pa.table({"id": [2], "zone": ["ada"], "fare": [1.0]}, SCHEMA)
    push_rows(pushes, mails, moved)
    push_rows(pushes, mails, moved, mode="replace")
    twice = pa.table({"id": [3, 4], "zone": ["bob", "bob"], "fare": [1.0, 1.0]}, SCHEMA)
    push_rows(pushes, mails, twice, mode="replace")
    drain(puller)
    states = [pushes.status(number).stores[0] for number in (1, 2, 3)]
    assert [each.state for each in states] == ["refused", "added", "refused"]
    assert all("NotUniqueError" in states[at].error for at in (0, 2))
    assert list(mails.rows()) == list(mails.find("mail", "ada")) == moved.to_pylist()
    with pytest.raises(UsageError, match="'mail' is unique"):
        pushes.begin(table=mails, mode="replace", keep_newer=True, built_at=START)


def test_bad_rows_and_calls_are_refused_and_nothing_is_pushed(
    pushes: Pushes, stores: list[Store]
) -> None:
    trips = trips_of(stores[0])
    ids = pa.schema([("id", pa.int64())])
    for given, told in (
        (pa.table({"id": [1, None]}, ids), "'id' is null in row 1"),
        (pa.table({"id": ["x"]}), "'id' is int64, not string"),
        (pa.table({"id": [1], "cost": [2]}), "has no column 'cost'"),
        (pa.table({"id": [1, 2, 1]}, ids), "the row id=1 of table 'trips' came twice"),
        ([{"id": 1}], "rows must be Arrow data, not list"),
    ):
        with pytest.raises(UsageError, match=told):
            push_rows(pushes, trips, given)  # type: ignore[arg-type]
    with pushes.begin(table=trips) as building:
        with pytest.raises(UsageError, match="no column 'until'"):
            building.add(rows(range(1)), expires="until")
        with pytest.raises(UsageError, match="pass its rows to add"):
            building.writer()
    with pushes.begin() as building, pytest.raises(UsageError, match="begin it with table="):
        building.add(rows(range(1)))
    with pytest.raises(UsageError, match="with a table"):
        pushes.begin(table=trips, mode="replace", prefix=b"")
    assert pushes.list() == []


def test_a_push_of_a_foreign_job_replaces_no_other_table(
    pushes: Pushes, stores: list[Store]
) -> None:
    store = stores[0]
    trips, others = trips_of(store), store.table("others", SCHEMA, "id")
    others.put({"id": 1})
    with pushes.begin(mode="replace", prefix=table_prefix(2)) as building:
        building.seal()
    job = "a" * 32
    made = bulk.Import.begin_at(pushes.bucket(job, 0), import_id_of(job, 0), None)
    manifest = made.seal(tables=[EncodedBy.of(trips.codec())])
    pushes.seal(job, [manifest], PushMode("replace", (Span.of_prefix(table_prefix(2)),)))
    drain(Puller(store, pushes, name="s"))
    for number in (1, 2):
        assert "a table of which it has no rows" in pushes.status(number).stores[0].error
    assert len(list(others.rows())) == 1
