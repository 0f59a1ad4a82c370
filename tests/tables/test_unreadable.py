"""Rows that hold what no column does, forged here: other rows are read, and such a row is
named, deleted and replaced, whether or not there is an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.cli.main import app as shell
from kvstore.errors import CorruptionError, UsageError
from kvstore.remote.client import connect
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.tables import TableFeed, UnreadableRow
from kvstore.tables.row_codec import RowCodec

pytestmark = pytest.mark.damages_store

TEXTS = pa.array([b"one", b"\xff\xfe", b"three"], pa.binary()).view(pa.string())
FOREVER = (1 << 63) - 1
CASES: dict[str, tuple[pa.Array, str]] = {
    "text": (TEXTS, "b'\\xff\\xfe'"),
    "large text": (TEXTS.cast(pa.large_string()), "b'\\xff\\xfe'"),
    "date": (pa.array([1, 1 << 30, 3], pa.int32()).view(pa.date32()), "1073741824 days"),
    "instant": (pa.array([1, FOREVER, 3]).view(pa.timestamp("us", "UTC")), f"{FOREVER} us"),
    "moment": (pa.array([1, -(1 << 62), 3]).view(pa.timestamp("s")), f"{-(1 << 62)} s"),
    "24:00": (pa.array([1, 86_400_000_000, 3]).view(pa.time64("us")), "86400000000 us"),
    "24:00 in ns": (
        pa.array([1, 86_400_000_000_000, 3]).view(pa.time64("ns")),
        "86400000000000 ns",
    ),
    "duration": (pa.array([1, 1 << 60, 3]).view(pa.duration("s")), f"{1 << 60} s"),
}
"""Three values of a column, of which the one in the middle is not held."""


def crafted(store: kvstore.Store, table: kvstore.Table, rows: dict[str, pa.Array]) -> None:
    """Store rows without a look at their values, as damage or a forger would."""
    codec = table.codec()
    definition = codec.definition
    schema = pa.schema([(name, definition.by_name[name].type) for name in rows])
    batch = pa.RecordBatch.from_arrays(list(rows.values()), schema=schema)
    layout = definition.layouts[definition.layout]
    columns = [batch.column(definition.by_id[each].name) for each, _ in layout]
    rows_of = RowCodec(definition.layout, layout, definition.where)
    values = rows_of.values(columns, batch.num_rows).to_pylist()
    with store.transaction() as transaction:
        transaction.put_rows(codec.key.keys(batch).to_pylist(), values)
        for index in definition.indexes:
            entries = codec.entries(index, batch).to_pylist()
            transaction.put_rows(entries, [b""] * len(entries))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[pa.Array, str]:
    return CASES[request.param]


@pytest.fixture(params=["no index", "index"])
def table(
    request: pytest.FixtureRequest, store: kvstore.Store, case: tuple[pa.Array, str]
) -> kvstore.Table:
    """A table with the rows of a case, under the keys 1 to 3."""
    schema = pa.schema([("k", pa.int64()), ("x", case[0].type), ("n", pa.int64())])
    indexes = {"by_x": ["x"]} if request.param == "index" else None
    made = store.table("t", schema, key=["k"], indexes=indexes)
    numbers = pa.array([1, 2, 3])
    crafted(store, made, {"k": numbers, "x": case[0], "n": numbers})
    return made


def keys_read(rows: Iterator[dict[str, Any]]) -> list[int]:
    """The keys of rows up to the first that cannot be read."""
    found: list[int] = []
    with pytest.raises(CorruptionError, match=r"k=2.*delete the row"):
        found.extend(row["k"] for row in rows)
    return found


def test_other_rows_are_read_and_the_bad_one_is_named(
    table: kvstore.Table, case: tuple[pa.Array, str]
) -> None:
    kind, shown = case[0].type, case[1]
    if kind != pa.time64("ns"):  # a number of Python holds it
        with pytest.raises(CorruptionError, match=r"table 't', row k=2.*'x'") as failure:
            table.get(2)
        assert shown in str(failure.value)
        assert keys_read(table.rows()) == [1]
        with pytest.raises(CorruptionError, match="row k=2"):
            table.get_many([(1,), (2,), (3,)])
    assert [row["n"] for row in table.get_many([(1,), (3,)])] == [1, 3]
    assert list(table.rows(columns=["n"])) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert table.get(2, columns=["k"]) == {"k": 2}
    assert table.history(3)[0].row == table.get(3)
    if pa.types.is_temporal(kind):
        assert table.scan().read_all()["x"].combine_chunks().equals(case[0])
        return
    read: list[pa.RecordBatch] = []
    with pytest.raises(CorruptionError, match=r"table 't', row k=2.*b'\\xff\\xfe'"):
        read.extend(table.scan())
    assert [batch.column("k").to_pylist() for batch in read] == [[1]]


def test_a_bad_row_is_deleted_and_replaced(store: kvstore.Store, table: kvstore.Table) -> None:
    table.put({"k": 2, "n": 5})
    assert table.get(2) == {"k": 2, "x": None, "n": 5}
    assert len(list(table.rows())) == 3
    assert store.verify().ok
    prefix = table.codec().key.prefix[:-1]
    count = 2 if table.indexes else 1
    assert len(list(store.keys(prefix, prefix + b"\xff"))) == 3 * count


@pytest.mark.parametrize("verb", ["delete", "put_batch", "dicts"])
def test_every_way_to_write_takes_the_place_of_a_bad_row(
    store: kvstore.Store, table: kvstore.Table, verb: str
) -> None:
    if verb == "delete":
        table.delete(2)
    elif verb == "put_batch":
        table.put_batch(pa.table({"k": [2, 4], "n": [5, 6]}))
    else:
        table.put_batch([{"k": 2, "n": 5}])
    assert store.verify().ok
    assert all(row["x"] is None or row["k"] in (1, 3) for row in table.rows())
    prefix = table.codec().key.prefix[:-1]
    entries = len(list(store.keys(prefix, prefix + b"\xff"))) - len(list(table.rows()))
    assert entries == (len(list(table.rows())) if table.indexes else 0)  # none is stale


def test_verify_and_doctor_name_each_bad_row(
    store: kvstore.Store, table: kvstore.Table, case: tuple[pa.Array, str], tmp_path: Path
) -> None:
    report = store.verify()
    (problem,) = report.problems
    assert problem.where == "table 't', row k=2"
    assert case[1] in problem.problem
    assert problem.problem.endswith("delete the row, or put it anew")
    store.close()
    found = CliRunner().invoke(shell, ["doctor", str(tmp_path / "store"), "--json"])
    (told,) = (line for line in found.output.splitlines() if "row k=2" in line)
    assert json.loads(told)["verdict"] == "bad"
    assert found.exit_code == 1


def test_gc_tidies_beside_a_bad_row(store: kvstore.Store, table: kvstore.Table) -> None:
    table.tidy()
    store.gc(keep=timedelta(0))
    assert len(store.verify().problems) == 1


@pytest.fixture
def mended(store: kvstore.Store) -> kvstore.Table:
    """A table whose row 2 could not be read, and was then put anew and deleted."""
    schema = pa.schema([("k", pa.int64()), ("x", pa.string()), ("n", pa.int64())])
    made = store.table("t", schema, key=["k"])
    store.hold("all")
    crafted(store, made, {"k": (numbers := pa.array([1, 2, 3])), "x": TEXTS, "n": numbers})
    made.put({"k": 2, "x": "two", "n": 2})
    made.delete(2)
    return made


READABLE = [
    (1, "one", "insert"),
    (3, "three", "insert"),
    (2, "two", "update_postimage"),
    (2, "two", "delete"),
]
"""The changes of `mended` that can be read."""


def told(rows: pa.RecordBatch | pa.Table) -> list[tuple[int, str, str]]:
    return [(row["k"], row["x"], row["_change_type"]) for row in rows.to_pylist()]


def consume(feed: TableFeed, found: list[tuple[int, str, str]]) -> None:
    for batch in feed:
        found += told(batch.rows)
        feed.ack(batch)


NAMED = r"table 't', row k=2.*'x'.*b'\\xff\\xfe', in its insert of .*on_unreadable"


def test_changes_name_a_version_that_cannot_be_read(mended: kvstore.Table) -> None:
    read: list[pa.RecordBatch] = []
    with pytest.raises(CorruptionError, match=NAMED):
        read.extend(mended.changes(0))
    assert [told(batch) for batch in read] == [READABLE[:1]]
    assert mended.changes(0, columns=["n"]).read_all()["n"].to_pylist() == [1, 2, 3, 2, 2, 2]


def test_changes_hand_over_a_version_that_cannot_be_read(
    store: kvstore.Store, mended: kvstore.Table
) -> None:
    taken: list[UnreadableRow] = []
    changes = mended.changes(0, on_unreadable=taken.append)
    assert told(changes.read_all()) == READABLE
    assert [each.change_type for each in taken] == ["insert", "update_preimage"]
    key = mended.codec().key.whole_key((2,))
    for each in taken:
        assert (each.key, each.value) == (key, store.get(key, as_of=taken[0].timestamp))
        assert each.problem.startswith("table 't', row k=2: column 'x'")
    assert taken[0].timestamp < taken[1].timestamp


@pytest.mark.parametrize("batch_rows", [1, 100])
def test_a_feed_stays_in_front_of_a_version_that_cannot_be_read(
    mended: kvstore.Table, batch_rows: int
) -> None:
    """The next call went on behind the batch that was never delivered, and an ack released it."""
    feed = mended.feed("f", start="oldest", batch_rows=batch_rows)
    found: list[tuple[int, str, str]] = []
    for _ in range(3):
        with pytest.raises(CorruptionError, match=NAMED):
            consume(feed, found)
        feed.ack(feed.position)
    assert found == READABLE[: batch_rows == 1]
    taken: list[UnreadableRow] = []
    feed = mended.feed("f", batch_rows=batch_rows, on_unreadable=taken.append)
    consume(feed, found)
    assert sorted(set(found)) == sorted(READABLE)
    assert [each.change_type for each in taken] == ["insert", "update_preimage"]


def test_a_feed_that_begins_with_a_state_gets_past_a_row_that_cannot_be_read(
    store: kvstore.Store, table: kvstore.Table, case: tuple[pa.Array, str]
) -> None:
    taken: list[UnreadableRow] = []
    feed = table.feed("f", start="state", on_unreadable=taken.append, batch_rows=2)
    keys = [key for batch in feed for key in batch.rows["k"].to_pylist()]
    assert sorted(keys + [2] * len(taken)) == [1, 2, 3]
    assert bool(taken) == (not pa.types.is_temporal(case[0].type))


def test_a_function_that_fails_is_asked_again(mended: kvstore.Table) -> None:
    asked: list[UnreadableRow] = []

    def take(row: UnreadableRow) -> None:
        asked.append(row)
        if len(asked) == 1:
            raise OSError("the place for such rows is full")

    feed = mended.feed("f", start="oldest", on_unreadable=take)
    with pytest.raises(OSError, match="full"):
        list(feed)
    assert [row for batch in feed for row in told(batch.rows)] == READABLE
    assert asked[0] == asked[1]


def test_history_hands_over_a_version_that_cannot_be_read(
    store: kvstore.Store, mended: kvstore.Table
) -> None:
    with pytest.raises(CorruptionError, match=r"row k=2.*in its version of .*on_unreadable"):
        mended.history(2)
    taken: list[UnreadableRow] = []
    versions = mended.history(2, on_unreadable=taken.append)
    assert [version.row for version in versions] == [None, {"k": 2, "x": "two", "n": 2}]
    (each,) = taken
    assert each.change_type == "version"
    assert each.timestamp < versions[1].timestamp
    listening = serving(app(store), ListenAddress("127.0.0.1", 0))
    with listening as running, connect(running.url) as client:
        there = client.table("t")
        again: list[UnreadableRow] = []
        assert there.history(2, on_unreadable=again.append) == versions
        assert again == taken
        with pytest.raises(CorruptionError, match="row k=2"):
            there.changes(0).read_all()
        with pytest.raises(UsageError, match="on_unreadable"):
            there.changes(0, on_unreadable=again.append)


BAD_KEYS: dict[str, tuple[pa.Array, Any]] = {
    "text": (TEXTS, b"\xff\xfe"),
    "instant": (CASES["instant"][0], FOREVER),
    "date": (CASES["date"][0], 1 << 30),
    "24:00": (CASES["24:00"][0], 86_400_000_000),
}


@pytest.mark.parametrize("name", BAD_KEYS)
@pytest.mark.parametrize("is_falling", [False, True])
def test_a_bad_key_is_deleted_as_errors_name_it(
    store: kvstore.Store, name: str, is_falling: bool
) -> None:
    values, given = BAD_KEYS[name]
    schema = pa.schema([("x", values.type), ("k", pa.int64())])
    key = kvstore.desc("x") if is_falling else "x"
    table = store.table("t", schema, key=[key, "k"], indexes={"by_k": ["k"]})
    crafted(store, table, {"x": values, "k": pa.array([1, 2, 3])})
    (problem,) = store.verify().problems
    assert problem.where == f"table 't', row x={given!r}, k=2"
    with pytest.raises(CorruptionError, match="k=2"):
        list(table.rows())
    with pytest.raises(UsageError, match="column 'x'"):
        table.get(given, 2)
    table.delete(given, 2)
    assert [row["k"] for row in table.rows()] in ([1, 3], [3, 1])
    assert [row["k"] for row in table.find("by_k")] == [1, 3]
    assert store.verify().ok


def test_a_client_deletes_a_bad_row(store: kvstore.Store, tmp_path: Path) -> None:
    schema = pa.schema([("x", pa.string()), ("s", pa.string())])
    table = store.table("t", schema, key=["x"], indexes={"by_s": ["s"]})
    crafted(store, table, {"x": TEXTS, "s": TEXTS})
    listening = serving(app(store), ListenAddress("127.0.0.1", 0))
    with listening as running, connect(running.url) as client:
        there = client.table("t")
        there.delete(b"\xff\xfe")
        assert [row["x"] for row in there.rows()] == ["one", "three"]
    assert store.verify().ok


def test_a_row_of_damaged_bytes_is_deleted(store: kvstore.Store) -> None:
    schema = pa.schema([("k", pa.int64()), ("s", pa.string())])
    table = store.table("t", schema, key=["k"], indexes={"by_s": ["s"]})
    table.put_batch([{"k": 1, "s": "a"}, {"k": 2, "s": "b"}, {"k": 3, "s": "c"}])
    key = table.codec().key.whole_key((2,))
    with store.transaction() as transaction:
        transaction.put_rows([key], [b"\x11\x00\x00"])
    with pytest.raises(CorruptionError, match="row k=2"):
        table.get(2)
    assert keys_read(table.rows()) == [1]
    assert [problem.where for problem in store.verify().problems] == ["table 't', row k=2"]
    table.delete(2)
    assert list(table.rows()) == [{"k": 1, "s": "a"}, {"k": 3, "s": "c"}]
    assert [row["k"] for row in table.find("by_s")] == [1, 3]


def test_a_value_of_the_column_is_read_whatever_its_zone(store: kvstore.Store) -> None:
    kind = pa.timestamp("us", "Pacific/Kiritimati")  # 14 hours ahead
    table = store.table("t", pa.schema([("k", pa.int64()), ("at", kind)]), key=["k"])
    last = kvstore.Timestamp(0).to_datetime().replace(year=9999, month=12, day=31, hour=23)
    table.put({"k": 1, "at": last})
    assert list(table.rows()) == [table.get(1)] == [{"k": 1, "at": last}]
    unknown = store.table(
        "u", pa.schema([("k", pa.int64()), ("at", pa.timestamp("us", "Mars/Base"))]), key=["k"]
    )
    unknown.put({"k": 1, "at": last})
    assert list(unknown.rows()) == [{"k": 1, "at": last}]
