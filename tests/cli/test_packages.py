"""Commands of packages above kvstore, found by entry point: `kvstore import`, `kvstore backup`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import backup.cli
import bulk.cli
import kvstore
from bulk import Import
from bulk.sort import sorted_batches
from kvstore.cli.app import COMMANDS_GROUP, app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]

Run = Callable[..., Result]


def declared() -> dict[str, str]:
    """The entry points that pyproject declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"kvstore": "kvstore.cli:main"}
    points: dict[str, str] = project["entry-points"][COMMANDS_GROUP]
    return points


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory for the path that declares the entry points as an installed project does."""
    info = tmp_path / "site" / "kvstore-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstore\nVersion: 0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in declared().items())
    (info / "entry_points.txt").write_text(f"[{COMMANDS_GROUP}]\n{lines}")
    return tmp_path / "site"


@pytest.fixture
def run(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.syspath_prepend(str(installed))

    def run(*words: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run


def told(result: Result) -> Any:
    return json.loads(result.stdout)


# -- how commands are found -------------------------------------------------------------------


def test_declared_commands_are_what_the_packages_have() -> None:
    assert declared() == {"import": "bulk.cli:app", "backup": "backup.cli:app"}
    assert bulk.cli.app is not backup.cli.app


def test_installed_commands_are_listed_and_run(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}

    def call(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", *words],
            env=environment,
            capture_output=True,
            check=True,
            text=True,
        )
        assert done.stderr == ""
        return done.stdout

    assert {"import", "backup"} <= set(call("--help").replace("│", " ").split())
    store = str(tmp_path / "s")
    call("put", store, "a", "1", "--create")
    assert json.loads(call("backup", "run", store, str(tmp_path / "b"), "--json"))["rows"] == 1
    assert "kvstore import new.db" in call("import", "--help")


# -- import -----------------------------------------------------------------------------------

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
    monkeypatch.setattr(bulk.cli, "sorted_batches", partial(sorted_batches, bytes_max=bytes_max))
    monkeypatch.setattr(bulk.cli, "ROWS_PER_PART", 300)
    monkeypatch.setattr("bulk.sort.ARROW_ROWS_MAX", 100)
    half = TABLE.slice(0, 500), TABLE.slice(500)
    files = [write_file(tmp_path / f"{n}{suffix}", part) for n, part in enumerate(half)]
    done = told(run("import", tmp_path / "s", *files, "--create", "--json"))
    assert done["rows"] == 1000
    assert done["parts"] >= 3
    with kvstore.open(tmp_path / "s") as store:
        assert [key for key, _ in store.scan()] == KEYS
        assert {str(change.timestamp) for change in store.changes(0)} == {done["timestamp"]}
        assert list((tmp_path / "s" / "ingest").iterdir()) == []


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
    bulk.Import.create(tmp_path / "staged").seal()
    run("import", tmp_path / "s", tmp_path / "staged", "-e", encoding, code=2)


def test_a_key_that_comes_twice_is_refused_or_the_last_counts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("key,value\na,1\nb,1\na,2\n")
    refused = run("import", tmp_path / "s", tmp_path / "f.csv", "--create", code=2)
    assert "came twice; remove one row of it, or pass --duplicates last" in refused.stderr
    run("import", tmp_path / "s", tmp_path / "f.csv", "--duplicates", "last")
    assert run("get", tmp_path / "s", "a").stdout == "2\n"


def test_only_the_columns_that_are_named_are_read_of_a_csv_file(run: Run, tmp_path: Path) -> None:
    """Of the others no type is guessed, which a later row would not have."""
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
    run("import", tmp_path / "s", tmp_path / "v.parquet")
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


# -- backup -----------------------------------------------------------------------------------


def test_backups_are_run_listed_verified_and_restored(run: Run, tmp_path: Path) -> None:
    store, place = tmp_path / "s", tmp_path / "b"
    first = run("put", store, "a", "1", "--create").stdout.strip()
    info = told(run("backup", "run", store, place, "--json"))
    assert (info["rows"], info["lower"]) == (1, "1970-01-01T00:00:00.000000000Z")
    run("put", store, "a", "2")
    assert told(run("backup", "run", store, place, "--json", "--token", "t"))["rows"] == 1
    again = told(run("backup", "run", store, place, "--json", "--token", "t"))
    listed = [
        json.loads(line)
        for line in run("backup", "list", place, "--json").stdout.split("\n")
        if line
    ]
    assert len(listed) == 2
    assert listed[1]["upper"] == again["upper"]
    shown = told(run("backup", "show", place, "--json"))
    assert (shown["batches"], shown["spans"]) == (2, [{"start": "a", "end": "a\0"}])
    assert "spans" in run("backup", "show", place).stdout
    assert "[61, 6100)" in run("backup", "show", place, "-e", "hex").stdout
    assert "rows" in run("backup", "list", place).stdout
    assert told(run("backup", "verify", place, "--json"))["ok"] is True
    run("backup", "verify", place, "--depth", "contents", "--store", store)
    run("backup", "restore", place, tmp_path / "then", "--as-of", first)
    assert run("get", tmp_path / "then", "a").stdout == "1\n"
    merged = told(run("backup", "compact", place, "--json"))
    assert (merged["rows"], merged["upper"]) == (2, again["upper"])
    run("backup", "restore", place, tmp_path / "now", "--state-only")
    assert run("history", tmp_path / "now", "a").stdout.count("\n") == 1
    run("backup", "restore", place, tmp_path / "now", code=2)
    run("delete", store, "a")
    run("backup", "restore", place, store, "--into", "--prefix", "a")
    assert run("get", store, "a").stdout == "2\n"
    run("backup", "expire", place, "--keep", "4w")
    run("backup", "expire", place, code=2)
    run("backup", "restore", place, tmp_path / "x", "--as-of", "2100-01-01T00:00Z", code=4)


def test_changes_of_a_restored_store_are_those_of_its_source(run: Run, tmp_path: Path) -> None:
    store, place, restored = tmp_path / "s", tmp_path / "b", tmp_path / "r"
    with kvstore.open(store) as opened:
        opened.put(b"a", b"1")
        with opened.batch() as batch:
            batch.put(b"b", b"\xff")
            batch.put(b"c", b"3")
        opened.delete_range(b"b", b"c")
        opened.delete(b"a")
    run("backup", "run", store, place)
    run("backup", "restore", place, restored)
    run("put", restored, "d", "4")

    def told_of(path: Path, *options: object) -> list[dict[str, Any]]:
        lines = run("changes", path, *options).stdout.splitlines()
        places = ("changeset", "stream", "end_of_batch")
        return [{k: v for k, v in json.loads(x).items() if k not in places} for x in lines]

    source = told_of(store)
    assert told_of(restored)[:-1] == source
    assert told_of(restored)[-1]["key"] == "d"
    assert told_of(restored, "--since", source[0]["timestamp"])[:-1] == source[1:]
    assert [change["key"] for change in told_of(restored, "--prefix", "c")] == ["c"]
    assert "value" not in told_of(restored, "--images", "none")[0]
    run("changes", restored, "--images", "pre", code=4)  # needs the index


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["show"],
        ["verify"],
        ["verify", "--depth", "files"],
        ["compact"],
        ["expire", "--keep", "1d"],
    ],
)
def test_a_collection_that_is_not_there_is_no_success(
    run: Run, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *options = words
    monkeypatch.setenv("KVSTORE_PASSPHRASE", "secret")
    failed = run("backup", command, tmp_path / "mistyped", *options, code=2)
    assert "holds no backup; check the path" in failed.stderr
    assert list(tmp_path.glob("mistyped*")) == []


def test_what_an_interrupted_backup_left_is_listed_and_deleted(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    run("backup", "run", tmp_path / "s", tmp_path / "b")
    (part,) = tmp_path.glob("b/blob/*/part/*.parquet")
    orphan = part.with_name("00000000000000000001-00000000000000ff.parquet")
    orphan.write_bytes(b"half")
    temporary = part.with_name(".tmp-1")
    temporary.write_bytes(b"less")
    os.utime(temporary, (1, 1))
    found = told(run("backup", "scrub", tmp_path / "b", "--json"))
    assert found == {
        "missing": [],
        "orphans": [str(orphan.relative_to(tmp_path / "b" / "blob"))],
        "deleted": [],
    }
    assert orphan.name in run("backup", "scrub", tmp_path / "b", "--delete", "7d").stdout
    assert [path.name for path in part.parent.iterdir()] == [part.name]
    part.unlink()
    assert part.name in run("backup", "scrub", tmp_path / "b", code=1).stdout


def test_a_token_that_is_empty_is_refused(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    run("backup", "run", tmp_path / "s", tmp_path / "b")
    run("backup", "run", tmp_path / "s", tmp_path / "b", "--token", "", code=2)


def test_a_damaged_collection_is_told_by_exit_code_1(run: Run, tmp_path: Path) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    run("backup", "run", tmp_path / "s", tmp_path / "b")
    (part,) = (tmp_path / "b").rglob("*.parquet")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    run("backup", "verify", tmp_path / "b", "--depth", "files")
    assert "checksum" in run("backup", "verify", tmp_path / "b", code=1).stderr
    for_programs = told(run("backup", "verify", tmp_path / "b", "--json", code=1))
    assert not for_programs["ok"]
    assert "checksum" in for_programs["problem"]
    nothing = run("backup", "verify", tmp_path / "misspelt", code=2)
    assert "misspelt holds no backup" in nothing.stderr


def test_encrypted_collections_take_the_passphrase_from_the_environment(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    monkeypatch.setenv(backup.cli.PASSPHRASE, "open sesame")
    run("backup", "run", tmp_path / "s", tmp_path / "b")
    run("backup", "verify", tmp_path / "b")
    monkeypatch.setenv(backup.cli.PASSPHRASE, "open barley")
    refused = run("backup", "list", tmp_path / "b", code=2)
    assert "Traceback" not in refused.output
    monkeypatch.delenv(backup.cli.PASSPHRASE)
    run("backup", "list", tmp_path / "b", code=2)


def test_a_standby_is_brought_up_from_a_store_or_a_collection_and_promoted(
    run: Run, tmp_path: Path
) -> None:
    store, standby = tmp_path / "s", tmp_path / "standby"
    run("put", store, "a", "1", "--create")
    run("backup", "replicate", store, standby)
    run("put", store, "a", "2")
    run("backup", "run", store, tmp_path / "b")
    told(run("backup", "replicate", tmp_path / "b", standby, "--json"))
    assert run("get", standby, "a").stdout == "2\n"
    assert run("history", standby, "a").stdout == run("history", store, "a").stdout
    run("put", standby, "a", "3", code=2)
    promoted = told(run("backup", "promote", standby, "--json"))
    assert promoted["upper"] <= run("put", standby, "a", "3").stdout
    run("backup", "replicate", store, standby, code=2)


def test_a_follower_copies_as_backups_come_and_ends_in_order_when_told(
    run: Run, installed: Path, tmp_path: Path
) -> None:
    store, standby, place = (str(tmp_path / name) for name in ("s", "standby", "b"))
    run("put", store, "a", "1", "--create")
    run("backup", "run", store, place)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    command = [sys.executable, "-m", "kvstore.cli", "backup", "replicate"]
    with subprocess.Popen(
        [*command, place, standby, "--follow", "--json"], env=environment, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        never = threading.Timer(60, child.kill)
        never.start()
        first = json.loads(child.stdout.readline())["upper"]
        run("put", store, "a", "2")
        upper = told(run("backup", "run", store, place, "--json"))["upper"]
        moved = json.loads(child.stdout.readline())["upper"]
        child.terminate()
        never.cancel()
        assert child.stdout.read() == b""
    assert first < upper == moved
    assert child.returncode == 0
    with kvstore.open_read_only(standby) as copy:
        assert copy.get(b"a") == b"2"


def test_a_backup_counts_on_a_terminal_and_is_quiet_with_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("put", tmp_path / "s", "a", "1", "--create")
    monkeypatch.setenv("FORCE_COLOR", "1")  # then rich takes stderr for a terminal
    monkeypatch.setenv("COLUMNS", "300")
    assert "1 rows" in run("backup", "run", tmp_path / "s", tmp_path / "b").stderr
    run("backup", "run", tmp_path / "s", odd := tmp_path / "[" / "x]")  # no markup of the console's
    assert "[/x]: 1 rows" in run("backup", "verify", odd).stderr
    assert run("backup", "run", tmp_path / "s", tmp_path / "c", "--json").stderr == ""
    monkeypatch.delenv("FORCE_COLOR")
    assert run("backup", "run", tmp_path / "s", tmp_path / "d").stderr == ""
