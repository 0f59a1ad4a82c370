"""`kvstore export` and `kvstore import`: every format, pipes, operations, and `--sync`."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.cli.main import app
from tests.cli.installed import Run, told
from tests.harness.seeds import seeded

NAMES = ["f.jsonl", "f.ndjson.gz", "f.csv", "f.tsv.zst", "f.csv.gz", "f.parquet", "f.arrow"]


def drawn(draw: random.Random, count: int) -> dict[bytes, bytes]:
    """Rows of any bytes, also line ends, quotes, delimiters and empty values."""
    pieces = [b"\r\n", b"\n", b'"', b",", b"\t", b"\x00", b"\xff\xfe", b"a", "ü€".encode(), b"\\"]
    return {
        b"%d" % number + b"".join(draw.choices(pieces, k=3)): b"".join(
            draw.choices(pieces, k=draw.randrange(5))
        )
        for number in range(count)
    }


def test_an_export_names_the_key_of_a_value_that_is_no_text(run: Run, tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        store.put_many({b"a": b"1", b"bin": b"\xff"})
    refused = run("export", tmp_path / "s", tmp_path / "f.csv", code=2)
    assert "the value of key b'bin' is no text; pass --encoding base64" in refused.stderr


@pytest.mark.parametrize("name", NAMES)
def test_an_export_loads_back_as_it_was(run: Run, tmp_path: Path, name: str) -> None:
    rows = drawn(seeded(), 300)
    with kvstore.open(tmp_path / "s", engine="memory") as store:
        store.put_many(rows.items())
    needs_notation = "csv" in name or "tsv" in name
    words = ["--encoding", "base64"] if needs_notation else []
    if needs_notation:
        refused = run("export", tmp_path / "s", tmp_path / name, code=2)
        assert "pass --encoding base64" in refused.stderr
        assert not (tmp_path / name).exists()
    report = told(run("export", tmp_path / "s", tmp_path / name, "--json", *words))
    assert report["rows"] == len(rows)
    done = told(run("import", tmp_path / "t", tmp_path / name, "--create", "--json", *words))
    assert done["rows"] == len(rows)
    with kvstore.open_read_only(tmp_path / "t") as store:
        assert dict(store.scan()) == rows
    assert [each.name for each in tmp_path.glob(".*tmp")] == []


def test_text_needs_no_notation_and_a_time_and_a_span_choose_rows(run: Run, tmp_path: Path) -> None:
    for key in ("a1", "a2", "b1"):
        run("put", tmp_path / "s", key, 'say "hi"\n', "--create")
    stamp = run("delete", tmp_path / "s", "a2").stdout.strip()
    run("export", tmp_path / "s", tmp_path / "f.csv", "--prefix", "a")
    assert (tmp_path / "f.csv").read_text() == '"key","value"\n"a1","say ""hi""\n"\n'
    refused = run("export", tmp_path / "s", tmp_path / "f.csv", code=2)
    assert "f.csv exists; name another file, or pass --overwrite" in refused.stderr
    run("export", tmp_path / "s", tmp_path / "f.csv", "--start", "b", "--overwrite")
    assert (tmp_path / "f.csv").read_text() == '"key","value"\n"b1","say ""hi""\n"\n'
    with kvstore.open_read_only(tmp_path / "s") as store:
        before = store.to_time(stamp) - 1
    run("export", tmp_path / "s", tmp_path / "f.tsv", "--as-of", f"{before:d}")
    assert (tmp_path / "f.tsv").read_text().count("say") == 3
    run("export", tmp_path / "s", tmp_path / "none" / "f.csv", code=2)
    run("export", tmp_path / "s", tmp_path / "f.txt", code=2)
    run("export", tmp_path / "s", tmp_path / "f.csv", "--columns", "x", code=2)
    run("export", tmp_path / "s", "trips", tmp_path / "f.parquet", "--prefix", "a", code=2)


def piped(text: bytes, *words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], input=text)


def test_rows_go_through_pipes(run: Run, tmp_path: Path) -> None:
    rows = drawn(seeded(), 50)
    with kvstore.open(tmp_path / "s") as store:
        store.put_many(rows.items())
    for kind in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"):
        raw = run("export", tmp_path / "s", "-", "--format", kind).stdout_bytes
        assert raw.startswith({".gz": b"\x1f\x8b", ".zst": b"\x28\xb5"}.get(kind[5:], b""))
        done = piped(raw, "import", tmp_path / kind, "-", "--format", kind, "--create")
        assert done.exit_code == 0, done.output
        with kvstore.open_read_only(tmp_path / kind) as store:
            assert dict(store.scan()) == rows
    lines = run("scan", tmp_path / "s", "--json").stdout_bytes
    assert run("export", tmp_path / "s", "-").stdout_bytes == lines


def test_stdin_is_a_file_with_a_format(run: Run, tmp_path: Path) -> None:
    raw = b'{"key": "a", "value": "1"}\n\n{"key": {"base64": "/w=="}, "value": ""}\n'
    run("put", tmp_path / "s", "z", "0", "--create")
    words = ["import", tmp_path / "s", "-"]
    done = piped(gzip.compress(raw), *words, "--format", "jsonl.gz", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"] == 2
    assert "pass --format" in piped(raw, *words).stderr
    assert piped(raw, *words, "--format", "txt").exit_code == 2
    assert (
        "stdin:2 is no object"
        in piped(b'{"key": "a", "value": ""}\n3\n', *words[:2], "-", "--format", "jsonl").stderr
    )
    assert "files have it" in piped(raw, *words[:2], "f.csv", "--format", "csv").stderr
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert dict(store.scan()) == {b"a": b"1", b"z": b"0", b"\xff": b""}


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("f.jsonl", '{"key": "a", "value": "1"}\n{"key": 3, "value": "1"}\n', "f.jsonl:2"),
        ("f.jsonl", '\n{"key": "a"}\n', "f.jsonl:2 has no field 'value'"),
        ("f.jsonl", '{"key": "a", "value": "1"\n', "f.jsonl:1 is not JSON"),
        ("f.jsonl", "[1]\n", "f.jsonl:1 is no object"),
        ("f.jsonl", '{"key": "\\ud800", "value": ""}\n', "write it as base64"),
        ("f.jsonl", '{"key": {"base64": "x!"}, "value": ""}\n', "f.jsonl:1: field 'key'"),
        ("f.jsonl", "[" * 100_000 + "\n", "f.jsonl:1 is not JSON"),
        ("f.jsonl", '{"key": "a", "value": ""}\n{"key": "b", "value": null}\n', "f.jsonl: row 2"),
        ("f.jsonl", '{"key": null, "value": "1"}\n', "f.jsonl: row 1: it has no key"),
        ("f.csv", "key,value\na,1\nb,2,3\n", "row 3 has 3 columns"),
        ("f.tsv", "key\tvalue\na\n", "row 2 has 1 columns"),
        ("f.csv", "key,value\nk,\nl,\n", ""),
        ("f.csv.gz", "no gzip", "f.csv.gz"),
        ("f.jsonl.zst", "no zstd", "f.jsonl.zst"),
        ("f.parquet.gz", "x", "unpack the file"),
    ],
    ids=range(15),
)
def test_a_bad_row_is_named_by_file_and_line(
    run: Run, tmp_path: Path, name: str, text: str, where: str
) -> None:
    (tmp_path / name).write_text(text)
    code = 2 if where else 0
    refused = run("import", tmp_path / "s", tmp_path / name, "--create", code=code)
    assert where in refused.stderr
    assert (tmp_path / "s").exists() == (code == 0)


def test_a_value_in_another_notation_is_named_by_its_row(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("key,value\nk,00ff\n")
    (tmp_path / "b.csv").write_text("key,value\nl,00\nm,0g\n")
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    refused = run("import", tmp_path / "s", *files, "--create", "--value-encoding", "hex", code=2)
    assert "b.csv: row 3: '0g' is not hex; write two digits" in refused.stderr
    run("import", tmp_path / "s", files[0], "--create", "--value-encoding", "hex")
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert dict(store.scan()) == {b"k": b"\x00\xff"}


def test_a_column_says_put_or_delete(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "s", "b", "1", "--create")
    (tmp_path / "f.csv").write_text("key,value,op\na,1,put\nb,,delete\nc,1,put\nc,2,put\n")
    done = told(run("import", tmp_path / "s", tmp_path / "f.csv", "--op", "op", "--json"))
    assert (done["puts"], done["deletes"], done["commits"]) == (3, 1, 1)
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert dict(store.scan()) == {b"a": b"1", b"c": b"2"}
    (tmp_path / "f.jsonl").write_text(
        '{"op": "put", "key": "d", "value": "3"}\n{"op": "delete", "key": "a"}\n'
    )
    run("import", tmp_path / "s", tmp_path / "f.jsonl", "--op", "op")
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert dict(store.scan()) == {b"c": b"2", b"d": b"3"}
    (tmp_path / "f.jsonl").write_text('{"op": "put", "key": "d"}\n')
    refused = run("import", tmp_path / "s", tmp_path / "f.jsonl", "--op", "op", code=2)
    assert "f.jsonl:1 has no field 'value'" in refused.stderr
    (tmp_path / "f.csv").write_text("key,value,op\na,1,upsert\n")
    refused = run("import", tmp_path / "s", tmp_path / "f.csv", "--op", "op", code=2)
    assert "f.csv: row 2: its operation is unknown; write put or delete" in refused.stderr


def test_a_span_is_made_equal_to_a_file_and_differences_alone_are_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = seeded()
    rows = {b"p%03d" % draw.randrange(999): b"%d" % draw.randrange(3) for _ in range(200)}
    other = {b"p%03d" % draw.randrange(999): b"%d" % draw.randrange(3) for _ in range(200)}
    kept = {key: rows[key] for key in draw.sample(sorted(rows), 100)}
    with kvstore.open(tmp_path / "s") as store:
        store.put_many([*rows.items(), (b"outside", b"1")])
    wanted = {**other, **kept}
    lines = [{"key": key.decode(), "value": value.decode()} for key, value in wanted.items()]
    draw.shuffle(lines)
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("kvstore.bulk.loading.APPLY_BYTES_MAX", 2_000)
    words = ["import", tmp_path / "s", file, "--sync", "--prefix", "p", "--json"]
    done = told(run(*words))
    assert done["puts"] == sum(rows.get(key) != value for key, value in wanted.items())
    assert done["deletes"] == len(rows.keys() - wanted.keys())
    assert done["commits"] > 1
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert dict(store.scan()) == {**wanted, b"outside": b"1"}
        upper = store.upper
        assert len({event.changeset for event in store.events(store.to_time(0))}) == 2
    assert run(*words[:6]).stdout.splitlines()[0] == "timestamp  -"
    again = told(run(*words))
    assert again == {"timestamp": None, "puts": 0, "deletes": 0, "commits": 0}
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert store.upper == upper
    assert "outside the span" in run(*words[:4], "--prefix", "q", code=2).stderr
    file.write_text('{"key": "p", "value": "1"}\n{"key": "p", "value": "2"}\n')
    assert "came twice" in run(*words[:6], code=2).stderr
    assert told(run(*words, "--duplicates", "last"))["puts"] == 1


def test_an_empty_input_does_not_delete_a_span(run: Run, tmp_path: Path) -> None:
    """`false | kvstore import s - --sync` is a failed pipe."""
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"p", b"1")
    (tmp_path / "empty.csv").write_text("key,value\n")
    words = ["import", tmp_path / "s", tmp_path / "empty.csv", "--sync"]
    for span in [(), ("--prefix", "p")]:
        assert "no rows" in run(*words, *span, code=2).stderr
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert store.get(b"p") == b"1"
    assert told(run(*words, "--prefix", "q", "--json"))["deletes"] == 0


def test_a_span_is_made_equal_beside_the_process_that_has_the_store_open(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "f.csv").write_text("key,value\na,1\nb,2\n")
    with kvstore.open(tmp_path / "s", control=True) as store:
        store.put_many([(b"a", b"1"), (b"c", b"3")])
        done = told(run("import", tmp_path / "s", tmp_path / "f.csv", "--sync", "--json"))
        assert (done["puts"], done["deletes"]) == (1, 1)
        assert dict(store.scan()) == {b"a": b"1", b"b": b"2"}


@pytest.mark.parametrize(
    "words",
    [
        ("--sync", "--op", "op"),
        ("--sync", "--expires", "until"),
        ("--sync", "--on-conflict", "error"),
        ("--prefix", "a"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "f.csv").write_text("key,value,op,until\na,1,put,\n")
    run("import", tmp_path / "s", tmp_path / "f.csv", "--create", *words, code=2)
    assert not (tmp_path / "s").exists()
    (tmp_path / "staged").mkdir()
    run("import", tmp_path / "s", tmp_path / "staged", "--create", "--sync", code=2)


@pytest.mark.parametrize("name", ["f.csv", "f.tsv.gz", "f.csv.zst"])
def test_a_quote_that_nobody_closed_is_refused_by_its_row_and_nothing_is_written(
    run: Run, tmp_path: Path, name: str
) -> None:
    """Nine rows were swallowed by the quote of the first one, and --sync deleted their keys."""
    sign = "\t" if ".tsv" in name else ","
    rows = [("key", "value"), ("k0", '"v0')] + [(f"k{at}", "v") for at in range(1, 10)]
    text = "".join(f"{key}{sign}{value}\n" for key, value in rows)
    sink = pa.output_stream(str(tmp_path / name))  # packs by the ending of the name
    with sink:
        sink.write(text.encode())
    with kvstore.open(tmp_path / "s") as store:
        store.put_many({b"k%d" % at: b"old" for at in range(10)})
        before = store.upper
    words = ["import", tmp_path / "s", tmp_path / name]
    for more in ([], ["--sync"], ["--value", "value", "--duplicates", "last"]):
        refused = run(*words, *more, code=2)
        assert f"{name}: row 2: a quote is not closed before the file ends" in refused.stderr
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert store.upper == before
    run(*words, "--quoting", "none")
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert dict(store.scan())[b"k0"] == b'"v0'
    refused = run("import", tmp_path / "s", tmp_path / "f.jsonl", "--quoting", "none", code=2)
    assert "--quoting is for CSV and TSV" in refused.stderr


def test_an_operation_that_is_refused_late_leaves_the_store_as_it_was(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows before it were committed already."""
    monkeypatch.setattr("kvstore.bulk.loading.APPLY_BYTES_MAX", 500)
    run("put", tmp_path / "s", "b", "1", "--create")
    good = "".join(f"a{at},1,put\n" for at in range(50))
    long = "k" * 70_000
    for bad, problem in [
        ("b,,delte", "row 52: its operation is unknown"),
        (f"{long},1,put", "row 52: its key is too long"),
        ('b,"1"1,put', "row 52: text stands behind a quote"),
    ]:
        (tmp_path / "f.csv").write_text(f"key,value,op\n{good}{bad}\n")
        refused = run("import", tmp_path / "s", tmp_path / "f.csv", "--op", "op", code=2)
        assert f"f.csv: {problem}" in refused.stderr
    with kvstore.open_read_only(tmp_path / "s") as store:
        assert dict(store.scan()) == {b"b": b"1"}


def test_a_row_of_an_export_may_be_larger_than_a_block(run: Run, tmp_path: Path) -> None:
    value = b'"\r\n' * (3 << 20)
    with kvstore.open(tmp_path / "s") as store:
        store.put_many({b"a": b"1", b"b": value, b"c": b"\r\n"})
    run("export", tmp_path / "s", tmp_path / "f.csv")
    run("import", tmp_path / "copy", tmp_path / "f.csv", "--create")
    with kvstore.open_read_only(tmp_path / "copy") as store:
        assert dict(store.scan()) == {b"a": b"1", b"b": value, b"c": b"\r\n"}


def test_fields_are_divided_and_named_as_options_tell(run: Run, tmp_path: Path) -> None:
    store, source = tmp_path / "s", tmp_path / "f.csv"
    source.write_text('a|1\n"b|"|2\n')
    words = ("import", store, source, "--create", "--delimiter", "|")
    run(*words, "--no-header")
    assert run("scan", store).stdout == "a\t1\nb|\t2\n"
    source.write_text("a\t7\tx\nc\n")
    told = run("import", store, source, "--delimiter", "tab", "--names", "key,n,value", code=2)
    assert "f.csv: row 2 has 1 columns, and the names are 3" in told.stderr
    source.write_text("a\t7\tx\nc\t8\ty\n")
    run("import", store, source, "--delimiter", "tab", "--names", "key,n,value")
    assert run("scan", store).stdout == "a\tx\nb|\t2\nc\ty\n"
    for wrong in ("||", '"', "ä", ""):
        run("import", store, source, "--delimiter", wrong, code=2)
    (tmp_path / "f.jsonl").write_text("")
    refused = run("import", store, tmp_path / "f.jsonl", "--no-header", code=2)
    assert "--no-header is for CSV and TSV" in refused.stderr


def test_fields_that_are_no_texts_become_their_json_where_that_is_asked_for(
    run: Run, tmp_path: Path
) -> None:
    """Numbers keep the digits that the file has."""
    store, source = tmp_path / "s", tmp_path / "f.jsonl"
    source.write_text('{"id": 7, "at": {"x": 1.50, "who": ["\\u00e4", null, true, [], {}]}}\n')
    words = ("import", store, source, "--create", "--key", "id", "--value")
    told = run(*words, "at", code=2).stderr
    assert "field 'id' is of type int" in told
    assert "--nested text" in told
    run(*words, "at", "--nested", "text")
    assert run("get", store, "7").stdout == '{"x":1.50,"who":["ä",null,true,[],{}]}\n'
    run(*words, "at.x", "--nested", "columns")
    assert run("get", store, "7").stdout == "1.50\n"
    source.write_text('{"id": "a", "at.x": 1, "at": {"x": 2}}\n')
    told = run(*words, "at.x", "--nested", "columns", code=2).stderr
    assert "f.jsonl:1 has two fields 'at.x'" in told
    source.write_text(f'{{"id": "a", "at": {"[" * 900}{"]" * 900}}}\n')
    run(*words, "at", "--nested", "text")
    run("import", store, tmp_path / "f.csv", "--nested", "text", code=2)
