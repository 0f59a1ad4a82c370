"""Commands beside a service that has the store open: the service does the writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from tests.cli.installed import Run, told
from tests.control.owners import owning
from tests.harness.bounds import bounds

pytestmark = pytest.mark.usefixtures("each_engine")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", control=True) as store:
        store.put(b"AA1", b"on time")
        yield store


def test_commands_that_write(service: kvstore.Store, run: Run, tmp_path: Path) -> None:
    run("put", service.path, "AA2", "late")
    assert service.get(b"AA2") == b"late"
    run("delete", service.path, "AA2")
    assert service.get(b"AA2") is None
    (tmp_path / "rows.csv").write_text("key,value\nBB1,early\n")
    assert told(run("import", service.path, tmp_path / "rows.csv", "--json"))["rows"] == 1
    assert service.get(b"BB1") == b"early"
    made = bulk.Import.create(tmp_path / "staged")
    with made.writer() as writer:
        writer.put(b"CC1", b"gone")
    made.seal()
    run("import", service.path, tmp_path / "staged", "--move")
    assert service.get(b"CC1") == b"gone"
    run("import", service.path, tmp_path / "rows.csv", "--on-conflict", "error", code=2)
    run("revert", service.path, f"{made.import_id:016x}")
    assert service.get(b"CC1") is None
    run("revert", service.path, "no-id", code=2)
    run("revert", service.path, "17", code=2)


def test_commands_of_tables(service: kvstore.Store, run: Run, tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    users = service.table("users", schema, "id", {"by_name": kvstore.unique("name")})
    users.put({"id": 1, "name": "Ann"})
    assert told(run("table", "scan", service.path, "users", "--json")) == {"id": 1, "name": "Ann"}
    assert told(run("export", service.path, "users", tmp_path / "u.parquet", "--json"))["rows"] == 1
    (tmp_path / "u.csv").write_text("id,name\n2,Bo\n")
    assert told(run("table", "import", service.path, "users", tmp_path / "u.csv", "--json"))["rows"]
    assert list(users.find("by_name", "Bo")) == [{"id": 2, "name": "Bo"}]
    (tmp_path / "u.csv").write_text("id,name\n3,Bo\n4,Cy\n")
    refused = run("table", "import", service.path, "users", tmp_path / "u.csv", code=2)
    assert "name='Bo' is taken by the row id=2" in refused.stderr
    assert (users.get(4), len(service.imports.all())) == (None, 1)
    refused = run("table", "alter", service.path, "users", "--drop", "id", code=2)
    assert "'id' is in the key" in refused.stderr


def test_tables_are_altered_and_indexed_by_another_process(
    spawn: Any, tmp_path: Path, each_engine: str
) -> None:
    path = tmp_path / "owned"
    with kvstore.open(path) as store:
        users = store.table("users", pa.schema([("id", pa.int64()), ("name", pa.string())]), "id")
        users.put_batch([{"id": number, "name": f"n{number % 3}"} for number in range(9)])

    def shell(*words: str, code: int = 0) -> Any:
        command = [sys.executable, "-m", "kvstore.cli", "table", words[0], str(path), "users"]
        done = subprocess.run([*command, *words[1:]], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stderr if code else [json.loads(line) for line in done.stdout.splitlines()]

    with owning(spawn, path, each_engine):
        adding = ("--add", "age:int64=7", "--add-index", "by_name=name")
        [facts] = shell("alter", *adding, "--json")
        assert [column["name"] for column in facts["columns"]] == ["id", "name", "age"]
        assert [index["whole"] for index in facts["indexes"]] == [True]
        found = shell("find", "by_name", "n1", "--json")
        assert [(row["id"], row["age"]) for row in found] == [(1, 7), (4, 7), (7, 7)]
        refused = shell("alter", "--unique-index", "one=name", code=2)
        assert "index 'one': name='n0' is taken by the row id=0" in refused
        assert "no index 'one'" in shell("build", "one", code=2)
        shell("alter", "--drop", "age", "--json")
        assert "no column 'gone'" in shell("alter", "--add-index", "x=gone", code=2)
    with kvstore.open(path) as store:
        assert store.table("users").schema.names == ["id", "name"]
        assert [*store.table("users").indexes] == ["by_name"]


def test_commands_of_upkeep(service: kvstore.Store, run: Run) -> None:
    service.put(b"AA1", b"late")
    service.hold("abandoned")
    dropped = told(run("holds", "drop", service.path, "abandoned", "--json"))
    assert dropped["name"] == "abandoned"
    report = told(run("gc", service.path, "--keep", "0s", "--json"))
    assert report["versions"] == 1
    assert len(service.history(b"AA1")) == 1
    assert told(run("verify", service.path, "--json"))["ok"]


def test_commands_that_copy(service: kvstore.Store, run: Run, tmp_path: Path) -> None:
    run("checkpoint", service.path, tmp_path / "copy")
    run("checkpoint", service.path, tmp_path / "copy", code=2)
    with kvstore.open_read_only(tmp_path / "copy") as copy:
        assert dict(copy.scan()) == dict(service.scan())


def test_a_replica_is_promoted_by_the_process_that_opens_it(
    service: kvstore.Store, run: Run, tmp_path: Path
) -> None:
    run("backup", "replicate", service.path, tmp_path / "standby")
    with kvstore.open(tmp_path / "standby", control=True):
        assert "held by" in run("backup", "promote", tmp_path / "standby", code=3).output
    run("backup", "promote", tmp_path / "standby")


def test_a_service_is_not_served_twice(service: kvstore.Store, run: Run, tmp_path: Path) -> None:
    run("serve", service.path, "--listen", tmp_path / "socket", code=3)


def test_commands_of_backups(service: kvstore.Store, run: Run, tmp_path: Path) -> None:
    collection, standby = tmp_path / "collection", tmp_path / "standby"
    assert told(run("backup", "run", service.path, collection, "--json"))["rows"] == 1
    service.put(b"AA1", b"late")
    assert told(run("backup", "run", service.path, collection, "--json"))["rows"] == 1
    run("backup", "verify", collection, "--depth", "contents", "--store", service.path)
    run("backup", "replicate", service.path, standby)
    with kvstore.open_read_only(standby) as copy:
        assert dict(copy.scan()) == dict(service.scan())
    service.delete(b"AA1")
    run("backup", "restore", collection, service.path, "--into")
    assert service.get(b"AA1") == b"late"


def test_a_service_that_does_not_listen_is_named(tmp_path: Path, run: Run) -> None:
    with (
        bounds({"CONTROL_TRY_S": 0.0}),
        kvstore.open(tmp_path / "store"),
    ):
        for words in (
            ("put", tmp_path / "store", "k", "v"),
            ("backup", "run", tmp_path / "store", tmp_path / "collection"),
        ):
            assert "control=True" in run(*words, code=3).output
