"""What comes in is what was there: every array and every value, by every door, comes back equal or
is refused by column and row before anything is written; and what a door took can be got out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.bulk.loading import import_files
from kvstore.bulk.outside import export_table
from kvstore.bulk.pushes.pushes import PushedRows
from kvstore.errors import UsageError
from kvstore.remote.client import connect
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.tables import TableCodec
from kvstore.tables.catalogue import define
from kvstore.tables.definition import Definition
from kvstore.tables.exact import as_python, decimals, same_values
from kvstore.tables.row_codec import conform
from tests.tables import arrays

FIRST = 1000
"""The number of the first row that a door tells."""


@st.composite
def given_column(draw: st.DrawFn) -> tuple[pa.DataType, pa.Array]:
    """A type of columns, and an array that comes: mostly of a type that the column takes."""
    column = draw(st.sampled_from(arrays.COLUMNS))
    fitting = [source for source in arrays.SOURCES if arrays.takes(column, source)]
    source = draw(st.sampled_from(fitting) | st.sampled_from(arrays.SOURCES))
    return column, draw(arrays.arrays(source))


def inner(type_: pa.DataType) -> pa.DataType:
    """The type of the values of a dictionary or of runs."""
    has_values = pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_)
    return type_.value_type if has_values else type_


def outcome(column: pa.DataType, array: pa.Array) -> tuple[list[Any] | None, str]:
    """What a column must have afterwards, or the error that must name what it does not hold."""
    source, meanings = inner(array.type), arrays.meanings(array)
    if not arrays.takes(column, source):
        return None, r"column 'x' is .*, not "
    for row, value in enumerate(meanings):
        if not arrays.holds(column, source, value):
            return None, rf"column 'x' is .*, which does not hold .* of row {FIRST + row}; "
    return [arrays.as_meaning(column, source, value) for value in meanings], ""


def definition_of(column: pa.DataType, *, is_key: bool) -> Definition:
    schema = pa.schema([("n", pa.int64()), ("x", column)])
    return define("t", 1, schema, ["x", "n"] if is_key else ["n"], {"by_x": ["x"]})


def check_codec(data: st.DataObject) -> None:
    """A batch that is conformed, encoded and decoded, as a value and in a key and in an index."""
    column, array = data.draw(given_column())
    is_key = data.draw(st.booleans())
    definition = definition_of(column, is_key=is_key)
    codec = TableCodec(definition)
    batch = pa.RecordBatch.from_arrays([pa.array(range(len(array))), array], ["n", "x"])
    expected, error = outcome(column, array)
    if is_key and None in arrays.meanings(array):
        error, expected = r"column 'x' is ", None
    if expected is None:
        with pytest.raises(UsageError, match=error):
            conform(definition, batch, FIRST)
        check_values(codec, array, [])
        return
    rows = conform(definition, batch, FIRST)
    keys, values = codec.encode(rows)
    found = codec.decode(keys, values).column("x")
    if is_key:
        expected = [zero(column, each) for each in expected]
    assert arrays.meanings(found) == expected
    assert list(codec.faults(keys, values)) == []
    entries = codec.entries(definition.indexes[0], rows).to_pylist()
    pairs = list(zip(keys.to_pylist(), values.to_pylist(), strict=True))
    assert [codec.entries_of(*pair) for pair in pairs] == [[entry] for entry in entries]
    for pair, row in (
        zip(pairs, codec.decode(keys, values).to_pylist(), strict=True)
        if (arrays.family(column) not in ("instant", "timestamp", "duration", "time"))
        else ()
    ):
        assert_equal(codec.to_dict(*pair), row)
    check_values(codec, array, [codec.to_dict(*pair)["x"] for pair in pairs])


def check_values(codec: TableCodec, array: pa.Array, rows: list[Any]) -> None:
    """Each value of an array that Python has is taken or refused by `put` as the array is."""
    column = codec.definition.by_name["x"].type
    source = inner(array.type)
    meanings = arrays.meanings(array)
    for at, value in enumerate(meanings):
        given_value = python_value(array, at)
        if value is None or given_value is NOTHING:
            continue
        is_held = arrays.takes(column, source) and arrays.holds(column, source, value)
        row = {"n": at, "x": given_value}
        if not is_held:
            with pytest.raises(UsageError, match="column 'x'"):
                codec.row(row)
            continue
        found = codec.to_dict(*codec.row(row))["x"]
        if rows:
            assert_equal({"x": found}, {"x": rows[at]})


NOTHING: Any = object()


def python_value(array: pa.Array, at: int) -> Any:
    """The value of Python that means the same as a value of an array, if there is one."""
    kind = inner(array.type)
    plain = array
    if kind != array.type:
        if pa.types.is_run_end_encoded(array.type) or "view" in str(kind):
            return NOTHING
        plain = array.dictionary.take(array.indices)
    if arrays.family(kind) in ("instant", "timestamp", "date", "time", "duration"):
        value = as_python(plain, at) if kind != pa.date64() else NOTHING
        return NOTHING if type(value) is int or value is pd.NaT else value
    if arrays.family(kind) in ("text", "decimal"):
        try:
            return plain[at].as_py()
        except UnicodeDecodeError:
            return NOTHING
    return plain[at].as_py()


def zero(column: pa.DataType, bits: Any) -> Any:
    """In a key -0.0 is 0.0."""
    is_zero = arrays.family(column) == "float" and bits == arrays.bits_of(-0.0)
    return arrays.bits_of(0.0) if is_zero else bits


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        wanted = other[name]
        is_nan = value != value and wanted != wanted
        assert value == wanted or is_nan, (name, value, wanted)


@given(st.data())
@settings(max_examples=250)
def test_an_array_goes_in_exactly_or_is_refused(data: st.DataObject) -> None:
    check_codec(data)


@pytest.mark.soak
@given(st.data())
@settings(max_examples=20_000)
def test_many_arrays_go_in_exactly_or_are_refused(data: st.DataObject) -> None:
    check_codec(data)


def test_the_first_value_that_a_column_does_not_hold_is_named() -> None:
    """The year 10000 is a whole number of days, and Arrow refuses the next value itself."""
    days = pa.array([253_402_300_800_000, -62_135_596_800_001], pa.int64()).view(pa.date64())
    batch = pa.record_batch({"n": pa.array([1, 2]), "x": days})
    with pytest.raises(UsageError, match="which does not hold 2932897 days of row 1000; "):
        conform(definition_of(pa.date32(), is_key=False), batch, FIRST)
    with pytest.raises(UsageError, match="which does not hold -62135596800001 ms of row 1000; "):
        conform(definition_of(pa.date32(), is_key=False), batch.slice(1), FIRST)


@pytest.mark.parametrize("seconds", [-536_784_513, 86_400, 4_294_968, (1 << 31) - 1, -1])
def test_a_time_that_arrow_multiplies_into_another_one_is_refused(seconds: int) -> None:
    """Arrow's cast from seconds to milliseconds wraps around at 32 bits."""
    times = pa.array([86_399, seconds], pa.int32()).view(pa.time32("s"))
    batch = pa.record_batch({"n": pa.array([1, 2]), "x": times})
    for column in arrays.TIMES:
        definition = definition_of(column, is_key=False)
        with pytest.raises(UsageError, match=rf"does not hold .* of row {FIRST + 1}; "):
            conform(definition, batch, FIRST)
        found = conform(definition, batch.slice(0, 1), FIRST)
        assert arrays.meanings(found.column("x")) == [86_399 * 10**9]


DECIMALS: Final = {
    9: pa.decimal32,
    18: pa.decimal64,
    38: pa.decimal128,
    76: pa.decimal256,
}


@st.composite
def decimal_types(draw: st.DrawFn, widths: Sequence[int]) -> pa.DataType:
    most = draw(st.sampled_from(widths))
    precision = draw(st.integers(1, most))
    scale = draw(st.integers(0, precision) | st.integers(-5, most))
    return DECIMALS[most](precision, scale)


def check_decimals(data: st.DataObject) -> None:
    """Numbers of any type of decimals or integers, in a column of any other one."""
    exact = [*arrays.INTEGERS, pa.float64()]
    column = data.draw(decimal_types([38, 76]) | st.sampled_from(exact))
    source = data.draw(decimal_types([9, 18, 38, 76]) | st.sampled_from(arrays.INTEGERS))
    array = data.draw(arrays.flat(source))
    expected, error = outcome(column, array)
    if expected is None:
        with pytest.raises(UsageError, match=error):
            same_values(array, column, "column 'x'", FIRST)
    else:
        found = same_values(array, column, "column 'x'", FIRST)
        assert found.type == column
        assert arrays.meanings(found) == expected


@given(st.data())
@settings(max_examples=400)
def test_a_decimal_is_the_same_number_or_refused(data: st.DataObject) -> None:
    check_decimals(data)


@pytest.mark.soak
@given(st.data())
@settings(max_examples=20_000)
def test_many_decimals_are_the_same_numbers_or_refused(data: st.DataObject) -> None:
    check_decimals(data)


@pytest.mark.parametrize(
    ("source", "number", "column"),
    [
        (pa.decimal128(25, 1), 9 * 10**18, pa.decimal128(37, 32)),
        (pa.decimal32(1, -1), -6, pa.decimal256(76, 76)),
        (pa.decimal128(28, 36), 203761810436037933111467023, pa.decimal128(28, -3)),
        (pa.int64(), 9 * 10**17, pa.decimal128(38, 38)),
    ],
    ids=str,
)
def test_a_decimal_that_arrow_shifts_out_of_its_bits_is_refused(
    source: pa.DataType, number: int, column: pa.DataType
) -> None:
    """Arrow's cast wraps around at 128 or 256 bits, and gave another number."""
    given = pa.array([number], pa.int64()) if source == pa.int64() else None
    if given is None:
        given = decimals([number.to_bytes(source.byte_width, "little", signed=True)], source)
    with pytest.raises(UsageError, match=rf"does not hold .* of row {FIRST}; "):
        conform(definition_of(column, is_key=False), pa.record_batch({"n": [1], "x": given}), FIRST)


@pytest.mark.parametrize("foreign", arrays.FOREIGN, ids=str)
def test_an_array_of_no_column_is_refused(foreign: pa.DataType) -> None:
    for column in (pa.string(), pa.int64(), pa.binary()):
        batch = pa.record_batch({"n": pa.array([1]), "x": pa.nulls(1, foreign)})
        with pytest.raises(UsageError, match="column 'x' is "):
            conform(definition_of(column, is_key=False), batch, FIRST)


class Stores:
    """A store and a client of its server, for some cases: they cost more than a case. `place` is
    for files."""

    CASES = 20

    def __init__(self, place: Path) -> None:
        self.place, self._left, self._stack = place, 0, ExitStack()

    def renew(self) -> None:
        """Make another store, now and then. Its tables slow `verify` down."""
        self._left -= 1
        if self._left >= 0:
            return
        self.close()
        self._left = self.CASES
        place = Path(self._stack.enter_context(TemporaryDirectory(dir=self.place)))
        opened = kvstore.open(place / "s", engine="memory", durability="async")
        self.store = self._stack.enter_context(opened)
        listening = serving(app(self.store), ListenAddress("127.0.0.1", 0))
        running = self._stack.enter_context(listening)
        self.client = self._stack.enter_context(connect(running.url))

    def table(self, column: pa.DataType) -> kvstore.Table:
        """A new table with a column `x` of a type."""
        schema = pa.schema([("n", pa.int64()), ("x", column)])
        name = f"t{self._left}"
        return self.store.table(name, schema, key=["n"], indexes={"by_x": ["x"]})

    def close(self) -> None:
        self._stack.close()


Door = Callable[[Stores, kvstore.Table, pa.Table], None]


def by_batch(_: Stores, table: kvstore.Table, rows: pa.Table) -> None:
    table.put_batch(rows)


def by_transaction(stores: Stores, table: kvstore.Table, rows: pa.Table) -> None:
    with stores.store.transaction() as transaction:
        transaction.table(table.name).put_batch(rows)


def require_whole(rows: pa.Table) -> None:
    """A file whose values are not of its own types is refused as damaged, also where a dictionary
    has one that no row asks for."""
    column = rows["x"].combine_chunks()
    if pa.types.is_decimal(inner(column.type)) or pa.types.is_dictionary(column.type):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise NotToldError from error


def by_arrow_file(stores: Stores, table: kvstore.Table, rows: pa.Table) -> None:
    require_whole(rows)
    with pa.ipc.new_file(stores.place / "rows.arrow", rows.schema) as writer:
        writer.write_table(rows)
    import_files(table, [stores.place / "rows.arrow"], "overwrite", "last")


def by_parquet(stores: Stores, table: kvstore.Table, rows: pa.Table) -> None:
    require_whole(rows)
    if inner(rows.schema.field("x").type) == pa.date64():
        raise NotToldError  # Arrow rounds it to days
    path = stores.place / "rows.parquet"
    try:
        pq.write_table(rows, path)
    except (pa.ArrowException, OSError) as error:
        raise NotToldError from error
    if inner(pq.read_schema(path).field("x").type) != inner(rows["x"].type):
        raise NotToldError  # Parquet has fewer types
    import_files(table, [path], "overwrite", "last")


def by_push(stores: Stores, table: kvstore.Table, rows: pa.Table) -> None:
    made = PushedRows(table.codec(), 2)
    try:
        made.add(rows, None)
    finally:
        made.close()
    by_batch(stores, table, rows)


def by_dicts(_: Stores, table: kvstore.Table, rows: pa.Table) -> None:
    column = rows["x"].combine_chunks()
    values = [python_value(column, at) for at in range(len(column))]
    if NOTHING in values or not arrays.takes(table.schema.field("x").type, inner(column.type)):
        raise NotToldError  # no value of Python means the same
    table.put_batch([{"n": at, "x": value} for at, value in enumerate(values)])


def by_client(stores: Stores, table: kvstore.Table, rows: pa.Table) -> None:
    stores.client.table(table.name).put_batch(rows)


DOORS: dict[str, Door] = {
    "put_batch": by_batch,
    "transaction": by_transaction,
    "arrow file": by_arrow_file,
    "parquet": by_parquet,
    "push": by_push,
    "dicts": by_dicts,
    "client": by_client,
}


def check_door(data: st.DataObject, door: Door, stores: Stores) -> None:
    """Rows go in by a door and are read by each way, or are refused and none is there. Then each is
    deleted."""
    column, array = data.draw(given_column().filter(lambda given: len(given[1]) > 0))
    expected, _ = outcome(column, array)
    stores.renew()
    store, table = stores.store, stores.table(column)
    rows = pa.table({"n": pa.array(range(len(array)), pa.int64()), "x": array})
    before = store.upper
    refusal = None
    try:
        door(stores, table, rows)
    except UsageError as error:
        refusal = error
    except NotToldError:
        return
    if refusal is not None or expected is None:
        assert list(store.changes(before - 1, store.upper - 1)) == []
        assert list(table.scan()) == []
        assert (refusal is not None) is (expected is None), refusal
        return
    found = table.scan().read_all().sort_by("n").column("x").combine_chunks()
    assert arrays.meanings(found) == expected
    read = list(table.rows())
    for row in read:
        assert_equal(table.get(row["n"]), row)
        assert_equal(table.get_many([(row["n"],)])[0], row)
        assert row["n"] in [each["n"] for each in table.find("by_x", row["x"])]
    assert len(list(table.find("by_x"))) == len(read)
    assert store.verify().ok
    out = stores.place / "out.parquet"
    if pa.types.is_decimal(column) and column.scale < 0:
        with pytest.raises(UsageError, match=r"column 'x' is decimal.*columns="):
            export_table(store, table.name, out)
    else:
        export_table(store, table.name, out)
        assert arrays.meanings(pq.read_table(out)["x"].combine_chunks()) == expected
    for row in read:
        table.delete(row["n"])
    assert list(table.rows()) == list(table.find("by_x")) == []


class NotToldError(Exception):
    """The library that a test writes with has no such type or value."""


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    found = Stores(tmp_path)
    yield found
    found.close()


SHARED: Final = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""A case leaves nothing behind but an empty table."""


@pytest.mark.parametrize("name", DOORS)
@given(data=st.data())
@settings(max_examples=50, suppress_health_check=SHARED)
def test_every_door_takes_exactly_or_refuses(
    name: str, data: st.DataObject, stores: Stores
) -> None:
    check_door(data, DOORS[name], stores)


@pytest.mark.soak
@pytest.mark.parametrize("name", DOORS)
@given(data=st.data())
@settings(max_examples=2_000, suppress_health_check=SHARED)
def test_every_door_takes_exactly_or_refuses_many(
    name: str, data: st.DataObject, stores: Stores
) -> None:
    check_door(data, DOORS[name], stores)
