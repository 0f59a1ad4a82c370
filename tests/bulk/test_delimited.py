"""CSV and TSV: a file is read as RFC 4180 says, wherever blocks end, or refused by its row."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.bulk.delimited import DelimitedFile, Quoting
from kvstore.bulk.row_files import file_rows, typed_batches
from kvstore.errors import UsageError
from tests.harness.bounds import bounds

Rows = list[tuple[bytes, ...]]


def rows_of(
    text: bytes, *, block: int = 8 << 20, delimiter: str = ",", quoting: Quoting = "standard"
) -> tuple[list[str], Rows]:
    """The header and the records of a text that is read in blocks of `block` bytes."""
    with bounds({"CSV_BLOCK_BYTES": block}):
        file = DelimitedFile(pa.BufferReader(text), "f.csv", delimiter, quoting)
        found: Rows = []
        for batch in file.batches(file.names):
            found += zip(*(column.to_pylist() for column in batch.columns), strict=True)
    return file.names, found


def refusal(text: bytes, **how: Any) -> str:
    with pytest.raises(UsageError) as caught:
        rows_of(text, **how)
    return str(caught.value)


def records(text: bytes, delimiter: bytes = b",") -> Rows | None:
    """The records of a text by the grammar alone, in one pass. None for a text that has none."""
    ends = re.match(
        rb'[\r\n]*(?:[^"\r\n]|"[^"]*")*(\r\n|\r|\n)?', text.removeprefix(b"\xef\xbb\xbf")
    )
    assert ends is not None
    end = (
        b"\r"
        if ends[1] == b"\r" and ends.end() < len(text.removeprefix(b"\xef\xbb\xbf"))
        else rb"\r?\n"
    )
    quoted, plain = (
        rb'"(?:[^"]|"")*"',
        rb'(?:[^"\r\n' + delimiter + rb'][^"\r\n' + delimiter + rb"]*)?",
    )
    field = re.compile(
        rb"(" + quoted + rb"|" + plain + rb")(" + delimiter + rb"|" + end + rb"|\r?\Z)"
    )
    at, rows, row = 0, [], list[bytes]()
    text = text.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    while at < len(text) or row:
        found = field.match(text, at)
        if found is None:
            return None
        raw, at = found[1], found.end()
        row.append(raw[1:-1].replace(b'""', b'"') if raw[:1] == b'"' else raw)
        if found[2] != delimiter:
            if row != [b""] or raw:
                rows.append(tuple(row))
            row = []
            if at >= len(text):
                break
    return rows


pieces = st.sampled_from(
    [b'"', b'""', b",", b"\n", b"\r\n", b"\r", b"a", b"\x00", b"\xff", b"\xef\xbb\xbf"]
)
texts = st.lists(pieces, max_size=14).map(b"".join)


def check_text(text: bytes, block: int) -> None:
    """Any text is read as the grammar says, or refused as it says, in blocks of any size."""
    text = b"k,v\n" + text
    wanted = records(text)
    if wanted is None or any(len(row) != 2 for row in wanted):
        assert "f.csv: row " in refusal(text, block=block)
    else:
        assert rows_of(text, block=block) == (["k", "v"], wanted[1:])


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 12))
def test_any_text_is_read_as_the_grammar_says(text: bytes, block: int) -> None:
    check_text(text, block)


@pytest.mark.soak
@settings(max_examples=20_000, deadline=None)
@given(texts, st.integers(1, 12))
def test_soak_any_text_is_read_as_the_grammar_says(text: bytes, block: int) -> None:
    check_text(text, block)


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_value_of_several_lines_is_whole_wherever_a_block_ends(delimiter: str) -> None:
    """Arrow's blocks lost the LF of a CR LF on their edge (arrow#51368)."""
    fields = [b"k1", b"a\r\nb\r\n\n\rc", b"k2", b'""\r\n"', b"k3", b"", b"\xef\xbb\xbfk4", b"\x00"]
    quoted = [b'"' + field.replace(b'"', b'""') + b'"' for field in fields]
    sign = delimiter.encode()
    text = b"\xef\xbb\xbf" + b'"key"' + sign + b"value\r\n"
    text += b"".join(quoted[at] + sign + quoted[at + 1] + b"\r\n" for at in range(0, 8, 2))
    wanted = list(zip(fields[::2], fields[1::2], strict=True))
    for block in range(1, len(text) + 2):
        assert rows_of(text, block=block, delimiter=delimiter) == (["key", "value"], wanted), block


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'k1,"v1\nk2,v2\nk3,v3\n', "row 2: a quote is not closed before the file ends"),
        (b'k1,v1\nk2,"v2\nk3,"v3"\n', "row 3: text stands behind a quote that closes a field"),
        (b'k1,"Big" Joe\n', "row 2: text stands behind a quote"),
        (b'k1,v\n\n\nk2,5" disk\n', "row 3: a quote stands in the middle of a field"),
        (b'"k\n1",v\nk2,"v""\n', "row 3: a quote is not closed"),
        (b'k1,"v"\rk2,v\n', "row 2: a line end of another kind"),
        (b"k1,v\rk2,v\n", "row 2: a line end of another kind"),
        (b"k1,v\nk2\n", "row 3 has 1 columns, and the header has 2"),
        (b'"k\n\n1",v\n\nk2,v,w\n', "row 3 has 3 columns"),
    ],
)
def test_what_is_no_record_is_refused_by_its_row(text: bytes, problem: str) -> None:
    for block in (1, 3, 8 << 20):
        assert f"f.csv: {problem}" in refusal(b"key,value\n" + text, block=block)
    many = b"".join(b"%d,v\n" % at for at in range(1000))
    row = int(re.findall("row ([0-9]+)", problem)[0])
    told = refusal(b"key,value\n" + many + text, block=500)
    assert problem.replace(f"row {row}", f"row {row + 1000}") in told


def test_files_that_do_not_quote_are_read_with_quoting_none() -> None:
    text = b'package,text\nbig,"Big" Joe\nopen,"\nhalf,5" disk\n'
    assert "--quoting none" in refusal(text)
    rows = [(b"big", b'"Big" Joe'), (b"open", b'"'), (b"half", b'5" disk')]
    for block in (1, 7, 1000):
        assert rows_of(text, block=block, quoting="none")[1] == rows
    assert "row 2 has 3 columns" in refusal(b'a,b\n"x,y",z\n', quoting="none")


@pytest.mark.parametrize(
    ("text", "names", "rows"),
    [
        (b"a,b", ["a", "b"], []),
        (b"\r\n\n a,b\r\n\r\n1,2", [" a", "b"], [(b"1", b"2")]),
        (b'a\n\n1\n""\n', ["a"], [(b"1",), (b"",)]),
        (b"a,b\r1,2\r\r3,4\r", ["a", "b"], [(b"1", b"2"), (b"3", b"4")]),
        (b'"a\n1","b""c",\n1,2,3\n', ["a\n1", 'b"c', ""], [(b"1", b"2", b"3")]),
        (b"a,b\n1,2\r", ["a", "b"], [(b"1", b"2")]),
        ("ä,€\n1,2\n".encode(), ["ä", "€"], [(b"1", b"2")]),
    ],
)
def test_headers_empty_lines_and_ends(text: bytes, names: list[str], rows: Rows) -> None:
    for block in range(1, len(text) + 2):
        assert rows_of(text, block=block) == (names, rows), block


@pytest.mark.parametrize("text", [b"", b"\xef\xbb\xbf", b"\r\n\n", b"\xff\xfea,\x00b\n"])
def test_a_file_without_a_header_is_refused(text: bytes) -> None:
    assert "f.csv" in refusal(text)


def test_a_row_may_be_larger_than_a_block_and_not_than_the_bound() -> None:
    text = b'k,v\n1,"' + b'""\r\n' * 3_000_000 + b'"\n2,x\n'
    assert rows_of(text)[1] == [(b"1", b'"\r\n' * 3_000_000), (b"2", b"x")]
    with bounds({"TEXT_ROW_BYTES_MAX": 1 << 20}):
        assert "row 2 has more than 1 MiB" in refusal(text, block=1000)
        open_ = b'k,v\n1,"2\n' + b"a\n" * (1 << 20)
        assert "row 2: a quote is not closed within 1 MiB" in refusal(open_)
        long = b"k,v\n1,2\n" + b"a" * (3 << 20) + b",v\n"
        assert "row 3 has more than 1 MiB" in refusal(long, block=1000)


def values(tmp_path: Path, kind: pa.DataType, *texts: str) -> list[Any]:
    """Texts of a CSV file, as a column of a type."""
    path = tmp_path / "f.csv"
    path.write_text("x,t\n" + "".join(f"{text},t\n" for text in texts))
    schema = pa.schema([("x", kind), ("t", pa.string())])
    return [each for batch in typed_batches(path, schema) for each in batch["x"].to_pylist()]


def test_numbers_of_text_are_exact(tmp_path: Path) -> None:
    double, single = pa.float64(), pa.float32()
    held = ["1e23", "9007199254740992", "0.1", "-0.0", "0", "0e-5", "1e308", "5e-324", "1.5e-310"]
    assert values(tmp_path, double, *held) == [float(text) for text in held]
    assert values(tmp_path, double, "inf", "-Infinity", "", "NULL") == [
        math.inf,
        -math.inf,
        None,
        None,
    ]
    assert all(map(math.isnan, values(tmp_path, double, "NaN", "nan", "-nan")))
    assert values(tmp_path, single, "16777216", "3.4028235e38", "0.1")[:2] == [
        16777216,
        3.4028234663852886e38,
    ]
    assert math.isnan(values(tmp_path, single, "NaN")[0])
    assert values(tmp_path, double, "1e300", "0." + "0" * 40 + "1")[1] == 1e-41


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.float64(), "1e400"),
        (pa.float64(), "-1e309"),
        (pa.float64(), "1e-400"),
        (pa.float64(), "0." + "0" * 400 + "1"),
        (pa.float64(), "3e-324"),
        (pa.float64(), "9007199254740993"),
        (pa.float64(), "-9007199254740993.0"),
        (pa.float64(), "9.007199254740993e15"),
        (pa.float64(), "123456789012345678901"),
        (pa.float64(), "NA N"),
        (pa.float32(), "1e39"),
        (pa.float32(), "16777217"),
        (pa.float32(), "70318210"),
        (pa.float32(), "1e-60"),
        (pa.int8(), "0xFF"),
        (pa.int64(), "0xFFFFFFFFFFFFFFFF"),
        (pa.int64(), "0X1"),
        (pa.int64(), "1.0"),
        (pa.int64(), "9223372036854775808"),
        (pa.int64(), "NaN"),
        (pa.uint8(), "-1"),
        (pa.duration("s"), "0x10"),
        (pa.decimal128(5, 2), "12345"),
        (pa.decimal128(5, 2), "1.005"),
        (pa.decimal128(5, 2), "NaN"),
        (pa.decimal128(9, 2), "2E-41"),
        (pa.decimal128(9, 2), f"0.{'0' * 40}2"),
        (pa.decimal128(9, 2), "0.00012345678901234567890123456789012345678"),
        (pa.decimal256(40, 3), "2E-195"),
        (pa.decimal128(38, 35), "30000000"),
        (pa.decimal128(38, 29), "650164634492976.5"),
        (pa.decimal256(76, 73), "9930324941989"),
        (pa.decimal256(60, 2), "1.005"),
        (pa.decimal256(42, 2), "1e41"),
        (pa.date32(), "infinity"),
        (pa.time32("s"), "24:00"),
        (pa.timestamp("us", "UTC"), "2026-01-01T00:00:00"),
        (pa.timestamp("us"), "2026-01-01T00:00:00.1234567"),
        (pa.uuid(), "12345678"),
        (pa.bool_(), "yes"),
    ],
)
def test_a_text_that_its_column_alters_is_refused_by_file_row_and_column(
    tmp_path: Path, kind: pa.DataType, text: str
) -> None:
    with pytest.raises(UsageError, match=r"f\.csv: row 4, column 'x': "):
        values(tmp_path, kind, "", "", text, "", text)


def test_types_that_arrow_does_not_read_from_csv_are_read(tmp_path: Path) -> None:
    words = ["12345678-1234-5678-1234-567812345678", ""]
    assert [each and str(each) for each in values(tmp_path, pa.uuid(), *words)] == [words[0], None]
    found = values(tmp_path, pa.decimal256(60, 2), " 1.5", "1e40", "")
    assert [each and f"{each:f}" for each in found] == ["1.50", f"1{'0' * 40}.00", None]


def test_text_that_is_not_utf_8_is_refused_in_columns_of_text(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_bytes(b"x,at\na,1\n\xff,1\n")
    with pytest.raises(UsageError, match=r"f\.csv: row 3, column 'x': .*UTF8"):
        list(typed_batches(path, pa.schema([("x", pa.string())])))
    path.write_bytes(b"key,value,at\na,1,5\nb,1,\xff\n")
    with pytest.raises(UsageError, match=r"f\.csv: row 3, column 'at' is not UTF-8"):
        list(file_rows([path], key="key", value="value", expires="at"))
