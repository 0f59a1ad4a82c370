"""`kvstore import`: files and staging directories, and files that it refuses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import kvstore
import kvstore.bulk.loading
from kvstore.bulk import Import
from kvstore.bulk.sort import sorted_batches
from tests.cli.installed import Run, told

KEYS = [b"%05d" % number for number in range(1000)]
TABLE = pa.table(
    {"key": pa.array(reversed(KEYS), pa.binary()), "value": pa.array([b"v"] * 1000, pa.binary())}
)


def write_file(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".csv":
        text = [pa.array([raw.decode() for raw in c.to_pylist()]) for c in table.columns]
        pa_csv.write_csv(pa.table(text, names=table.column_names), path)
    else:
        opener = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
        with opener(str(path), table.schema) as file:
            file.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".arrow", ".ipc"])
@pytest.mark.parametrize("bytes_max", [5_000, 1 << 28], ids=["through disk", "in memory"])
def test_files_are_sorted_and_imported_at_one_time(
    run: Run, tmp_path: Path, suffix: str, bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kvstore.bulk.loading, "sorted_batches", partial(sorted_batches, bytes_max=bytes_max)
    )
    monkeypatch.setattr(kvstore.bulk.building, "ROWS_PER_PART", 300)
    monkeypatch.setattr("kvstore.bulk.sort.ARROW_ROWS_MAX", 100)
    half = TABLE.slice(0, 500), TABLE.slice(500)
    files = [write_file(tmp_path / f"{n}{suffix}", part) for n, part in enumerate(half)]
    done = told(run("import", tmp_path / "s", *files, "--create", "--json"))
    assert done["rows"] == 1000
    assert done["parts"] >= 3
    with kvstore.open(tmp_path / "s") as store:
        assert [key for key, _ in store.scan()] == KEYS
        assert {str(change.timestamp) for change in store.changes(0)} == {done["timestamp"]}
        assert list((tmp_path / "s" / "ingest").iterdir()) == []


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_column_has_the_times_at_which_keys_expire(run: Run, tmp_path: Path, suffix: str) -> None:
    """CSV has text and an empty field for none; the times of Parquet have a type."""
    file = tmp_path / f"codes{suffix}"
    if suffix == ".csv":
        file.write_text("key,value,until\na,1,2100-01-01T00:00:00Z\nb,2,\nc,3,1999-01-01 00:00Z\n")
    else:
        years = [datetime(year, 1, 1, tzinfo=UTC) if year else None for year in (2100, 0, 1999)]
        times = pa.array(years, pa.timestamp("ms", "UTC"))
        pq.write_table(pa.table({"key": [*"abc"], "value": [*"123"], "until": times}), file)
    run("import", tmp_path / "s", file, "--create", "--expires", "until")
    with kvstore.open(tmp_path / "s") as store:
        assert list(store.keys()) == [b"a", b"b"]
        left = store.ttl(b"a")
        assert left is not None
        assert left > timedelta(days=365)
        assert store.ttl(b"b") is None
    refused = run("import", tmp_path / "s", file, "--expires", "value", code=2)
    assert "one is named twice" in refused.stderr
    (tmp_path / "day.csv").write_text("key,value,until\nd,1,2100-01-01\ne,2,2100-01-02 UTC\n")
    run("import", tmp_path / "s", tmp_path / "day.csv", "--expires", "until")
    with kvstore.open_read_only(tmp_path / "s") as store:
        left = [store.ttl(key) for key in (b"d", b"e")]
        assert timedelta(hours=23) < left[1] - left[0] < timedelta(hours=25)  # type: ignore[operator]  # both expire
    (tmp_path / "soon.csv").write_text("key,value,until\na,1,2100-01-01T00:00:00Z\nb,2,soon\n")
    refused = run("import", tmp_path / "s", tmp_path / "soon.csv", "--expires", "until", code=2)
    assert "soon.csv: row 3, column 'until': 'soon' is no time; write ISO-8601" in refused.stderr


@pytest.mark.parametrize("suffix", [".jsonl", ".csv.gz", ".tsv", ".parquet", ".arrow"])
def test_an_export_brings_due_times_and_an_import_takes_them_back(
    run: Run, tmp_path: Path, suffix: str
) -> None:
    due = kvstore.Timestamp.parse("2100-01-01T00:00:00.000000007Z")
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"a", b"1", expires=due)
        store.put(b"b", b"2")
    timed, plain = tmp_path / f"timed{suffix}", tmp_path / f"plain{suffix}"
    run("export", tmp_path / "s", timed)
    run("export", tmp_path / "s", plain, "--start", "b")
    run("import", tmp_path / "copy", plain, timed, "--create", "--duplicates", "last")
    with kvstore.open(tmp_path / "copy") as store:
        found = [(change.key, change.value, change.expires) for change in store.changes(0)]
        assert found == [(b"a", b"1", due), (b"b", b"2", None)]


def test_columns_are_named_and_text_becomes_its_bytes(run: Run, tmp_path: Path) -> None:
    table = pa.table({"flight": ["b", "a"], "note": ["ü", "x"], "number": [1, 2]})
    pq.write_table(table, tmp_path / "f.parquet")
    source = tmp_path / "f.parquet"
    columns = ["--key", "flight", "--value", "note"]
    run("import", tmp_path / "s", source, *columns, "--create")
    with kvstore.open(tmp_path / "s") as store:
        assert list(store.scan()) == [(b"a", b"x"), (b"b", "ü".encode())]
    missing = run("import", tmp_path / "s", source, code=2)
    assert "choose from flight, note, number" in missing.stderr
    wrong = run("import", tmp_path / "s", source, "--key", "flight", "--value", "number", code=2)
    assert "int64" in wrong.stderr


@pytest.mark.parametrize(
    ("encoding", "text"),
    [("hex", "key,value\n00ff,6f6e\n01,\n"), ("base64", "key,value\nAP8=,b24=\nAQ==,\n")],
)
def test_files_hold_keys_and_values_as_the_command_line_does(
    run: Run, tmp_path: Path, encoding: str, text: str
) -> None:
    (tmp_path / "f.csv").write_text(text)
    run("import", tmp_path / "s", tmp_path / "f.csv", "--create", "-e", encoding)
    with kvstore.open(tmp_path / "s") as store:
        assert list(store.scan()) == [(b"\x00\xff", b"on"), (b"\x01", b"")]
    (tmp_path / "f.csv").write_text("key,value\nx!,00\n")
    refused = run("import", tmp_path / "s", tmp_path / "f.csv", "-e", encoding, code=2)
    assert f"'x!' is not {encoding}" in refused.stderr
    kvstore.bulk.Import.create(tmp_path / "staged").seal()
    run("import", tmp_path / "s", tmp_path / "staged", "-e", encoding, code=2)


def test_a_key_that_comes_twice_is_refused_or_the_last_counts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("key,value\na,1\nb,1\na,2\n")
    refused = run("import", tmp_path / "s", tmp_path / "f.csv", "--create", code=2)
    assert "came twice; remove one row of it, or pass --duplicates last" in refused.stderr
    run("import", tmp_path / "s", tmp_path / "f.csv", "--create", "--duplicates", "last")
    assert run("get", tmp_path / "s", "a").stdout == "2\n"


def test_only_the_columns_that_are_named_are_read_of_a_csv_file(run: Run, tmp_path: Path) -> None:
    """No type is guessed for the other columns, because a later row may not have it."""
    rows = "".join(f"k{number:06},v,{number}\n" for number in range(700_000))
    (tmp_path / "f.csv").write_text(f"key,value,n\n{rows}z,v,no number\n")
    assert told(run("import", tmp_path / "s", tmp_path / "f.csv", "--create", "--json"))[
        "rows"
    ] == (700_001)


def test_values_of_a_csv_file_may_have_several_lines(run: Run, tmp_path: Path) -> None:
    text = "x" * 100
    rows = "".join(f'k{number:06},"{text}\n{text}"\n' for number in range(50_000))
    (tmp_path / "f.csv").write_text(f"key,value\n{rows}")
    run("import", tmp_path / "s", tmp_path / "f.csv", "--create")
    assert run("get", tmp_path / "s", "k049999").stdout == f"{text}\n{text}\n"


def test_columns_that_are_there_twice_are_refused_and_views_are_text(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "f.csv").write_text("key,value,key\na,1,b\n")
    columns = [pa.array(["a"]), pa.array(["1"]), pa.array(["b"])]
    twice = pa.Table.from_arrays(columns, names=["key", "value", "key"])
    pq.write_table(twice, tmp_path / "f.parquet")
    for name in ("f.csv", "f.parquet"):
        failed = run("import", tmp_path / "s", tmp_path / name, "--create", code=2)
        assert "2 columns 'key'" in failed.stderr
    kinds = {"key": pa.string_view(), "value": pa.binary_view()}
    views = pa.table({name: pa.array(["a"], kind) for name, kind in kinds.items()})
    pq.write_table(views, tmp_path / "v.parquet")
    run("import", tmp_path / "s", tmp_path / "v.parquet", "--create")
    assert run("get", tmp_path / "s", "a").stdout == "a\n"


def test_live_keys_are_in_the_way_only_if_they_are_to_be(run: Run, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("key,value\na,1\n")
    run("put", tmp_path / "s", "a", "0", "--create")
    run("import", tmp_path / "s", tmp_path / "f.csv", "--on-conflict", "error", code=2)
    assert run("get", tmp_path / "s", "a").stdout == "0\n"
    run("import", tmp_path / "s", tmp_path / "f.csv", "--on-conflict", "never", code=2)
    run("import", tmp_path / "s", tmp_path / "f.csv")
    assert run("get", tmp_path / "s", "a").stdout == "1\n"


def test_a_staging_directory_is_added_once(run: Run, tmp_path: Path) -> None:
    made = Import.create(tmp_path / "staged")
    with made.writer() as writer:
        writer.put(b"a", b"1")
    run("import", tmp_path / "s", tmp_path / "staged", "--create", code=2)
    made.seal()
    first = told(run("import", tmp_path / "s", tmp_path / "staged", "--create", "--json"))
    assert told(run("import", tmp_path / "s", tmp_path / "staged", "--json")) == first
    assert first["import_id"] == f"{made.import_id:016x}"


@pytest.mark.parametrize("name", ["f.txt", "f.parquet", "f.csv", "f.arrow"])
def test_files_that_are_none_are_named_and_nothing_is_written(
    run: Run, tmp_path: Path, name: str
) -> None:
    run("put", tmp_path / "s", "k", "v", "--create")
    failed = run("import", tmp_path / "s", tmp_path / name, code=2)
    assert name in failed.stderr
    (tmp_path / name).write_bytes(b"\x00\x01 no such format\n" * 10)
    assert name in run("import", tmp_path / "s", tmp_path / name, code=2).stderr
    with kvstore.open(tmp_path / "s") as store:
        assert [key for key, _ in store.scan()] == [b"k"]
