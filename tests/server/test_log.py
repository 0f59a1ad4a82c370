"""The log of `kvstore serve`: lines of JSON on stderr for its start, recovery, end, requests and
slow operations, without keys."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore.metrics import JsonLines
from kvstore.server import ListenAddress, app, serving
from tests.server.process import ServerProcess

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def lines(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text().splitlines()]


def work(address: str) -> None:
    """Writes and reads of a client, of which some are slow by any measure of 0 s."""
    with kvstore.connect(address) as client:
        client.put(b"secret key", b"secret value")
        assert client.get(b"secret key") == b"secret value"
        table = client.table("secret table", SCHEMA, "id")
        table.put_batch(pa.table({"id": [1, 2], "name": ["a", "b"]}))
        assert client.history(b"secret key")


@pytest.mark.parametrize("readers", [0, 2])
def test_a_server_logs_its_start_recovery_requests_and_end(tmp_path: Path, readers: int) -> None:
    options = ["--readers", str(readers), "--slow", "0"]
    server = ServerProcess(tmp_path / "db", "127.0.0.1:0", *options)
    server.notes = tmp_path / "notes"
    work(server.start())
    server.kill()
    work(server.start())
    assert server.stop() == 0
    told = lines(server.notes)
    own = [each for each in told if each["logger"] in ("kvstore.server", "kvstore.store")]
    events = [each["event"] for each in own if each["event"] != "closed"]
    started = ["starting", "opened", "listening"]
    assert events == [*started, "starting", "recovered", *started[1:], "stopping", "stopped"]
    by_event = {each["event"]: each for each in own}
    assert by_event["listening"]["url"] == server.url
    assert by_event["listening"]["readers"] == readers
    assert by_event["stopping"]["signal"] == "SIGTERM"
    assert by_event["recovered"]["changes"] > 0
    requests = [each for each in told if each["event"] == "request"]
    paths = [each["path"] for each in requests]
    for path in ("/v1/times", "/v1/keys/", "/v1/batch", "/v1/history"):
        assert path in paths
    methods = [each["method"] for each in requests]
    assert (methods.count("PUT"), methods.count("GET")) == (2, 2), "one line, whoever answers"
    assert all(each["status"] == 200 and each["client"] == "127.0.0.1" for each in requests)
    slow = {each["operation"] for each in told if each["event"] == "slow operation"}
    assert {"put of a client", "batch of a client", "history of a client"} <= slow
    assert "secret" not in server.notes.read_text()


def test_a_service_gives_its_own_handler_the_same_lines(tmp_path: Path) -> None:
    logger, handler = logging.getLogger("kvstore"), logging.FileHandler(tmp_path / "notes")
    handler.setFormatter(JsonLines())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with (
            kvstore.open(tmp_path / "db") as store,
            serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        ):
            work(running.url)
        try:
            raise ValueError("a line\nand another")
        except ValueError:
            logger.exception("a failure of %s", b"bytes")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
    told = lines(tmp_path / "notes")
    assert {"opened", "listening", "request", "stopping", "closed"} <= {
        each["event"] for each in told
    }
    assert told[-1]["event"] == "a failure of b'bytes'"
    assert told[-1]["traceback"].endswith("a line\nand another")


def test_a_server_that_logs_nothing_prints_nothing(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "db", "127.0.0.1:0", "--log", "off")
    server.notes = tmp_path / "notes"
    work(server.start())
    assert server.stop() == 0
    assert server.notes.read_text() == ""
