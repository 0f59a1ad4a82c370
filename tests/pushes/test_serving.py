"""`kvstore serve --pull`: the process that serves a store takes pushes too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.errors import UsageError
from kvstore.remote.client import connect
from kvstore.remote.control import as_store
from tests.server.process import ServerProcess

SCHEMA = pa.schema([("id", pa.int64()), ("mail", pa.string())])
FAILURES = "kvstore_background_failures_total"
WAIT_S = 120


def push(pushes: bulk.Pushes, table: kvstore.Table, *mails: str) -> bulk.Push:
    with pushes.begin(table=table) as building:
        building.add(pa.table({"id": range(len(mails)), "mail": mails}, schema=SCHEMA))
        return building.seal()


def told_of_pushes(notes: Path) -> list[dict[str, Any]]:
    """The lines of a server's log that tell of pushes."""
    lines = map(json.loads, notes.read_text().splitlines())
    return [line for line in lines if line["logger"] == "kvstore.pull"]


def test_a_server_takes_pushes_of_a_table_and_tells_what_becomes_of_them(tmp_path: Path) -> None:
    path, root = tmp_path / "city.db", tmp_path / "pushes"
    pushes = bulk.Pushes(root)
    with kvstore.open(path) as store:
        users = store.table("users", SCHEMA, "id", {"by_mail": kvstore.unique("mail")})
        added = push(pushes, users, "a", "b")
        refused = push(pushes, users, "same", "same")
    pull = ("--pull", str(root), "--name", "eu-1")
    server = ServerProcess(path, str(tmp_path / "socket"), *pull)
    server.notes = tmp_path / "notes"
    try:
        with connect(server.start(), patience=60) as client:
            users = client.table("users")
            pushes.wait(added.number, ["eu-1"], timeout=WAIT_S)
            with pytest.raises(UsageError, match="mail='same' is taken"):
                pushes.wait(refused.number, ["eu-1"], timeout=WAIT_S)
            assert client.metrics()["kvstore_pushes_pending"].values
            behind = push(pushes, users, "c")
            server.kill()  # perhaps in the middle of the push
            server.start()
            pushes.wait(behind.number, ["eu-1"], timeout=WAIT_S)
            assert [row["mail"] for row in users.rows()] == ["c", "b"]
            assert [row["id"] for row in users.find("by_mail", "b")] == [1]
            assert len(users.history(0)) == 2, "each push is added once"
        with (
            connect(path) as client,
            as_store(client) as beside,
            pytest.raises(UsageError, match="kvstore serve --pull"),
        ):
            bulk.pull(beside, root, name="other")
        assert server.stop() == 0
    finally:
        server.kill()
    told = told_of_pushes(tmp_path / "notes")
    following = {"store": str(path), "pushes": str(root), "name": "eu-1"}
    assert any(each["event"] == "following" and following.items() <= each.items() for each in told)
    assert any(each["event"] == "push added" and each["push"] == 1 for each in told)
    assert any(each["event"] == "push refused" and "is taken" in each["error"] for each in told)
    assert not any("traceback" in each for each in told)


def test_a_server_serves_while_the_place_of_pushes_fails_and_counts_the_failures(
    tmp_path: Path,
) -> None:
    (tmp_path / "pushes").mkdir()
    (tmp_path / "pushes" / "root.json").write_text("{")
    pull = ("--pull", str(tmp_path / "pushes"), "--log", "off")
    server = ServerProcess(tmp_path / "city.db", str(tmp_path / "socket"), *pull)
    server.notes = tmp_path / "notes"
    try:
        with connect(server.start(), patience=60) as client:
            client.put(b"a", b"1")
            while not client.metrics()[FAILURES].values["pull",]:
                pass
            assert client.get(b"a") == b"1"
        assert server.stop() == 0
    finally:
        server.kill()
    told = (tmp_path / "notes").read_text().splitlines()
    assert any(line.endswith(" as city") for line in told)
    assert all(line.startswith("kvstore: ") for line in told)
    assert any("failed: " in line for line in told)
