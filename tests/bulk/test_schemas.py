"""The schema of a new table from a file: an import of the same file refuses nothing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.bulk.row_files import FileReads, typed_batches
from kvstore.bulk.schemas import schema_of
from kvstore.errors import UsageError

WORDS = st.sampled_from(
    [
        *("7", "-7", "0", "-0", "007", "+7", "9223372036854775807", "9223372036854775808"),
        *("1.5", "-0.0", "2e9", "1e23", "1e400", "9007199254740993.0", ".5", "5.", "nan", "inf"),
        *("true", "False", "1", "2026-01-31", "2026-02-30", "0000-01-01", "9999-12-31"),
        *("2026-01-31T12:00:00Z", "2026-01-31 13:00+01:00", "2026-01-31T12:00:00.123456789Z"),
        *("2026-01-31T12:00:00", "2026-01-31 12:00", "1500-01-01T00:00:00.123456789"),
        *("", "NA", "null", " 7", "x", "ä", "0x10", "12:00", "1_000"),
    ]
)


@settings(max_examples=150)
@given(columns=st.lists(st.lists(WORDS, min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_file_is_imported_whole_by_the_schema_that_it_gives(columns: list[list[str]]) -> None:
    rows = max(map(len, columns))
    cells = [(column * rows)[:rows] for column in columns]
    with TemporaryDirectory() as place:
        path = Path(place) / "f.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows([[f"c{at}" for at in range(len(cells))], *zip(*cells, strict=True)])
        schema = schema_of(path, FileReads())
        found = pa.Table.from_batches(typed_batches(path, schema))
        assert found.num_rows == rows
        for name, column in zip(schema.names, cells, strict=True):
            if schema.field(name).type == pa.string():
                assert found.column(name).to_pylist() == column


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (["true", "FALSE", ""], pa.bool_()),
        (["7", "-7", "NA"], pa.int64()),
        (["7", "1.5"], pa.float64()),
        (["7", "007"], pa.string()),
        (["9223372036854775808"], pa.string()),
        (["2026-01-31"], pa.date32()),
        (["2026-01-31", "2026-01-31T12:00:00Z"], pa.string()),
        (["2026-01-31T12:00:00Z", "2026-01-31 13:00+01:00"], pa.timestamp("us", "UTC")),
        (["2026-01-31T12:00:00.123456789Z"], pa.timestamp("ns", "UTC")),
        (["2026-01-31 12:00"], pa.timestamp("us")),
        (["", "null"], pa.string()),
    ],
    ids=str,
)
def test_a_column_of_text_gets_the_first_type_that_holds_it(
    tmp_path: Path, texts: list[str], wanted: pa.DataType
) -> None:
    path = tmp_path / "f.csv"
    path.write_text("".join(f'"{text}"\n' for text in ["c", *texts]))
    assert schema_of(path, FileReads()).field("c").type == wanted


def of_lines(path: Path, rows: list[dict[str, Any]], **how: Any) -> pa.Schema:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return schema_of(path, FileReads(**how))


def test_json_and_typed_files_tell_their_types(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    rows: list[dict[str, Any]] = [
        {"id": 7, "big": 1 << 63, "at": "2026-01-31T12:00:00Z", "raw": {"base64": "/w=="}},
        {"id": 8, "name": "7", "rate": 1, "raw": "a", "ok": True, "none": None},
        {"id": 9, "rate": 0.5},
    ]
    assert of_lines(path, rows) == pa.schema(
        [
            ("id", pa.int64()),
            ("big", pa.uint64()),
            ("at", pa.timestamp("us", "UTC")),
            ("raw", pa.binary()),
            ("name", pa.string()),
            ("rate", pa.float64()),
            ("ok", pa.bool_()),
            ("none", pa.string()),
        ]
    )
    nested = [{"id": 1, "where": {"x": 1, "y": 2.5}}]
    with pytest.raises(UsageError, match="'where' has objects or lists"):
        of_lines(path, nested)
    assert of_lines(path, nested, nested="columns").names == ["id", "where.x", "where.y"]
    given = [pa.field("where", pa.string()), pa.field("more", pa.int8())]
    named = schema_of(path, FileReads(), ["id", "where"], given)
    assert named == pa.schema([("id", pa.int64()), *given])
    with pytest.raises(UsageError, match="several kinds: integer, text"):
        of_lines(path, [{"c": 1}, {"c": "x"}])
    table = pa.table(
        {
            "word": pa.array(["a"]).dictionary_encode(),
            "view": pa.array(["a"], pa.string_view()),
            "day": pa.array([0], pa.date64()),
        }
    )
    pq.write_table(table, tmp_path / "f.parquet")
    plain = pa.schema([("word", pa.string()), ("view", pa.string()), ("day", pa.date32())])
    assert schema_of(tmp_path / "f.parquet", FileReads()) == plain
    pq.write_table(pa.table({"c": pa.nulls(1)}), tmp_path / "f.parquet")
    with pytest.raises(UsageError, match="has no value and no type"):
        schema_of(tmp_path / "f.parquet", FileReads())
    with pytest.raises(UsageError, match="is not there"):
        schema_of(tmp_path / "gone.arrow", FileReads())
