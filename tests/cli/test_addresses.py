"""The same commands by the path of a store, beside the process that has it open, and by the URL of
its server: they print the same, and end with the same codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvstore
from kvstore import bulk
from kvstore.bulk.served import import_verbs
from kvstore.cli.main import app as commands
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from kvstore.tables import desc
from kvstore.tables.row_codec import dicts
from kvstore.tables.words import json_row
from tests.cli.installed import Run, told
from tests.tables.drawn import definitions, rows_of

SECRET = "0123456789abcdef0123456789abcdef"


def piped(text: str, *words: object, code: int = 0) -> str:
    """What a command prints that gets `text` by stdin."""
    result = CliRunner().invoke(commands, [str(word) for word in words], input=text.encode())
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture(params=["path", "beside", "url"])
def address(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    each_engine: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """A store with a few keys, as a command names it."""
    path = tmp_path / "s"
    with ExitStack() as stack:
        store = stack.enter_context(kvstore.open(path, control=request.param == "beside"))
        for key in (b"a1", b"a2", b"b1"):
            store.put(key, b"1")
        store.put(b"a1", b"2")
        if request.param != "url":
            if request.param == "path":
                store.close()
            yield str(path)
            return
        tokens = [Token(SECRET, "admin")]
        (tmp_path / "staging").mkdir()
        served = app(store, tokens, verbs=import_verbs([str(tmp_path / "staging")]))
        running = stack.enter_context(serving(served, ListenAddress("127.0.0.1", 0)))
        monkeypatch.setenv("KVSTORE_TOKEN", SECRET)
        yield running.url


def test_plain_keys_are_read_and_written(run: Run, address: str) -> None:
    assert run("count", address).stdout == "3\n"
    assert run("count", address, "--prefix", "a", "--json").stdout == '{"keys": 2}\n'
    before = run("put", address, "c1", "new").stdout.strip()
    assert run("get", address, "c1").stdout == "new\n"
    assert run("scan", address, "--prefix", "c").stdout == "c1\tnew\n"
    assert run("delete-range", address, "--prefix", "a").stdout
    assert run("delete-range", address, "--prefix", "a").stdout == ""
    assert run("count", address).stdout == "2\n"
    assert run("count", address, "--as-of", before).stdout == "4\n"
    assert len(run("history", address, "a1").stdout.splitlines()) == 3
    run("revert", address, "--prefix", "a", "--to", before)
    assert run("scan", address, "--keys-only").stdout.split() == ["a1", "a2", "b1", "c1"]
    run("delete", address, "c1")
    run("get", address, "c1", code=1)
    run("get", address, "c1", "--as-of", "tomorrow", code=2)
    run("get", address, "c1", "--as-of", "2200-01-01", code=4)
    assert "upper" in run("stats", address, "--json").stdout
    exported = run("export", address, "-", "--format", "csv").stdout
    assert exported == '"key","value"\n"a1","2"\n"a2","1"\n"b1","1"\n'


def test_files_are_imported_by_each_way(run: Run, address: str, tmp_path: Path) -> None:
    rows, staged = tmp_path / "rows.csv", tmp_path / "staging" / "mine"
    staged.parent.mkdir(exist_ok=True)
    rows.write_text("key,value\na1,3\nc1,1\n")
    done = told(run("import", address, rows, "--json"))
    assert done["rows"] == 2
    assert run("get", address, "a1", "--as-of", done["timestamp"]).stdout == "3\n"
    refused = run("import", address, rows, "--on-conflict", "error", code=2).stderr
    assert "live keys are in the way" in refused
    rows.write_text("c2;2\n")
    run("import", address, rows, "--delimiter", ";", "--no-header", "--staging", staged)
    assert not staged.exists()
    rows.write_text("key,value,op\nc1,,delete\nc3,3,put\n")
    applied = told(run("import", address, rows, "--op", "op", "--json"))
    assert (applied["puts"], applied["deletes"]) == (1, 1)
    rows.write_text("key,value\na1,3\na3,4\n")
    synced = told(run("import", address, rows, "--sync", "--prefix", "a", "--json"))
    assert (synced["puts"], synced["deletes"]) == (1, 1)
    made = bulk.Import.create(staged)
    made.write_sorted([pa.record_batch({"key": [b"d"], "value": [b"5"]})])
    made.seal()
    run("import", address, staged, "--move")
    kept = dict(line.split("\t") for line in run("scan", address).stdout.splitlines())
    assert kept == {"a1": "3", "a3": "4", "b1": "1", "c2": "2", "c3": "3", "d": "5"}
    run("import", address, rows, "--sync", "--staging", staged, code=2)
    if "://" in address:
        outside = run("import", address, rows, "--staging", tmp_path / "elsewhere", code=2).stderr
        assert "not from there" in " ".join(outside.split())
        run("import", address, rows, "--create", code=2)


def test_a_table_is_made_filled_read_put_right_and_dropped(
    run: Run, address: str, tmp_path: Path
) -> None:
    users = (address, "users")
    words = ("name:string", "id:int64", "at:timestamp[us, tz=UTC]", "raw:binary")
    made = told(run("table", "create", *users, *words, "--key", "id", "--index", "name", "--json"))
    assert made["indexes"][0]["name"] == "by_name"
    run("table", "create", *users, *words, "--key", "id", "--index", "name")  # it is the same
    run("table", "create", *users, "id:int64", "--key", "id", code=2)
    first = told(run("table", "put", *users, "id=7", "name=ann", "raw=ff", "--json"))["timestamp"]
    rows = '{"id": 8, "name": "bo", "raw": {"base64": "AP8="}}\n\n{"id": 9, "name": "ann"}\n'
    assert '"rows": 2' in piped(rows, "table", "put", *users, "--json")
    assert "'x' is no int64" in run("table", "put", *users, "id=x", code=2).stderr
    assert "no column 'nick'" in run("table", "put", *users, '{"nick": 1}', code=2).stderr
    run("table", "put", *users, '{"id": 7}', '{"id": 10}', "--insert", code=2)
    run("table", "put", *users, "id=10", "name=cy", "--expires", "+1h")
    assert run("table", "count", *users).stdout == "4\n"
    assert run("table", "count", *users, "--as-of", first).stdout == "1\n"
    for index in ("by_name", "name"):
        found = run("table", "find", *users, index, "ann", "-c", "id", "--json").stdout
        assert found == '{"id": 7}\n{"id": 9}\n'
    shown = '{"name": "bo", "id": 8, "at": null, "raw": {"base64": "AP8="}}\n'
    assert run("table", "get", *users, "8", "--json").stdout == shown
    got = piped('8\n[11]\n{"id": 9}\n', "table", "get", *users, "-c", "name", code=1)
    assert got == '{"name": "bo"}\nnull\n{"name": "ann"}\n'
    piped("", "table", "get", *users, code=2)
    piped('{"id": 8, "name": "bo"}\n', "table", "get", *users, code=2)
    assert "rows" not in piped("[8]\n9\n", "table", "delete", *users)
    assert run("table", "count", *users).stdout == "2\n"
    versions = run("table", "history", *users, "8", "--json").stdout.splitlines()
    assert ['"deleted": true' in each for each in versions] == [True, False]
    run("table", "revert", *users, "--to", first, code=2)
    run("table", "revert", *users, "--to", first, "--all")
    assert run("table", "scan", *users, "-c", "id", "--json").stdout == '{"id": 7}\n'
    assert run("table", "revert", *users, "--to", first, "--all").stdout == ""
    piped(rows, "table", "put", *users)
    run("table", "delete-range", *users, "--start", "8", "--end", "[9]")
    assert run("table", "scan", *users, "-c", "id", "--json").stdout == '{"id": 7}\n{"id": 9}\n'
    run("table", "alter", *users, "--add", "tip:double=0.5")
    csv = run("export", address, "users", "-", "--format", "csv", "-c", "id,name,tip").stdout
    assert csv == '"id","name","tip"\n"7","ann","0.5"\n"9","ann","0.5"\n'
    told(run("export", address, "users", tmp_path / "u.parquet", "--json"))
    assert pq.read_table(tmp_path / "u.parquet").num_rows == 2
    run("table", "clear", *users, code=2)
    run("table", "clear", *users, "--prefix", "9")
    run("table", "history", *users, "9", code=1)
    assert run("table", "scan", *users, "-c", "id", "--json").stdout == '{"id": 7}\n'
    run("table", "clear", *users, "--start", "7", "--end", "[8]")
    assert run("table", "count", *users).stdout == "0\n"
    run("table", "clear", *users, "--all")
    assert run("table", "count", *users).stdout == "0\n"
    run("table", "history", *users, "7", code=1)
    run("table", "drop", *users)
    assert run("table", "list", address, "--json").stdout == ""
    run("table", "get", *users, "7", code=2)
    assert run("count", address).stdout == "3\n"


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_of_every_type_pass_by_json_lines_and_by_csv_unaltered(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Out of a table and into another one: by stdin, by files, and by Arrow."""
    definition = data.draw(definitions())
    rows = data.draw(st.lists(rows_of(definition), max_size=4))
    place = tmp_path_factory.mktemp("rows")
    words = [f"{column.name}:{_type(column.type)}" for column in definition.columns]
    parts = [(definition.by_id[part.id].name, part.is_falling) for part in definition.key]
    key = ",".join(f"-{name}" if is_falling else name for name, is_falling in parts)
    path, names = place / "s", ["one", "two", "three", "four"]
    with kvstore.open(path, engine="memory") as store:
        for table in names:
            falling = [desc(name) if is_falling else name for name, is_falling in parts]
            store.table(table, definition.schema, falling)
        store.table("one").put_batch(rows)
        wanted = store.table("one").scan().read_all()
    run = lambda *words: _run(place, *words)  # noqa: E731
    made = run("table", "create", path, "five", *words, "--key", key, "--json")
    assert made.exit_code == 0, made.output
    lines = run("table", "scan", path, "one", "--json").stdout
    assert lines.count("\n") == len(wanted)
    if rows:
        piped(lines, "table", "put", path, "two")
    for name, suffix in (("three", "jsonl.zst"), ("four", "arrow"), ("five", "csv")):
        file = place / f"f.{suffix}"
        done = run("export", path, "one", file)
        if suffix == "csv" and done.exit_code == 2:
            assert "is no text" in done.stderr
            continue
        done = run("table", "import", path, name, file)
        assert done.exit_code == 0, done.output
    with kvstore.open_read_only(path) as store:
        for name in names:
            found = store.table(name).scan().read_all()
            if name != "two" or rows:
                assert _shown(found) == _shown(wanted)
        if (place / "f.csv").exists():
            found = store.table("five").scan().read_all()
            assert _shown(found, nulls=False) == _shown(wanted, nulls=False)


def _type(kind: pa.DataType) -> str:
    return "uuid" if isinstance(kind, pa.UuidType) else str(kind)


def _shown(table: pa.Table, *, nulls: bool = True) -> list[Any]:
    """Rows as JSON, which tells -0.0 from 0.0; CSV has no nulls of texts."""
    found = []
    for batch in table.to_batches():
        for row in dicts(batch):
            shown = json_row(batch.schema, row)
            for field in batch.schema:
                if not nulls and row[field.name] in (None, "", b""):
                    shown[field.name] = None
            found.append(shown)
    return found


def _run(place: Path, *words: object) -> Any:
    return CliRunner().invoke(commands, [str(word) for word in words])


def test_rows_of_a_table_are_loaded(run: Run, address: str, tmp_path: Path) -> None:
    file = tmp_path / "users.csv"
    made = ("table", "create", address, "users", "id:int64", "name:string")
    run(*made, "--key", "id", "--unique-index", "name")

    def load(text: str, *options: object, code: int = 0) -> str:
        file.write_text(f"id,name\n{text}\n")
        done = run("table", "import", address, "users", file, "--json", *options, code=code)
        return done.stderr if code else done.stdout

    assert '"rows": 2' in load("2,Bo\n1,Ann")
    assert '"rows": 1' in load("2,Cy", "--staging", tmp_path / "staging" / "run")
    assert "name='Ann' is taken by the row id=1" in load("3,Dee\n4,Ann", code=2)
    assert "live keys are in the way" in load("1,Eve", "--on-conflict", "error", code=2)
    with kvstore.open_read_only(tmp_path / "s") as store:
        users = store.table("users")
        assert [(row["id"], row["name"]) for row in users.rows()] == [(1, "Ann"), (2, "Cy")]
        assert list(users.find("by_name", "Bo")) == []
        assert len(store.imports.all()) == 2
    assert not any((tmp_path / "staging").glob("*"))
