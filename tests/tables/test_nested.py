"""Lists, structs and maps in columns: they come back exactly or are refused, as arrays and one by
one; damaged bytes are refused."""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.errors import CorruptionError, UsageError
from kvstore.limits import NESTED_SLOTS_MAX
from kvstore.tables import TableCodec
from kvstore.tables.catalogue import Alteration, alter, define
from kvstore.tables.definition import Definition, kind_of, parse_type
from kvstore.tables.nested import parse_nested, type_text
from kvstore.tables.row_codec import conform, dicts
from kvstore.tables.words import cell_text, read_value, to_type, to_value
from tests.tables import nested_arrays
from tests.tables.drawn import NESTED, NESTED_EXAMPLES
from tests.tables.nested_arrays import RefusedError

GOLDEN = Path(__file__).parent / "golden"


def table_of(type_: pa.DataType, *, is_nullable: bool = True) -> TableCodec:
    fields = [pa.field("n", pa.int64()), pa.field("x", type_, is_nullable)]
    return TableCodec(define("t", 1, pa.schema(fields), "n"))


def given_batch(array: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(range(len(array))), array], ["n", "x"])


# -- exactly, or refused ------------------------------------------------------------------------


def check_arrays(data: st.DataObject) -> None:
    column = data.draw(nested_arrays.columns())
    source = data.draw(nested_arrays.sources(column))
    array = data.draw(nested_arrays.arrays_of(source))
    codec = table_of(column)
    batch = given_batch(array)
    if not nested_arrays.takes(column, source):
        with pytest.raises(UsageError, match=r"column 'x' is .*, not "):
            conform(codec.definition, batch, 1000)
        return
    meanings = nested_arrays.meanings(array)
    expected = []
    for row, value in enumerate(meanings):
        try:
            expected.append(nested_arrays.held(column, source, value))
        except RefusedError:  # noqa: PERF203  # the first one ends the loop
            with pytest.raises(UsageError, match=rf" of row {1000 + row}: "):
                conform(codec.definition, batch, 1000)
            return
    rows = conform(codec.definition, batch, 1000)
    assert rows.column("x").type == column
    keys, values = codec.encode(rows)
    found = codec.decode(keys, values)
    found.validate(full=True)
    assert nested_arrays.meanings(found.column("x")) == expected
    assert list(codec.faults(keys, values)) == []
    assert codec.encode(found)[1].equals(values)
    again = conform(codec.definition, found)
    assert codec.encode(again)[1].equals(values)
    for row, (key, value) in zip(dicts(found), zip(keys, values, strict=True), strict=True):
        pair = key.as_py(), value.as_py()
        assert str(codec.to_dict(*pair)) == str(row)  # NaN is no equal of NaN
        assert codec.row(row) == pair


@given(st.data())
@settings(max_examples=250)
def test_an_array_goes_in_exactly_or_is_refused(data: st.DataObject) -> None:
    check_arrays(data)


@pytest.mark.soak
@given(st.data())
@settings(max_examples=20_000)
def test_many_arrays_go_in_exactly_or_are_refused(data: st.DataObject) -> None:
    check_arrays(data)


@given(nested_arrays.columns())
def test_a_type_is_told_by_its_text(type_: pa.DataType) -> None:
    found = parse_type(type_text(type_))
    assert (found, type_text(found)) == (type_, type_text(type_))
    definition = table_of(type_).definition
    assert Definition.from_bytes("t", definition.to_bytes()) == definition


@given(st.text(min_size=1, max_size=8))
def test_a_field_may_have_any_name(name: str) -> None:
    if any("\ud800" <= each <= "\udfff" for each in name):
        return
    type_ = pa.struct([(name, pa.list_(pa.int8())), (name + "!", pa.map_(pa.string(), pa.int8()))])
    assert parse_type(type_text(type_)) == type_
    codec = table_of(type_)
    row = {"n": 1, "x": {name: [1], name + "!": {name: 2}}}
    assert codec.to_dict(*codec.row(row)) == row


# -- bytes --------------------------------------------------------------------------------------


def test_bytes_of_nested_values_are_these() -> None:
    """Values of format 1. The file was written by the release that introduced it."""
    lines = []
    for name, (type_, _) in NESTED.items():
        kind = kind_of(type_)
        cell = kind.stored(NESTED_EXAMPLES[name])
        assert kind.value is not None
        assert kind.value(cell) == NESTED_EXAMPLES[name]
        lines.append(f"{type_text(type_)} {cell.hex()}")
    assert "\n".join(lines) + "\n" == (GOLDEN / "nested-v1.txt").read_text()


def outcome(read: Any) -> Any:
    try:
        return str(read())
    except (CorruptionError, OverflowError):
        return "refused"


@given(st.sampled_from(sorted(NESTED)), st.data())
@settings(max_examples=400)
def test_damaged_bytes_are_refused_alike_one_by_one_and_as_arrays(
    name: str, data: st.DataObject
) -> None:
    type_, values = NESTED[name]
    codec = table_of(type_)
    kind = kind_of(type_)
    cell = bytearray(kind.stored(data.draw(values)))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(cell)))
        byte = data.draw(st.binary(max_size=2) | st.sampled_from([b"\xff\xff\xff\x7f", b"\x81"]))
        cell[at : at + data.draw(st.integers(0, 2))] = byte
    key, value = codec.row({"n": 1, "x": None})
    value = codec.__dict__["_writer"].value([bytes(cell)])

    def by_array() -> Any:
        found = codec.decode(pa.array([key]), pa.array([value]))
        found.validate()
        return dicts(found)[0]

    def alone() -> Any:
        return codec.to_dict(key, value)

    assert outcome(alone) == outcome(by_array)
    faults = list(codec.faults(pa.array([key]), pa.array([value])))
    if outcome(alone) == "refused":
        assert faults
    elif not faults:
        assert outcome(lambda: codec.to_dict(*codec.row(alone()))) == outcome(alone)


def test_forged_bytes_make_a_bounded_number_of_values() -> None:
    """Each of four bytes would make eight vectors of a million zeros."""
    codec = table_of(pa.list_(pa.list_(pa.float32(), 1 << 19)))
    key, _ = codec.row({"n": 1})
    value = codec.__dict__["_writer"].value([b"\x81\x02" + b"\xff" * 16])  # 128 items, all null
    with pytest.raises(CorruptionError, match="no value of"):
        codec.to_dict(key, value)
    with pytest.raises(CorruptionError, match="no value of"):
        codec.decode(pa.array([key]), pa.array([value]))


def test_a_value_with_too_many_values_is_refused_before_it_is_written() -> None:
    codec = table_of(pa.list_(pa.int8()))
    many = pa.array(np.zeros(NESTED_SLOTS_MAX + 2, np.int8))
    array = pa.ListArray.from_arrays(pa.array([0, 1, len(many)], pa.int32()), many)
    with pytest.raises(UsageError, match=r"the lists of row 1 have more than"):
        codec.encode(conform(codec.definition, given_batch(array)))
    with pytest.raises(UsageError, match="column 'x': its lists have more than"):
        codec.row({"n": 1, "x": [0] * (NESTED_SLOTS_MAX + 1)})


# -- refused ------------------------------------------------------------------------------------

SCHEMA = pa.schema(
    [
        pa.field("n", pa.int64()),
        pa.field("s", pa.struct([pa.field("a", pa.int8(), False), ("b", pa.list_(pa.string()))])),
        pa.field("m", pa.map_(pa.string(), pa.float64())),
        pa.field("v", pa.list_(pa.field("item", pa.float32(), False), 2)),
    ]
)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"s": {"a": None}}, "column 's': a: it is null, and takes no null"),
        ({"s": {}}, "column 's': a: it is null, and takes no null"),
        ({"s": {"a": 1, "c": 2}}, "column 's': there is no field 'c', but a, b"),
        ({"s": [1]}, "column 's': .* is no dict of the fields a, b"),
        ({"s": {"a": 1, "b": ["x", 2]}}, "column 's': b: item 1: 2 is not a text"),
        ({"s": {"a": 1, "b": "xy"}}, "column 's': b: 'xy' is no list"),
        ({"m": [("a", 1.0), ("a", 2.0)]}, "column 'm': it has two keys 'a'"),
        ({"m": {None: 1.0}}, "column 'm': key: it is null"),
        ({"m": {3: 1.0}}, "column 'm': key: 3 is not a text"),
        ({"m": 5}, "column 'm': 5 is no list"),
        ({"v": [1.0]}, "column 'v': 1 values, not 2"),
        ({"v": [1.0, None]}, "column 'v': it is null, and takes no null"),
        ({"v": [1.0, 0.1]}, "column 'v': item 1: 0.1 is no float32 exactly"),
    ],
)
def test_a_value_that_a_column_does_not_hold_is_refused_with_its_place(
    row: dict[str, Any], told: str
) -> None:
    codec = TableCodec(define("t", 1, SCHEMA, "n"))
    with pytest.raises(UsageError, match=told):
        codec.row({"n": 1, **row})


def test_numpy_arrays_and_tuples_are_lists() -> None:
    codec = TableCodec(define("t", 1, SCHEMA, "n"))
    for value in (np.array([0.5, 2], np.float32), (0.5, 2), np.array([0.5, 2.0])):
        row = codec.to_dict(*codec.row({"n": 1, "v": value}))
        assert row["v"] == [0.5, 2.0]


@pytest.mark.parametrize("name", ["s", "m", "v"])
def test_a_nested_column_is_no_part_of_a_key_or_an_index(name: str) -> None:
    told = rf"names '{name}', which is .*; name a column of single values"
    for key, indexes in (([name], {}), (["n", name], {}), (["n"], {"by": [name]})):
        with pytest.raises(UsageError, match=told):
            define("t", 1, SCHEMA, key, indexes)
    with pytest.raises(UsageError, match="event_time"):
        define("t", 1, SCHEMA, "n", event_time=name)
    with pytest.raises(UsageError, match="expires"):
        define("t", 1, SCHEMA, "n", expires=name)
    definition = define("t", 1, SCHEMA, "n")
    with pytest.raises(UsageError, match=told):
        alter(definition, Alteration(add_index={"by": name}))


@pytest.mark.parametrize(
    ("type_", "told"),
    [
        (pa.list_(pa.float16()), "a table has no columns of type halffloat"),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), "no columns of type dictionary"),
        (pa.struct([]), "a table has no columns of type struct<>"),
        (pa.struct([("a", pa.int8()), ("a", pa.int8())]), "a struct with the fields 'a', 'a'"),
        (pa.map_(pa.float64(), pa.int8()), "the keys of a map are double"),
        (pa.map_(pa.list_(pa.int8()), pa.int8()), "the keys of a map are list"),
        (pa.list_(pa.int8(), 1 << 21), "use list"),
        (pa.list_(pa.int8(), 0), "use list"),
        (parse_nested("list<" * 16 + "int8" + ">" * 16, parse_type), ""),
        (pa.list_(parse_nested("list<" * 16 + "int8" + ">" * 16, parse_type)), "too deep"),
    ],
)
def test_types_of_which_there_are_no_columns(type_: pa.DataType, told: str) -> None:
    if not told:
        codec = table_of(type_)
        row = {"n": 1, "x": None}
        assert codec.to_dict(*codec.row(row)) == row
        return
    with pytest.raises(UsageError, match=told):
        table_of(type_)


def test_a_nested_column_is_added_and_dropped_and_not_changed_within() -> None:
    first = define("t", 1, SCHEMA, "n")
    row = TableCodec(first).row({"n": 1, "m": {"a": 1.5}})
    added = alter(
        first,
        Alteration(
            drop="m",
            add={
                "tags": (pa.list_(pa.field("element", pa.string(), metadata={"k": "v"})), ["x"]),
                "pair": pa.list_(pa.int64(), 2),
            },
        ),
    )
    assert added.by_name["tags"].type.value_field.equals(pa.field("item", pa.string()), True)
    codec = TableCodec(added)
    wanted = {"n": 1, "s": None, "v": None, "tags": ["x"], "pair": None}
    assert codec.to_dict(*row) == wanted
    keys, values = (pa.array([each]) for each in row)
    assert dicts(codec.decode(keys, values)) == [wanted]
    with pytest.raises(UsageError, match="does not widen"):
        alter(added, Alteration(widen={"tags": pa.list_(pa.large_string())}))


# -- words --------------------------------------------------------------------------------------


@given(nested_arrays.columns(), st.data())
@settings(max_examples=150)
def test_values_come_back_from_their_json(column: pa.DataType, data: st.DataObject) -> None:
    codec = table_of(column)
    array = data.draw(nested_arrays.arrays_of(column))
    try:
        rows = conform(codec.definition, given_batch(array))
    except UsageError:
        return
    for row in dicts(rows):
        text = cell_text(column, row["x"])
        if text is not None:
            found = to_value(column, text, "x")
            assert codec.row({"n": 1, "x": found}) == codec.row({"n": 1, "x": row["x"]})


def test_types_are_written_as_words() -> None:
    for word, wanted in (
        ("list<int>", pa.list_(pa.int64())),
        ("fixed_size_list<float>[3]", pa.list_(pa.float32(), 3)),
        ("struct<a: int, b b: list<text> not null>", None),
        ("map<text, decimal128(9, 2)>", pa.map_(pa.string(), pa.decimal128(9, 2))),
        ("list<element: uuid not null>", pa.list_(pa.field("item", pa.uuid(), False))),
        ("large_list< timestamp[us, tz=+05:30] >", pa.large_list(pa.timestamp("us", "+05:30"))),
    ):
        if wanted is None:
            wanted = pa.struct(
                [pa.field("a", pa.int64()), pa.field("b b", pa.list_(pa.string()), False)]
            )
        assert to_type(word) == wanted
    for word in ("list<", "list<int", "list<int>x", "list<nothing>", "map<int>", "struct<int>"):
        with pytest.raises(UsageError, match="is no type"):
            to_type(word)


def test_a_value_of_json_that_is_none_says_why() -> None:
    type_ = SCHEMA.field("s").type
    for given_value, told in (
        ({"a": 1, "c": 2}, "there is no field 'c'"),
        ([1], "write an object"),
        ({"a": 1, "b": {"x": 1}}, "write a list"),
        ("{", "is no struct"),
        ('{"a": 1, "a": 2}', "an object has a field twice"),
    ):
        with pytest.raises(UsageError, match=told):
            read_value(type_, given_value, "here")
    pairs = pa.map_(pa.int16(), pa.binary())
    assert read_value(pairs, [[1, "a"]], "x") == read_value(pairs, {"1": "a"}, "x") == [(1, b"a")]


# -- in a store ---------------------------------------------------------------------------------


def test_a_table_of_documents(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        table = store.table("docs", SCHEMA, "n")
        row = {"n": 1, "s": {"a": 1, "b": ["x", None]}, "m": {"p": 0.5}, "v": [1.0, 2.0]}
        table.put(row)
        table.put_batch([{"n": 2, "s": None, "m": {}, "v": None}])
        assert table.get(1) == row
        assert table.update(1, m={"q": 1.0})
        assert table.get(1) == {**row, "m": {"q": 1.0}}
        near = pc.list_value_length(pc.field("s", "b")) == 2
        assert [each["n"] for each in dicts(table.scan(filter=near).read_next_batch())] == [1]
        assert table.scan(filter=pc.field("m").is_null()).read_all().num_rows == 0
        with pytest.raises(UsageError, match="filter"):
            table.scan(filter=pc.field("s") == pc.scalar({"a": 1})).read_all()


def test_a_class_has_lists_and_maps(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        from tests.tables.typed_rows import Document

        table = store.table("docs", Document, "name")
        row = Document("a", [0.5, 1.5], {"x": 1})
        table.put(row)
        assert table.get("a") == row
        assert table.schema.field("tags").type == pa.map_(
            pa.string(), pa.field("value", pa.int64(), nullable=False)
        )


def test_dates_and_decimals_lie_within(tmp_path: Path) -> None:
    type_ = pa.list_(pa.struct([("on", pa.date32()), ("at", pa.timestamp("ns", "UTC"))]))
    codec = table_of(type_)
    row = {"n": 1, "x": [{"on": date(2026, 1, 31), "at": 5}]}
    assert codec.to_dict(*codec.row(row)) == row
    when = datetime(2026, 1, 31, tzinfo=timezone.utc)
    given_row = {"n": 1, "x": [{"on": date(2026, 1, 31), "at": when}]}
    assert codec.to_dict(*codec.row(given_row))["x"][0]["at"] == int(when.timestamp()) * 10**9
    money = table_of(pa.map_(pa.string(), pa.decimal128(9, 2)))
    with pytest.raises(UsageError, match=r"value: 0.001 does not fit"):
        money.row({"n": 1, "x": {"a": Decimal("0.001")}})
