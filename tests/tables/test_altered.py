"""Tables that are altered while others read them, and indexes whose builders are killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import unique
from kvstore.errors import KVStoreError, NotUniqueError, TableAlteredError, UsageError
from kvstore.tables.definition import Definition, definition_key
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

pytestmark = pytest.mark.usefixtures("each_engine")

SCHEMA = pa.schema([("id", pa.int64()), ("zone", pa.string())])


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads that take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_reads_while_a_table_is_altered_have_the_columns_of_some_time(
    tmp_path: Path, each_engine: str
) -> None:
    """A row of a new definition is read by that definition, also directly after the alteration."""
    with kvstore.open(tmp_path / "store", each_engine, durability="async") as store:
        table = store.table("t", SCHEMA, key="id", indexes={"by_zone": "zone"})
        table.put({"id": 1, "zone": "a"})
        done = threading.Event()

        def alter() -> None:
            try:
                for turn in range(8):
                    table.alter(add={f"c{turn}": pa.int64()})
                    table.put({"id": 1, "zone": "a", f"c{turn}": turn})
                    table.alter(drop=[f"c{turn}"])
            finally:
                done.set()

        def last_change() -> Any:
            last = store.upper - 1
            return table.changes(last - 1, last, images="post").read_all().to_pylist()

        reads: list[Callable[[], Any]] = [
            lambda: [table.get(1)],
            lambda: table.get_many([1]),
            lambda: table.scan().read_all().to_pylist(),
            lambda: list(table.find("by_zone", "a")),
            lambda: last_change() or [{"id": 1}],
            lambda: [version.row for version in table.history(1)][:1],
        ]
        writer = threading.Thread(target=alter)
        writer.start()
        while not done.is_set():
            for read in reads:
                (row,) = read()
                assert row["id"] == 1
        writer.join()
        assert table.get(1) == {"id": 1, "zone": "a"}


def add_a_column(path: Path, engine: str, met: Any, found: Any) -> None:
    """Add a column at the same moment as another process does; tell the error, None if there is
    none."""
    met.wait()
    try:
        with kvstore.open(path, engine) as store:
            store.table("t").alter(add={"x": pa.int64()})
    except KVStoreError as error:
        found.put(type(error).__name__)
    else:
        found.put(None)


def test_of_two_processes_that_alter_a_table_at_once_one_is_told_no(
    spawn: Any, tmp_path: Path, each_engine: str
) -> None:
    path, met, found = tmp_path / "store", spawn.Barrier(2), spawn.Queue()
    with kvstore.open(path, each_engine) as store:
        store.table("t", SCHEMA, key="id").put({"id": 1, "zone": "a"})
    children = [
        spawn.Process(target=add_a_column, args=(path, each_engine, met, found)) for _ in range(2)
    ]
    for child in children:
        child.start()
    told = [found.get(timeout=300) for _ in children]
    for child in children:
        child.join()
    assert told.count(None) == 1
    assert {*told} <= {None, "LockedError", "UsageError"}
    with kvstore.open(path, each_engine) as store:
        assert store.table("t").get(1) == {"id": 1, "zone": "a", "x": None}
        assert len(store.history(definition_key("t"))) == 2


def alter_beside(path: Path, met: Any, found: Any) -> None:
    """As `add_a_column`, beside the process that has the store open."""
    with kvstore.connect(path) as owner:
        table = owner.table("t")
        met.wait()
        try:
            table.alter(add={"x": pa.int64()})
        except KVStoreError as error:
            found.put(type(error).__name__)
        else:
            found.put(None)


def test_of_two_scripts_that_alter_a_table_at_once_one_is_told_no(
    spawn: Any, tmp_path: Path, each_engine: str
) -> None:
    met, found = spawn.Barrier(2), spawn.Queue()
    with kvstore.open(tmp_path / "store", each_engine, control=True) as store:
        table = store.table("t", SCHEMA, key="id")
        table.put({"id": 1, "zone": "a"})
        arguments = (tmp_path / "store", met, found)
        children = [spawn.Process(target=alter_beside, args=arguments) for _ in range(2)]
        for child in children:
            child.start()
        told = [found.get(timeout=300) for _ in children]
        for child in children:
            child.join()
        assert told.count(None) == 1
        assert {*told} <= {None, "TableAlteredError", "UsageError"}
        assert table.get(1) == {"id": 1, "zone": "a", "x": None}
        assert len(store.history(definition_key("t"))) == 2


ROWS = 15
CHUNK = 4


def build(path: Path, engine: str, kill_at: int) -> None:
    """Build an index, and die at a chunk of it."""
    with bounds(INDEX_CHUNK_ROWS=CHUNK), kvstore.open(path, engine, durability="async") as store:
        table = store.table("t")

        def step(_: int) -> None:
            steps.append(1)
            if len(steps) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        steps: list[int] = []
        table.build_index("by_zone", progress=step)


@pytest.mark.parametrize("zone", ["zone", unique("zone")], ids=["plain", "unique"])
def test_a_builder_that_is_killed_at_each_chunk_makes_a_whole_index(
    spawn: Any, tmp_path: Path, each_engine: str, zone: Any
) -> None:
    path, rng = tmp_path / "store", seeded("INDEX_KILL_SEED")
    with kvstore.open(path, each_engine, durability="async") as store:
        table = store.table("t", SCHEMA, key="id")
        table.put_batch([{"id": number, "zone": f"z{number}"} for number in range(ROWS)])
        table.alter(add_index={"by_zone": zone})
    kills = 0
    while True:
        # Each run gets one or two chunks further than the run before.
        child = spawn.Process(target=build, args=(path, each_engine, rng.choice([1, 2])))
        child.start()
        child.join()
        kills += child.exitcode == -signal.SIGKILL
        with kvstore.open(path, each_engine, durability="async") as store:
            table = store.table("t")
            if child.exitcode == 0:
                break
            with pytest.raises(UsageError, match="not whole"):
                table.find("by_zone", "z1")
            number = rng.randrange(ROWS)
            table.put({"id": number, "zone": f"new{kills}"})
            table.delete(rng.randrange(ROWS))
    assert kills >= ROWS // CHUNK // 2
    with kvstore.open(path, each_engine, durability="async") as store:
        table = store.table("t")
        assert list(table.find("by_zone")) == sorted(table.rows(), key=lambda row: row["zone"])
        if isinstance(zone, unique):
            taken = next(table.rows())
            with pytest.raises(NotUniqueError):
                table.put({"id": 99, "zone": taken["zone"]})


class Meeting:
    """Rows whose reading meets an alteration: a new index comes, and is built, meanwhile."""

    def __init__(self, table: kvstore.Table, rows: pa.Table) -> None:
        self._table, self._rows = table, rows
        self.readings = 0

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        self.readings += 1
        if self.readings == 1:
            self._table.alter(add_index={"by_zone": "zone"})
            self._table.build_index("by_zone")
        return self._rows.__arrow_c_stream__(requested_schema)


def test_rows_that_meet_an_alteration_are_encoded_anew(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        table = store.table("t", SCHEMA, "id")
        rows = Meeting(table, pa.table({"id": [1, 2], "zone": ["a", "b"]}, SCHEMA))
        table.put_batch(rows)
        assert rows.readings == 2
        assert [row["id"] for row in table.find("by_zone", "a")] == [1]


class Overtaken(Meeting):
    """Rows in two batches. The first has been checked against a new unique index when another row
    takes one of its values."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        self.readings += 1
        if self.readings == 1:
            self._table.alter(add_index={"by_zone": unique("zone")})
            self._table.build_index("by_zone")
        return pa.RecordBatchReader.from_batches(SCHEMA, self._batches()).__arrow_c_stream__()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        first, second = self._rows.to_batches(max_chunksize=1)
        yield first
        if self.readings == 2:
            self._table.put({"id": 99, "zone": "a"})
        yield second


def test_rows_that_meet_a_unique_index_are_checked_at_their_commit(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        table = store.table("t", SCHEMA, "id")
        rows = Overtaken(table, pa.table({"id": [1, 2], "zone": ["a", "b"]}, SCHEMA))
        with pytest.raises(NotUniqueError):
            table.put_batch(rows)
        assert rows.readings == 3
        assert [row["id"] for row in table.rows()] == [99]


def test_a_batch_that_meets_an_alteration_writes_nothing(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        table = store.table("t", SCHEMA, "id")
        stack = ExitStack()
        stack.enter_context(store.batch()).table("t").put({"id": 1, "zone": "a"})
        table.alter(add_index={"by_zone": "zone"})
        with pytest.raises(TableAlteredError, match="'t'"):
            stack.close()
        assert list(table.rows()) == []


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The table of each definition that was decoded."""
    names: list[str] = []
    decode = Definition.from_bytes

    def noted(name: str, stored: bytes) -> Definition:
        names.append(name)
        return decode(name, stored)

    monkeypatch.setattr(Definition, "from_bytes", noted)
    return names


def test_an_alteration_decodes_each_definition_once(
    tmp_path: Path, each_engine: str, decoded: list[str]
) -> None:
    with kvstore.open(tmp_path / "store", each_engine, durability="async") as store:
        table = store.table("t", SCHEMA, key="id")
        table.put({"id": 1, "zone": "a"})
        for turn in range(30):
            table.alter(add={f"c{turn}": pa.int64()})
            decoded.clear()
            table.alter(drop=f"c{turn}")
            assert table.get(1) == {"id": 1, "zone": "a"}
            assert decoded == ["t", "t"], "the one before it and the new one, of all"


def test_a_new_table_decodes_no_table_but_the_one_before_it(
    tmp_path: Path, each_engine: str, decoded: list[str]
) -> None:
    with kvstore.open(tmp_path / "store", each_engine, durability="async") as store:
        for turn in range(30):
            decoded.clear()
            store.table(f"t{turn}", SCHEMA, key="id")
            assert decoded == [f"t{turn - 1}"] * (turn > 0)


def test_a_table_that_is_there_is_opened_without_decoding_others(
    tmp_path: Path, each_engine: str, decoded: list[str]
) -> None:
    with kvstore.open(tmp_path / "store", each_engine, durability="async") as store:
        tables = [store.table(f"t{turn}", SCHEMA, key="id") for turn in range(5)]
        decoded.clear()
        store.table("t3", SCHEMA, key="id")
        assert decoded == ["t3"]
        tables[3].alter(add={"tip": pa.int64()})
        decoded.clear()
        store.table("t5", SCHEMA, key="id").put({"id": 1, "zone": "a"})
        assert sorted(decoded) == ["t3", "t4", "t5"], (
            "definitions that are new since the last making"
        )
