"""Rows as keys and values: they sort, decode to the same rows, and keep the bytes of the released
format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptionError, FormatVersionError, UsageError
from kvstore.tables import TableCodec, desc, unique
from kvstore.tables.catalogue import Alteration, alter, define, is_wider
from kvstore.tables.definition import Definition
from kvstore.tables.row_codec import UnknownLayoutError, batches_of, conform, dicts
from tests.tables.drawn import EXAMPLES, TYPES, definitions, rank, rows_of

GOLDEN = Path(__file__).parent / "golden"


@given(st.data())
def test_rows_come_back_and_sort_as_their_keys(data: st.DataObject) -> None:
    definition = data.draw(definitions())
    assert Definition.from_bytes("t", definition.to_bytes()) == definition
    rows = data.draw(st.lists(rows_of(definition), max_size=8))
    codec = TableCodec(definition)
    batch = pa.RecordBatch.from_pylist(rows, schema=definition.schema)
    keys, values = codec.encode(batch)
    assert list(zip(keys.to_pylist(), values.to_pylist(), strict=True)) == [
        codec.row(row) for row in rows
    ]
    assert codec.decode(keys, values).equals(batch)
    assert dicts(codec.decode(keys, values)) == rows
    assert [codec.to_dict(*codec.row(row)) for row in rows] == rows
    for index in definition.indexes:
        entries = codec.entries(index, batch).to_pylist()
        assert entries == [codec.entry(index, row) for row in rows]
        assert sorted(entries) == [
            codec.entry(index, row)
            for row in in_order(rows, definition, [*index.parts, *definition.key])
        ]
    assert sorted(keys.to_pylist()) == [
        codec.row(row)[0] for row in in_order(rows, definition, definition.key)
    ]


def in_order(rows: list[dict[str, Any]], definition: Definition, parts: Any) -> list[Any]:
    """Rows sorted by columns, the least significant one first."""
    for part in reversed(parts):
        name = definition.by_id[part.id].name
        rows = sorted(rows, key=lambda row, n=name: rank(row[n]), reverse=part.is_falling)
    return rows


@given(st.data())
def test_columns_that_are_asked_for_are_those_of_the_whole(data: st.DataObject) -> None:
    definition = data.draw(definitions())
    rows = data.draw(st.lists(rows_of(definition), max_size=5))
    names = data.draw(st.lists(st.sampled_from(sorted(definition.by_name)), unique=True))
    codec = TableCodec(definition)
    batch = pa.RecordBatch.from_pylist(rows, schema=definition.schema)
    first = data.draw(st.integers(0, len(rows)))
    keys, values = (column.slice(first) for column in codec.encode(batch))
    found = codec.decode(keys, values, names)
    assert found.schema == codec.schema_of(names)
    assert found.num_rows == len(rows) - first
    assert dicts(found) == [{name: row[name] for name in names} for row in rows[first:]]


EVOLUTIONS: list[Alteration] = [
    Alteration(add={"tip": pa.float64()}),
    Alteration(add={"city": (pa.string(), "Rome")}),
    Alteration(widen={"n": pa.int64()}),
    Alteration(widen={"x": pa.float64()}, drop=["city"]),
    Alteration(add={"city": pa.string()}),
    Alteration(add={"m": (pa.field("m", pa.int8(), nullable=False), 3)}),
    Alteration(widen={"m": pa.field("m", pa.int64(), nullable=True), "d": pa.decimal128(12, 3)}),
    Alteration(drop="tip", widen={"t": pa.time64("us")}),
]
FIRST = pa.schema(
    [
        pa.field("id", pa.int32()),
        pa.field("n", pa.int8()),
        pa.field("x", pa.float32()),
        pa.field("d", pa.decimal128(5, 2)),
        pa.field("t", pa.time32("s")),
    ]
)
FIRST_ROW = {
    "id": 1,
    "n": -5,
    "x": 0.5,
    "d": EXAMPLES["decimal"],
    "t": EXAMPLES["seconds"],
}


def test_rows_of_each_older_schema_read_right() -> None:
    definition = define("t", 1, FIRST, ["id"])
    stored = [TableCodec(definition).row(FIRST_ROW)]
    expected = [FIRST_ROW]
    for at, alteration in enumerate(EVOLUTIONS):
        definition = alter(definition, alteration)
        names = definition.by_name
        added = {name: None for name in names if name not in expected[0]}
        if at == 1:
            added = {"city": "Rome"}
        if at == 5:
            added = {"m": 3}
        expected = [{name: (row | added)[name] for name in names} for row in expected]
        new = {name: (FIRST_ROW | {"city": "Oslo", "tip": 2.0, "m": 9})[name] for name in names}
        new["id"] = at + 2
        codec = TableCodec(definition)
        stored.append(codec.row(new))
        expected.append(new)
        assert [codec.to_dict(*row) for row in stored] == expected
        keys, values = (pa.array(column, pa.binary()) for column in zip(*stored, strict=True))
        found = codec.decode(keys, values)
        assert (found.schema, dicts(found)) == (definition.schema, expected)
        assert Definition.from_bytes("t", definition.to_bytes()) == definition
    assert definition.revision == len(EVOLUTIONS) + 1


def test_a_column_of_an_old_name_begins_empty() -> None:
    first = define("t", 1, FIRST, ["id"])
    row = TableCodec(first).row(FIRST_ROW)
    again = alter(alter(first, Alteration(drop=["n"])), Alteration(add={"n": pa.int8()}))
    assert TableCodec(again).to_dict(*row)["n"] is None


def test_a_layout_that_was_there_before_is_taken_again() -> None:
    first = define("t", 1, FIRST, ["id"], {"by_n": "n"})
    second = alter(first, Alteration(add_index={"by_x": "x"}))
    assert second.layouts == first.layouts
    third = alter(second, Alteration(drop_index=["by_n"]))
    assert [index.number for index in third.indexes] == [2]
    assert [
        index.number for index in alter(third, Alteration(add_index={"by_n": "n"})).indexes
    ] == [
        2,
        3,
    ]


def golden_definition() -> Definition:
    fields = [pa.field(name.replace(" ", "_"), type_) for name, (type_, _) in TYPES.items()]
    key = ["string", desc("instant"), "decimal", desc("uint64")]
    return define("golden", 7, pa.schema(fields), key, {"by_date": ["date", desc("float64")]})


def test_bytes_of_keys_rows_and_entries_are_these() -> None:
    """Rows of format 1. The file was written by the release that introduced it."""
    definition = golden_definition()
    codec = TableCodec(definition)
    row = {name.replace(" ", "_"): value for name, value in EXAMPLES.items()}
    sparse = dict.fromkeys(row) | {name: row[name] for name in ("string", "instant")}
    sparse |= {name: row[name] for name in ("decimal", "uint64")}
    lines = [f"definition {definition.to_bytes().decode()}"]
    for each in (row, sparse):
        key, value = codec.row(each)
        assert codec.to_dict(key, value) == each
        lines += [f"key {key.hex()}", f"row {value.hex()}"]
        lines.append(f"entry {codec.entry(definition.index('by_date'), each).hex()}")
    assert "\n".join(lines) + "\n" == (GOLDEN / "row-v1.txt").read_text()


WRONG_TYPES: dict[str, Any] = {
    "bool": 1,
    "int8": 128,
    "int64": 1.0,
    "uint32": -1,
    "uint64": 1 << 64,
    "float32": 1e300,
    "float64": (1 << 53) + 1,
    "decimal": EXAMPLES["wide decimal"],
    "wide decimal": 1.5,
    "string": b"a",
    "large_string": "\ud800",
    "binary": "a",
    "fixed": b"ab",
    "uuid": "5",
    "date": EXAMPLES["instant"],
    "time": EXAMPLES["instant"],
    "seconds": EXAMPLES["time"],
    "instant": EXAMPLES["moment"],
    "moment": EXAMPLES["instant"],
    "nanoseconds": 1 << 63,
    "millis": EXAMPLES["instant"].replace(microsecond=1),
    "duration": 5,
}


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_wrong_or_lossy_value_is_refused_by_column(name: str) -> None:
    definition = define("t", 1, pa.schema([("k", pa.int64()), ("c", TYPES[name][0])]), "k")
    codec = TableCodec(definition)
    assert codec.to_dict(*codec.row({"k": 1, "c": EXAMPLES[name]}))["c"] == EXAMPLES[name]
    with pytest.raises(UsageError, match="table 't', column 'c': "):
        codec.row({"k": 1, "c": WRONG_TYPES[name]})


BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "a null in the key": ({"id": [1, None], "n": [1, 2]}, "column 'id' is null in row 6; a key"),
    "a null where none may be": ({"id": [1, 2], "s": [None, "a"]}, "column 's' is null in row 5"),
    "a column that is missing": ({"n": [1]}, "column 'id' is missing"),
    "an unknown column": ({"id": [1], "s": ["a"], "zone": [1]}, "no column 'zone'; it has id, n"),
    "a wrong type": ({"id": ["a"], "s": ["a"]}, "column 'id' is int32, not string"),
    "a lossy integer": ({"id": [1, 1 << 40], "s": ["a", "a"]}, "hold 1099511627776 of row 6"),
    "a lossy float": (
        {"id": [1, 2, 3], "s": ["a"] * 3, "x": [0.5, 1.5, 0.1]},
        "column 'x' is float, which does not hold 0.1 of row 7",
    ),
    "a fraction": ({"id": [1.5], "s": ["a"]}, "column 'id' is int32, not double"),
    "a lossy decimal": (
        {"id": [1], "s": ["a"], "d": pa.array([EXAMPLES["wide decimal"]], pa.decimal128(9, 3))},
        "does not hold Decimal('-1.125') of row 5",
    ),
}
STRICT = pa.schema([*FIRST, pa.field("s", pa.string(), nullable=False)])


@pytest.mark.parametrize(("columns", "says"), BATCHES.values(), ids=BATCHES.keys())
def test_a_batch_that_does_not_fit_is_refused_by_column_and_row(
    columns: dict[str, Any], says: str
) -> None:
    definition = define("t", 1, STRICT, "id")
    with pytest.raises(UsageError) as caught:
        conform(definition, pa.record_batch(columns), first=5)
    assert says in str(caught.value)


def test_a_batch_of_other_forms_of_the_same_values_fits() -> None:
    definition = define("t", 1, STRICT, "id")
    batch = pa.record_batch(
        {
            "s": pa.array(["a", "b", "a"]).dictionary_encode(),
            "id": pa.array([1, 2, 3], pa.int64()),
            "x": pa.array([1, 2, None], pa.int16()),
            "n": pa.nulls(3),
        }
    )
    (found,) = batches_of(definition, pa.table(batch))
    assert found.schema == definition.schema
    assert found.column("s").to_pylist() == ["a", "b", "a"]
    assert found.column("x").to_pylist() == [1.0, 2.0, None]
    for nothing in ("rows", 7, [1]):
        with pytest.raises(UsageError, match="rows must be Arrow data"):
            list(batches_of(definition, nothing))


NEVER: dict[str, tuple[Alteration, str]] = {
    "nothing": (Alteration(), "nothing to alter"),
    "a key column dropped": (Alteration(drop=["id"]), "'id' is in the key"),
    "an indexed column dropped": (Alteration(drop=["n"]), "in the index 'by_n'; drop the index"),
    "an unknown column dropped": (Alteration(drop=["zone"]), "no column 'zone'"),
    "a column twice": (Alteration(add={"n": pa.int8()}), "'n' is there already"),
    "a column without null or default": (
        Alteration(add={"m": pa.field("m", pa.int8(), nullable=False)}),
        "give a default",
    ),
    "a default of another type": (Alteration(add={"m": (pa.int8(), "a")}), "its default: 'a' is"),
    "a narrower type": (Alteration(widen={"x": pa.float16()}), "no columns of type halffloat"),
    "a wider type that is none": (Alteration(widen={"n": None}), "None is no type"),  # type: ignore[dict-item]
    "another type": (Alteration(widen={"n": pa.string()}), "int8, which string does not widen"),
    "a type that sorts otherwise": (Alteration(widen={"n": pa.float64()}), "other bytes"),
    "a key that may be null": (
        Alteration(widen={"id": pa.field("id", pa.int64(), nullable=True)}),
        "a key is never null",
    ),
    "no more nulls": (
        Alteration(widen={"x": pa.field("x", pa.float64(), nullable=False)}),
        "rows may hold nulls already",
    ),
    "an index on a missing column": (
        Alteration(add_index={"by_zone": ["zone"]}),
        "no column 'zone'",
    ),
    "an index twice": (Alteration(add_index={"by_n": ["n"]}), "index 'by_n' is there already"),
    "an unknown index dropped": (Alteration(drop_index=["by_x"]), "no index 'by_x'"),
    "no type": (Alteration(add={"m": "int8"}), "'int8' is no type"),  # type: ignore[dict-item]
    "a list of columns": (Alteration(add=["m"]), "pass a dict"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("alteration", "says"), NEVER.values(), ids=NEVER.keys())
def test_an_alteration_that_cannot_be_is_refused_by_name(alteration: Alteration, says: str) -> None:
    definition = define("t", 1, FIRST, "id", {"by_n": unique("n")})
    with pytest.raises(UsageError) as caught:
        alter(definition, alteration)
    assert says in str(caught.value)


DEFINITIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no key": ({"key": []}, "the key has no columns"),
    "a key of a missing column": ({"key": ["zone"]}, "no column 'zone'"),
    "a column twice in the key": ({"key": ["id", desc("id")]}, "names a column twice"),
    "an unknown type": (
        {"schema": pa.schema([("id", pa.month_day_nano_interval())])},
        "no columns of type",
    ),
    "a column twice": ({"schema": pa.schema([("id", pa.int8())] * 2)}, "a second column 'id'"),
    "no schema": ({"schema": [("id", "int8")]}, "pass a pyarrow.Schema"),
    "no columns": ({"schema": pa.schema([])}, "has 0 columns"),
    "no name": ({"name": ""}, "cannot be called ''"),
    "a long name": ({"name": "a" * 300}, "has 300 bytes"),
    "an index on a missing column": ({"indexes": {"z": "zone"}}, "no column 'zone'"),
    "indexes without names": ({"indexes": ["n"]}, "indexes=['n']; pass a dict by name"),
    "an event time that is missing": ({"event_time": "ts"}, "no column 'ts'"),
    "an event time that is no time": ({"event_time": "d"}, "'d' is decimal128(5, 2)"),
    "an event time in the key": ({"event_time": "id"}, "it is put last by itself"),
}


@pytest.mark.parametrize(("options", "says"), DEFINITIONS.values(), ids=DEFINITIONS.keys())
def test_a_table_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    given = {"name": "t", "number": 1, "schema": FIRST, "key": ["id"], **options}
    with pytest.raises(UsageError) as caught:
        define(**given)
    assert says in str(caught.value)


def test_damaged_and_newer_rows_are_told() -> None:
    definition = define("t", 1, FIRST, "id")
    codec = TableCodec(definition)
    key, value = codec.row(FIRST_ROW)
    cases: dict[bytes, type[Exception]] = {
        value[:-1]: CorruptionError,
        value + b"\x00": CorruptionError,
        b"": CorruptionError,
        b"\x21" + value[1:]: FormatVersionError,
        value[:1] + b"\x01" + value[2:]: UnknownLayoutError,
    }
    for damaged, error in cases.items():
        with pytest.raises(error):
            codec.to_dict(key, damaged)
        with pytest.raises(error):
            codec.decode(pa.array([key]), pa.array([damaged], pa.binary()))
    for damaged in (key[:-1], key + b"\x01", b""):
        with pytest.raises(CorruptionError):
            codec.to_dict(damaged, value)
        with pytest.raises(CorruptionError):
            codec.decode(pa.array([damaged], pa.binary()), pa.array([value]))


@given(st.binary(max_size=60), st.data())
def test_a_definition_from_anywhere_is_read_or_refused(junk: bytes, data: st.DataObject) -> None:
    whole = golden_definition().to_bytes()
    at = data.draw(st.integers(0, len(whole)))
    assert outcome(junk) in ("read", "refused")
    assert outcome(whole[:at] + junk + whole[at + len(junk) :]) in ("read", "refused")


def outcome(stored: bytes) -> str:
    try:
        Definition.from_bytes("golden", stored)
    except (CorruptionError, FormatVersionError):
        return "refused"
    return "read"


def test_wider_types_hold_all_values_of_narrower_ones() -> None:
    types = [type_ for type_, _ in TYPES.values()] + [pa.int32(), pa.uint8(), pa.decimal128(12, 2)]
    wider = {(str(old), str(new)) for old in types for new in types if is_wider(new, old)}
    assert wider == {
        ("int8", "int32"),
        ("int8", "int64"),
        ("int8", "float"),
        ("int8", "double"),
        ("int32", "int64"),
        ("int32", "double"),
        ("uint8", "uint32"),
        ("uint8", "uint64"),
        ("uint8", "int32"),
        ("uint8", "int64"),
        ("uint8", "float"),
        ("uint8", "double"),
        ("uint32", "uint64"),
        ("uint32", "int64"),
        ("uint32", "double"),
        ("float", "double"),
        ("string", "large_string"),
        ("decimal128(9, 2)", "decimal128(12, 2)"),
        ("decimal128(9, 2)", "decimal256(40, 3)"),
        ("decimal128(12, 2)", "decimal256(40, 3)"),
        ("time32[s]", "time64[us]"),
    }
