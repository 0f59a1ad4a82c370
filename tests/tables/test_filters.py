"""Filters of scans: the rows are those of Arrow's own filter over all rows, by every handle, and
keys and indexes spare the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import reduce
from operator import and_, or_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import desc
from kvstore.errors import CorruptionError, NotFoundError, UsageError
from kvstore.server import ListenAddress, app, serving
from kvstore.tables.catalogue import arguments_of
from kvstore.tables.definition import Definition
from kvstore.tables.filters import RowFilter
from tests.harness.bounds import bounds
from tests.tables.drawn import definitions, rows_of

COMPARISONS = (pc.equal, pc.not_equal, pc.less, pc.less_equal, pc.greater, pc.greater_equal)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[kvstore.Store, kvstore.Client]]:
    with (
        kvstore.open(None, "memory") as store,
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        kvstore.connect(running.url) as client,
    ):
        yield store, client


@st.composite
def expressions(
    draw: st.DrawFn, definition: Definition, rows: list[dict[str, Any]]
) -> pc.Expression:
    """A filter whose literals are mostly values of the rows, in the type of the column or as Arrow
    makes a scalar of them."""

    def literal(name: str) -> pa.Scalar:
        value = draw(st.sampled_from([row[name] for row in rows] or [None]))
        type_ = definition.by_name[name].type
        if pa.types.is_floating(type_):
            value = draw(st.sampled_from([value, 0.0, -0.0, float("nan"), 1]))
        kinds = [type_] if type(value) is kvstore.Timestamp else [type_, None, pa.float64()]
        kind = draw(st.sampled_from(kinds))
        try:
            return pa.scalar(value, kind)
        except (pa.ArrowException, TypeError):
            return pa.scalar(None, type_)

    def condition() -> pc.Expression:
        name = draw(st.sampled_from(definition.schema.names))
        column, kind = pc.field(name), draw(st.integers(0, 9))
        if kind < 5:
            sides = [column, pc.scalar(literal(name))]
            return draw(st.sampled_from(COMPARISONS))(*draw(st.permutations(sides)))
        if kind == 5:
            values = draw(st.lists(st.sampled_from([row[name] for row in rows] or [None])))
            return column.isin(pa.array(values, definition.by_name[name].type))
        if kind == 6 and pa.types.is_string(definition.by_name[name].type):
            return pc.starts_with(column, (literal(name).as_py() or "")[:1])
        if kind == 7:
            return ~condition()
        return draw(st.sampled_from([column.is_null(), column.is_valid()]))

    found: pc.Expression = reduce(
        lambda one, two: draw(st.sampled_from([and_, and_, or_]))(one, two),
        [condition() for _ in range(draw(st.integers(1, 4)))],
    )
    return found


@given(st.data())
def test_a_filtered_scan_is_arrows_filter_over_the_scan(
    served: tuple[kvstore.Store, kvstore.Client], data: st.DataObject
) -> None:
    store, client = served
    definition = data.draw(definitions())
    rows = data.draw(st.lists(rows_of(definition), max_size=12))
    chosen = data.draw(expressions(definition, rows))
    made = arguments_of(definition)
    table = store.table("t", *made)
    try:
        table.put_batch(pa.Table.from_pylist(rows, definition.schema))
        at = store.now()
        whole = table.scan().read_all()
        prefix = data.draw(st.sampled_from([None, *rows]))
        first = definition.key_columns[0].name
        key = () if prefix is None else (prefix[first],)
        how = {
            "reverse": data.draw(st.booleans()),
            "limit": data.draw(st.sampled_from([None, 1, 3])),
            "columns": data.draw(st.sampled_from([None, [], definition.schema.names[::-1]])),
        }
        every = table.scan(*key, reverse=how["reverse"]).read_all()
        with (
            store.snapshot(at) as snapshot,
            store.transaction() as transaction,
            client.snapshot(at) as far,
            client.transaction() as sent,
            bounds({"FILTER_ENTRIES_MAX": data.draw(st.sampled_from([0, 1, 4096]))}),
            bounds({"FILTER_SPANS_MAX": data.draw(st.sampled_from([1, 3, 1000]))}),
        ):
            handles = [
                each.table("t") for each in (store, snapshot, transaction, client, far, sent)
            ]
            try:
                expected = every.filter(chosen)
            except (pa.ArrowException, TypeError):
                if not _fits(chosen, whole.schema):
                    for each in handles:
                        with pytest.raises(UsageError, match=r"^filter"):
                            each.scan(filter=chosen)
                return  # what Arrow says of a row may depend on the rows before it
            passed = expected.num_rows
            if how["limit"] is not None:
                expected = expected.slice(0, how["limit"])
            if how["columns"] is not None:
                expected = expected.select(how["columns"])
            for each in handles:
                found = each.scan(*key, filter=chosen, **how).read_all()
                assert found.num_rows == expected.num_rows
                assert _same(found, expected)
                assert each.count(*key, filter=chosen) == passed
    finally:
        table.drop()


def _fits(chosen: pc.Expression, schema: pa.Schema) -> bool:
    try:
        pa.RecordBatch.from_pylist([], schema=schema).filter(chosen)
    except (pa.ArrowException, TypeError):
        return False
    return True


def _same(one: pa.Table, two: pa.Table) -> bool:
    """Whether two tables are equal. NaN is like NaN."""
    return repr(one.to_pylist()) == repr(two.to_pylist()) and one.schema == two.schema


# -- what is spared --------------------------------------------------------------------------

SCHEMA = pa.schema(
    [
        ("carrier", pa.string()),
        ("day", pa.timestamp("us", "UTC")),
        ("number", pa.int32()),
        ("gate", pa.string()),
        ("fare", pa.decimal128(9, 2)),
    ]
)
NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
KEY = ["carrier", desc("day"), "number"]
field = pc.field


@pytest.fixture
def flights(store: kvstore.Store) -> kvstore.Table:
    """A thousand rows. All but those of UA at 3 and 4 o'clock are damaged: a read of one raises."""
    table = store.table("flights", SCHEMA, KEY, {"by_gate": ["gate", "fare"]})
    rows = [
        {
            "carrier": carrier,
            "day": NOON + timedelta(hours=hour),
            "number": number,
            "gate": f"{carrier}{hour}",
            "fare": Decimal(number),
        }
        for carrier in ("AA", "UA")
        for hour in range(10)
        for number in range(50)
    ]
    table.put_batch(pa.Table.from_pylist(rows, SCHEMA))
    codec = table.codec()
    damaged = [codec.row(row)[0] for row in rows if row["gate"] not in ("UA3", "UA4")]
    with store.transaction() as transaction:
        transaction.put_rows(damaged, [b"\x11\xff\xff"] * len(damaged))
    return table


SPARING: dict[str, tuple[pc.Expression, int]] = {
    "key": ((field("carrier") == "UA") & (field("day") == NOON + timedelta(hours=3)), 50),
    "falling": ((field("carrier") == "UA") & (field("day").isin([NOON + timedelta(hours=4)])), 50),
    "stretch": (
        (pc.starts_with(field("carrier"), "U"))
        & (field("carrier") > "TZ")
        & (field("carrier") == "UA")
        & (field("day") > NOON + timedelta(hours=2, minutes=30))
        & (field("day") < NOON + timedelta(hours=4, minutes=30))
        & (field("number") < 25),
        50,
    ),
    "either": (
        (field("carrier") == "UA")
        & (
            (field("day") == NOON + timedelta(hours=3))
            | ((field("day") == NOON + timedelta(hours=4)) & (field("number") < 10))
        ),
        60,
    ),
    "index": (field("gate") == "UA3", 50),
    "index stretch": (
        field("gate").isin(["UA3", "UA4", "none"]) & (field("fare") >= Decimal("45.50")),
        8,
    ),
    "index prefix": (pc.starts_with(field("gate"), "UA3") | (field("gate") == "UA4"), 100),
    "nothing": ((field("carrier") == "UA") & (field("carrier") == "AA"), 0),
}


@pytest.mark.damages_store
@pytest.mark.parametrize("name", SPARING)
def test_rows_that_keys_and_indexes_exclude_are_not_read(
    flights: kvstore.Table, store: kvstore.Store, name: str
) -> None:
    chosen, count = SPARING[name]
    with (
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        kvstore.connect(running.url) as client,
        store.snapshot() as snapshot,
    ):
        for source in (store, snapshot, client):
            assert source.table("flights").count(filter=chosen) == count
    with pytest.raises(CorruptionError):
        flights.scan(filter=field("gate") != "UA3").read_all()


# -- what is refused -------------------------------------------------------------------------


def test_a_filter_that_does_not_fit_is_refused_before_a_row_is_read(store: kvstore.Store) -> None:
    table = store.table("t", pa.schema([("id", pa.int64()), ("name", pa.string())]), "id")
    table.put({"id": 1, "name": "a"})
    refused: list[tuple[Any, type[UsageError], str]] = [
        (field("gate") == 1, NotFoundError, "has no column 'gate'"),
        (field("id") == "one", UsageError, "no kernel"),
        (field("id") + 1, UsageError, "must evaluate to bool"),
        ("id > 1", UsageError, "pass an expression of pyarrow.compute"),
        (pc.match_substring_regex(field("name"), "("), UsageError, "regular expression"),
    ]
    with (
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        kvstore.connect(running.url) as client,
    ):
        for each in (table, client.table("t")):
            for chosen, kind, says in refused:
                with pytest.raises(kind, match=says):
                    each.scan(filter=chosen)
        slow = pc.utf8_lpad(field("name"), 1 << 30) == "x"
        for far in (slow, field(0) == 1):
            with pytest.raises(UsageError, match="filter the rows of the scan"):
                client.table("t").scan(filter=far)
        assert len(table.scan(filter=field(0) == 1).read_all()) == 1


@given(st.data())
def test_bytes_that_are_no_filter_are_refused(data: st.DataObject) -> None:
    """As a stranger may send them: a filter that was cut, changed or made up."""
    chosen = (field("a") == "x") & field("b").isin([1, None]) | pc.starts_with(field("a"), "y")
    whole = bytearray(RowFilter(chosen).to_bytes())
    assert RowFilter.from_bytes(bytes(whole)).expression.equals(chosen)
    change: Callable[[], bytes] = data.draw(
        st.sampled_from(
            [
                lambda: bytes(whole[: data.draw(st.integers(0, len(whole) - 1))]),
                lambda: data.draw(st.binary(max_size=50)),
                lambda: _with(whole, data.draw(st.lists(_changes(len(whole)), min_size=1))),
            ]
        )
    )
    batch = pa.RecordBatch.from_pylist([{"a": "x", "b": 1}, {"a": None, "b": 2}])
    with suppress(UsageError):
        RowFilter.from_bytes(change()).passed(batch)


def _changes(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size - 1), st.integers(0, 255))


def _with(whole: bytearray, changes: list[tuple[int, int]]) -> bytes:
    found = bytearray(whole)
    for at, value in changes:
        found[at] = value
    return bytes(found)
