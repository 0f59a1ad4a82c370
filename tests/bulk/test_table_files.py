"""Rows of a table in files: what is exported is imported as it was, text has the values it prints,
and typed files of other programs have theirs."""

from __future__ import annotations

import csv
import json
import re
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.base.timestamp import Timestamp
from kvstore.bulk.outside import write_parquet
from kvstore.bulk.row_files import typed_batches
from kvstore.errors import UsageError
from kvstore.tables import TableCodec
from kvstore.tables.catalogue import define
from kvstore.tables.definition import Definition
from kvstore.tables.nested import is_nested
from kvstore.tables.row_codec import conform, dicts
from kvstore.tables.words import cell_text, json_row
from tests.harness.bounds import bounds
from tests.tables.drawn import definitions, rows_of


def imported(path: Path, definition: Definition) -> list[dict[str, Any]]:
    """The rows of a file, in the types of a table."""
    batches = typed_batches(path, definition.schema)
    return [row for each in batches for row in conform(definition, each).to_pylist()]


def check_tables(data: st.DataObject) -> None:
    definition = data.draw(definitions())
    rows = data.draw(st.lists(rows_of(definition), max_size=8))
    codec = TableCodec(definition)
    batch = codec.decode(*codec.encode(pa.RecordBatch.from_pylist(rows, schema=definition.schema)))
    with TemporaryDirectory() as place:
        packed, text = Path(place) / "f.parquet", Path(place) / "f.csv"
        write_parquet(packed, batch.schema, [batch], "t", Timestamp(1), lambda rows: None)
        assert imported(packed, definition) == batch.to_pylist()
        lines = Path(place) / "f.jsonl"
        shown = [json_row(batch.schema, row) for row in dicts(batch)]
        lines.write_text("".join(f"{json.dumps(row)}\n\n" for row in shown))
        assert imported(lines, definition) == batch.to_pylist()
        # An empty field is a null, or an empty text. Bytes have no text of their own.
        named = [field.name for field in batch.schema if _prints(field.type)]
        if not named:
            return
        cells = [_cells(batch.column(name)) for name in named]
        with text.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows([named, *zip(*cells, strict=True)])
        block = data.draw(st.sampled_from([1, 5, 1 << 20]))
        with bounds({"CSV_BLOCK_BYTES": block}):
            found = [
                row for each in typed_batches(text, definition.schema) for row in each.to_pylist()
            ]
    wanted = [
        {
            name: "" if row[name] is None and _is_text(batch.schema.field(name).type) else row[name]
            for name in named
        }
        for row in batch.to_pylist()
    ]
    assert found == wanted


def _prints(kind: pa.DataType) -> bool:
    return not (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


NUMBERS: Final = [
    *(pa.int8(), pa.uint32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()),
    *(pa.decimal128(9, 2), pa.decimal128(38, 0), pa.decimal128(20, 19), pa.decimal128(3, -2)),
    *(pa.decimal128(38, 35), pa.decimal128(38, 29), pa.decimal128(38, 18)),
    *(pa.decimal256(40, 3), pa.decimal256(76, 60), pa.decimal256(76, 73)),
]
_digits = st.one_of(
    st.text("0123456789", min_size=1, max_size=45),
    st.sampled_from([0, 1, 2, 24, 31, 53, 63, 64]).map(lambda power: str((1 << power) + 1)),
    st.builds(lambda zeros, tail: "0" * zeros + tail, st.integers(0, 60), st.sampled_from("019")),
)
numerals = st.builds(
    lambda sign, whole, point, exponent: f"{sign}{whole}{point}{exponent}",
    st.sampled_from(["", "", "-", "+"]),
    _digits,
    st.just("") | _digits.map(lambda text: f".{text}"),
    st.just("") | st.builds("{}{}".format, st.sampled_from("eE"), st.integers(-420, 420)),
)


def check_numerals(texts: list[str], kind: pa.DataType, place: Path) -> None:
    """Numbers as text are these numbers in a column, or are refused. Fractions are rounded to the
    nearest float, and so is what a float prints with an exponent."""
    path = place / "f.csv"
    path.write_text("x,t\n" + "".join(f"{text},e9\n" for text in texts))
    schema = pa.schema([("x", kind), ("t", pa.string())])
    with bounds({"CSV_BLOCK_BYTES": 64}):
        refusal = ""
        try:
            found = [each for batch in typed_batches(path, schema) for each in batch["x"]]
        except UsageError as error:
            refusal = str(error)
    if refusal:
        assert re.search(r"f\.csv: row \d+, column 'x': ", refusal)
        return
    for text, each in zip(texts, found, strict=True):
        wanted, number = Decimal(text), each.as_py()
        if not pa.types.is_floating(kind):
            assert number == wanted, (text, number)
            continue
        assert np.isfinite(number), text
        # Of the floats beside it none is nearer. Numpy makes a double of a text first.
        width = np.float32 if kind == pa.float32() else np.float64
        beside = [float(np.nextafter(width(number), width(side))) for side in (-np.inf, np.inf)]
        away = [abs(Fraction(each) - Fraction(text)) for each in beside if np.isfinite(each)]
        assert abs(Fraction(number) - Fraction(text)) <= min(away), text
        assert (number == 0) is (wanted == 0), text
        if "e" not in text.lower() and wanted == wanted.to_integral_value():
            assert Decimal(number) == wanted, (text, number)


def _cells(column: pa.Array) -> list[str]:
    if is_nested(column.type):
        values = [row["x"] for row in dicts(pa.record_batch([column], ["x"]))]
        return [cell_text(column.type, value) or "" for value in values]
    if isinstance(column.type, pa.UuidType):
        return ["" if each is None else str(each) for each in column.to_pylist()]
    if pa.types.is_decimal(column.type):
        return ["" if each is None else f"{each:f}" for each in column.to_pylist()]
    texts = [each or "" for each in column.cast(pa.string()).to_pylist()]
    if column.type == pa.float32():  # Arrow prints 70318208 as 70318210, which no float32 is
        wide = column.cast(pa.float64()).to_pylist()
        return [
            f"{number:.0f}" if text.strip("-").isdecimal() and abs(number) >= 2**24 else text
            for number, text in zip(wide, texts, strict=True)
        ]
    return texts


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_of_a_table_come_back_from_files(data: st.DataObject) -> None:
    check_tables(data)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None)
@given(st.data())
def test_soak_rows_of_a_table_come_back_from_files(data: st.DataObject) -> None:
    check_tables(data)


@settings(max_examples=400, deadline=None)
@given(texts=st.lists(numerals, min_size=1, max_size=3), kind=st.sampled_from(NUMBERS))
@example(texts=["2E-41"], kind=pa.decimal128(9, 2))
@example(texts=["2E-195"], kind=pa.decimal256(40, 3))
def test_a_number_of_text_is_the_number_or_refused(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], kind: pa.DataType
) -> None:
    check_numerals(texts, kind, tmp_path_factory.getbasetemp())


@pytest.mark.soak
@settings(max_examples=20_000, deadline=None)
@given(texts=st.lists(numerals, min_size=1, max_size=3), kind=st.sampled_from(NUMBERS))
def test_soak_a_number_of_text_is_the_number_or_refused(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], kind: pa.DataType
) -> None:
    check_numerals(texts, kind, tmp_path_factory.getbasetemp())


ROWS: Final = {
    "id": [1, 2, 3],
    "name": ["a", 'b "c",\r\n', ""],
    "fare": [0.1, 1e23, None],
    "day": [date(2026, 1, 31), date(1969, 1, 1), None],
    "paid": [True, False, None],
}
SCHEMA: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("fare", pa.float64()),
        ("day", pa.date32()),
        ("paid", pa.bool_()),
    ]
)


DEFINITION: Final = define("t", 1, SCHEMA, ["id"], {})


def by_duckdb(path: Path, how: str) -> None:
    rows = pa.table(ROWS, schema=SCHEMA)
    duckdb.sql(f"COPY (SELECT * FROM rows) TO '{path}' ({how})")
    assert rows.num_rows == len(ROWS["id"])


WRITERS: Final = {
    "pandas": ("f.csv", lambda path: pd.DataFrame(ROWS).to_csv(path, index=False)),
    "pandas, parquet": (
        "f.parquet",
        lambda path: (
            pa.table(ROWS, schema=SCHEMA).to_pandas(types_mapper=pd.ArrowDtype).to_parquet(path)
        ),
    ),
    "polars": ("f.csv", lambda path: pl.DataFrame(ROWS).write_csv(path)),
    "polars, parquet": ("f.parquet", lambda path: pl.DataFrame(ROWS).write_parquet(path)),
    "polars, arrow": ("f.arrow", lambda path: pl.DataFrame(ROWS).write_ipc(path)),
    "polars, categories": (
        "f.parquet",
        lambda path: (
            pl.DataFrame(ROWS).with_columns(pl.col("name").cast(pl.Categorical)).write_parquet(path)
        ),
    ),
    "pyarrow": ("f.csv", lambda path: pa_csv.write_csv(pa.table(ROWS, schema=SCHEMA), path)),
    "duckdb": ("f.csv", lambda path: by_duckdb(path, "FORMAT csv, HEADER")),
    "duckdb, tabs": (
        "f.tsv.gz",
        lambda path: by_duckdb(path, "FORMAT csv, HEADER, DELIMITER '\t', COMPRESSION gzip"),
    ),
    "duckdb, parquet": ("f.parquet", lambda path: by_duckdb(path, "FORMAT parquet")),
}


@pytest.mark.parametrize("program", WRITERS)
def test_typed_files_of_other_programs_have_the_rows_that_were_written(
    tmp_path: Path, program: str
) -> None:
    name, write = WRITERS[program]
    write(tmp_path / name)
    found = pa.Table.from_batches(
        conform(DEFINITION, each) for each in typed_batches(tmp_path / name, SCHEMA)
    )
    assert found.to_pydict() == ROWS
