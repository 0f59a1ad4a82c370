"""Files hold rows as they are: what `kvstore export` writes, an import reads, cut and packed in any
way, and files of other programs are read as these programs read them."""

from __future__ import annotations

import csv
import io
import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.bulk.exports import SpanRows, packed, write_rows
from kvstore.bulk.row_files import PLAIN_READS, FileReads, decoded_files, file_rows, format_of
from kvstore.cli.options import Encoding, Encodings, to_text
from kvstore.errors import UsageError
from tests.harness.bounds import bounds

NAMES: Final = (
    *("f.csv", "f.csv.gz", "f.csv.zst", "f.tsv", "f.tsv.gz", "f.tsv.zst"),
    *("f.jsonl", "f.ndjson.gz", "f.jsonl.zst", "f.parquet", "f.arrow"),
)
SCHEMA: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])

Row = tuple[bytes, bytes]

pieces = st.sampled_from(
    [
        b'"',
        b",",
        b"\t",
        b"\r",
        b"\n",
        b"\r\n",
        b"\x00",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\\",
        b"{",
        "é€".encode(),
    ]
)
raws = st.one_of(st.lists(pieces, max_size=6).map(b"".join), st.binary(max_size=12))
texts = raws.map(lambda raw: raw.decode(errors="ignore").encode())
large = st.tuples(raws, st.integers(0, 60)).map(lambda pair: pair[0] * pair[1])
cases = st.tuples(
    st.lists(st.tuples(raws, st.one_of(raws, raws, large)), max_size=12),
    st.sampled_from(NAMES),
    st.sampled_from(list(Encoding)),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1, 2, 3, 7, 64, 1 << 20]),
)


def written(rows: list[Row], name: str, notation: Encodings, *, header: bool = True) -> bytes:
    """The bytes of an export of rows."""
    batch = pa.RecordBatch.from_arrays(
        [pa.array(column, pa.binary()) for column in zip(*rows, strict=True)]
        if rows
        else [pa.array([], pa.binary())] * 2,
        schema=SCHEMA,
    )
    file = io.BytesIO()
    write = None
    if notation != (Encoding.TEXT, Encoding.TEXT):

        def write(raw: bytes, of: str) -> str:
            return to_text(raw, notation.key if of == "key" else notation.value)

    with packed(file, Path(name)) as sink:
        kind = format_of(Path(name))
        if header or kind not in ("csv", "tsv"):
            write_rows(sink, kind, SpanRows(SCHEMA, iter([batch])), write, lambda rows: None)
        else:
            plain = io.BytesIO()
            write_rows(plain, kind, SpanRows(SCHEMA, iter([batch])), write, lambda rows: None)
            sink.write(plain.getvalue().partition(b"\n")[2])
    return file.getvalue()


def check_identity(
    case: tuple[list[Row], str, Encoding, int, bool, int],
) -> None:
    """The rows of an export in several files, or in several files that are one behind the other,
    are the rows of the import; or the export says which key a format cannot hold."""
    rows, name, encoding, parts, is_joined, block = case
    notation = Encodings(encoding, encoding)
    kind = format_of(Path(name))
    if kind in ("parquet", "arrow"):
        notation = Encodings(Encoding.TEXT, Encoding.TEXT)
    is_text = all(raw == raw.decode(errors="ignore").encode() for row in rows for raw in row)
    cut = [rows[at::parts] for at in range(parts)]
    with TemporaryDirectory() as place, bounds({"CSV_BLOCK_BYTES": block}):
        if kind in ("csv", "tsv") and encoding == Encoding.TEXT and not is_text:
            with pytest.raises(UsageError, match=r"is no text; pass --encoding base64"):
                [written(part, name, notation) for part in cut]
            return
        files = [
            written(part, name, notation, header=not (at and is_joined))
            for at, part in enumerate(cut)
        ]
        if is_joined:
            files = [b"".join(files)]
        paths = [Path(place) / f"{at}{name[1:]}" for at in range(len(files))]
        for path, raw in zip(paths, files, strict=True):
            path.write_bytes(raw)
        columns = {"key": "key", "value": "value"}
        found = decoded_files(paths, columns, notation, PLAIN_READS, has_expiries=True)
        if kind == "parquet" and is_joined and parts > 1:
            with pytest.raises(UsageError, match="has several files, one behind the other"):
                list(found)
            return
        read = [row for batch in found for row in zip(*(c.to_pylist() for c in batch), strict=True)]
    assert read == [row for part in cut for row in part]


@settings(max_examples=250, deadline=None)
@given(cases)
def test_an_import_of_an_export_has_its_rows(case: Any) -> None:
    check_identity(case)


@pytest.mark.soak
@settings(max_examples=12_000, deadline=None)
@given(cases)
def test_soak_an_import_of_an_export_has_its_rows(case: Any) -> None:
    check_identity(case)


def read_rows(path: Path, reads: FileReads = PLAIN_READS) -> list[tuple[bytes, bytes]]:
    batches = file_rows([path], key="key", value="value", reads=reads)
    return [row for batch in batches for row in zip(*(c.to_pylist() for c in batch), strict=True)]


def test_arrow_files_one_behind_the_other_are_refused_and_streams_are_read(tmp_path: Path) -> None:
    """The places in the last file's footer count from its own start: rows were read twice."""
    halves = [pa.table({"key": [f"{at}"], "value": ["v"]}) for at in range(2)]
    for name, opened in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with (tmp_path / f"{name}.arrow").open("wb") as file:
            for half in halves:
                with opened(file, half.schema) as writer:
                    writer.write_table(half)
    with pytest.raises(UsageError, match="has several files"):
        read_rows(tmp_path / "file.arrow")
    assert read_rows(tmp_path / "stream.arrow") == [(b"0", b"v"), (b"1", b"v")]
    for at, half in enumerate(halves):
        pq.write_table(half, tmp_path / f"{at}.parquet")
    joined = b"".join((tmp_path / f"{at}.parquet").read_bytes() for at in range(2))
    (tmp_path / "both.parquet").write_bytes(joined)
    with pytest.raises(UsageError, match="has several files"):
        read_rows(tmp_path / "both.parquet")


def test_a_value_with_the_marks_of_other_formats_is_a_value(tmp_path: Path) -> None:
    """Two files within a value are no two files."""
    values = [b"PAR1PAR1" * 9, b"ARROW1ARROW1\x00\x00" * 9, b"x" * 9]
    table = pa.table({"key": ["a", "b", "c"], "value": pa.array(values, pa.binary())})
    wanted = list(zip([b"a", b"b", b"c"], values, strict=True))
    pq.write_table(table, tmp_path / "f.parquet", compression="none", write_page_index=True)
    feather.write_feather(table, str(tmp_path / "f.feather"), compression="uncompressed")
    assert read_rows(tmp_path / "f.parquet") == wanted
    assert read_rows(tmp_path / "f.feather") == wanted


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_text_that_ends_early_or_has_rubbish_behind_is_refused(
    tmp_path: Path, ending: str
) -> None:
    raw = written(
        [(b"%d" % at, b"v" * 50) for at in range(2000)],
        f"f.csv{ending}",
        Encodings(Encoding.TEXT, Encoding.TEXT),
    )
    path = tmp_path / f"f.csv{ending}"
    for wrong in (raw[:-5], raw[: len(raw) // 2], raw + b"rubbish"):
        path.write_bytes(wrong)
        with pytest.raises(UsageError, match=f"f.csv{ending}"):
            read_rows(path)


def test_a_field_of_a_json_line_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"key": "a", "value": "1"}\n{"key": "b", "value": "1", "key": "c"}\n')
    with pytest.raises(UsageError, match=r"f\.jsonl:2 has two fields 'key'; remove one"):
        read_rows(path)


def test_rows_too_long_for_text_are_refused_before_a_file_is_there() -> None:
    none = Encodings(Encoding.TEXT, Encoding.TEXT)
    rows = [(b"small", b"v"), (b"large", b'"' * 600)]
    with bounds({"TEXT_ROW_BYTES_MAX": 1000}):
        for name in ("f.csv", "f.tsv.gz", "f.jsonl"):
            with pytest.raises(UsageError, match="the row of key b'large' has more than"):
                written(rows, name, none)
        for name in ("f.parquet", "f.arrow"):
            assert written(rows, name, none)


Texts = list[tuple[str, str]]
ROWS: Final[Texts] = [
    ("a", "plain"),
    ("b", "comma, and\ttab"),
    ("c", 'quote " and ""'),
    ("d", "line\nline\r\nline\rend"),
    ("e", ""),
    ("\ufeffmark", "é€\x00"),
    ("f", "NULL"),
    (" g ", " spaces "),
]


def frame(rows: Texts) -> dict[str, list[str]]:
    return {"key": [key for key, _ in rows], "value": [value for _, value in rows]}


def in_pandas(rows: Texts) -> pd.DataFrame:
    return pd.DataFrame(frame(rows))


def in_polars(rows: Texts) -> pl.DataFrame:
    return pl.DataFrame(frame(rows))


def by_csv(path: Path, rows: Texts, **how: Any) -> None:
    with path.open("w", newline="", encoding=how.pop("encoding", "utf-8")) as file:
        writer = csv.writer(file, **how)
        writer.writerow(["key", "value"])
        writer.writerows(rows)


def by_duckdb(path: Path, rows: Texts, how: str) -> None:
    given = pa.table(frame(rows))
    duckdb.sql(f"COPY (SELECT * FROM given) TO '{path}' ({how})")
    assert given.num_rows == len(rows)


def by_sqlite(path: Path, rows: Texts) -> None:
    """As the shell's `.mode csv`: it quotes what needs it, and ends rows with CR LF."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE t (key TEXT, value TEXT)")
    database.executemany("INSERT INTO t VALUES (?, ?)", rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\r\n").writerow(["key", "value"])
        csv.writer(file, lineterminator="\r\n").writerows(database.execute("SELECT * FROM t"))


def by_psql(path: Path, rows: Texts) -> None:
    """As `\\copy t to 'f.csv' csv header`: an empty text is quoted, and a null is nothing."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write("key,value\n")
        for row in rows:
            quoted = [
                f'"{text.replace(chr(34), chr(34) * 2)}"'
                if not text or set(text) & set('",\n\r')
                else text
                for text in row
            ]
            file.write(",".join(quoted) + "\n")


WRITERS: Final = {
    "csv": ("f.csv", by_csv),
    "csv, all quoted, LF": (
        "f.csv",
        lambda path, rows: by_csv(path, rows, quoting=csv.QUOTE_ALL, lineterminator="\n"),
    ),
    "csv, tabs": ("f.tsv", lambda path, rows: by_csv(path, rows, delimiter="\t")),
    "csv, a mark": ("f.csv", lambda path, rows: by_csv(path, rows, encoding="utf-8-sig")),
    "csv, CR": (
        "f.csv",
        lambda path, rows: by_csv(path, rows, lineterminator="\r", quoting=csv.QUOTE_ALL),
    ),
    "sqlite3": ("f.csv", by_sqlite),
    "psql": ("f.csv", by_psql),
    "pandas": ("f.csv", lambda path, rows: in_pandas(rows).to_csv(path, index=False)),
    "pandas, gzip": (
        "f.csv.gz",
        lambda path, rows: in_pandas(rows).to_csv(path, index=False),
    ),
    "pandas, lines": (
        "f.jsonl",
        lambda path, rows: in_pandas(rows).to_json(path, orient="records", lines=True),
    ),
    "pandas, parquet": ("f.parquet", lambda path, rows: in_pandas(rows).to_parquet(path)),
    "pandas, filtered": (
        "f.parquet",
        lambda path, rows: (
            in_pandas(rows)
            .query("key != 'none'")
            .set_index(pd.Index(range(9, 9 + len(rows))))
            .to_parquet(path, index=True)
        ),
    ),
    "pandas, categories": (
        "f.parquet",
        lambda path, rows: in_pandas(rows).astype("category").to_parquet(path),
    ),
    "polars": ("f.csv", lambda path, rows: in_polars(rows).write_csv(path)),
    "polars, tabs": (
        "f.tsv",
        lambda path, rows: in_polars(rows).write_csv(path, separator="\t"),
    ),
    "polars, lines": ("f.ndjson", lambda path, rows: in_polars(rows).write_ndjson(path)),
    "polars, parquet": (
        "f.parquet",
        lambda path, rows: in_polars(rows).write_parquet(path),
    ),
    "polars, arrow": ("f.arrow", lambda path, rows: in_polars(rows).write_ipc(path)),
    "polars, stream": (
        "f.arrow",
        lambda path, rows: in_polars(rows).write_ipc_stream(path),
    ),
    "polars, categories": (
        "f.arrow",
        lambda path, rows: in_polars(rows).cast(pl.Categorical).write_ipc(path),
    ),
    "polars, enum": (
        "f.parquet",
        lambda path, rows: (
            in_polars(rows)
            .with_columns(pl.col("value").cast(pl.Enum(sorted({v for _, v in rows}))))
            .write_parquet(path)
        ),
    ),
    "pyarrow": ("f.csv", lambda path, rows: pa_csv.write_csv(pa.table(frame(rows)), path)),
    "pyarrow, dictionary": (
        "f.feather",
        lambda path, rows: feather.write_feather(
            pa.table({n: pa.array(c).dictionary_encode() for n, c in frame(rows).items()}),
            str(path),
        ),
    ),
    "pyarrow, views": (
        "f.arrow",
        lambda path, rows: feather.write_feather(
            pa.table({n: pa.array(c, pa.string_view()) for n, c in frame(rows).items()}),
            str(path),
            compression="zstd",
        ),
    ),
    "duckdb": ("f.csv", lambda path, rows: by_duckdb(path, rows, "FORMAT csv, HEADER")),
    "duckdb, zstd": (
        "f.csv.zst",
        lambda path, rows: by_duckdb(path, rows, "FORMAT csv, HEADER, COMPRESSION zstd"),
    ),
    "duckdb, tabs": (
        "f.tsv",
        lambda path, rows: by_duckdb(path, rows, "FORMAT csv, HEADER, DELIMITER '\t'"),
    ),
    "duckdb, lines": ("f.jsonl", lambda path, rows: by_duckdb(path, rows, "FORMAT json")),
    "duckdb, parquet": ("f.parquet", lambda path, rows: by_duckdb(path, rows, "FORMAT parquet")),
}


@pytest.mark.parametrize("program", WRITERS)
def test_files_of_other_programs_have_the_rows_that_were_written(
    tmp_path: Path, program: str
) -> None:
    name, write = WRITERS[program]
    path = tmp_path / name
    write(path, ROWS)
    wanted = [(key.encode(), value.encode()) for key, value in ROWS]
    for block in (1, 5, 8 << 20):
        with bounds({"CSV_BLOCK_BYTES": block}):
            assert read_rows(path) == wanted


characters = st.sampled_from(
    list("\"',\t\r\n\\;|#{} a0\0\x1a\u00e9\u20ac\ufeff\U0001f600\x85\u2028")
)
words = st.sampled_from(
    ["NULL", "null", "NA", "\\N", "true", "1e400", "007", "\r\n", '""', '"\r', "N/A"]
)
some_text = st.lists(characters | words, max_size=6).map("".join)
given_rows = st.lists(st.tuples(some_text, some_text), min_size=1, max_size=5)


def check_program(program: str, rows: Texts, block: int) -> None:
    """Texts that a program writes to a file are the texts that are read from it."""
    name, write = WRITERS[program]
    if program in ("pandas", "pandas, gzip"):  # it does not quote a CR, and loses it itself
        rows = [(key.replace("\r", ""), value.replace("\r", "")) for key, value in rows]
    if program == "pandas, categories":  # its categories "" and "\0" are one
        rows = [(key.replace("\0", ""), value.replace("\0", "")) for key, value in rows]
    with TemporaryDirectory() as place, bounds({"CSV_BLOCK_BYTES": block}):
        path = Path(place) / name
        write(path, rows)
        assert read_rows(path) == [(key.encode(), value.encode()) for key, value in rows]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), given_rows, st.sampled_from([1, 3, 64, 1 << 20]))
def test_texts_of_other_programs_are_read_as_written(program: str, rows: Texts, block: int) -> None:
    check_program(program, rows, block)


@pytest.mark.soak
@settings(max_examples=12_000, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), given_rows, st.sampled_from([1, 3, 64, 1 << 20]))
def test_soak_texts_of_other_programs_are_read(program: str, rows: Texts, block: int) -> None:
    check_program(program, rows, block)
