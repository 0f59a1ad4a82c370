"""A server that is killed while it adds rows of a table, and is started again: a reader finds all
rows of a load or none, with their index entries, and the load is done once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.served import import_verbs
from kvstore.errors import IndeterminateError
from kvstore.remote.client import connect
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from tests.bulk.test_table_loads import INDEXES, SCHEMA, state_of
from tests.harness.seeds import seeded

pytestmark = pytest.mark.on_disk

SEED = "KVSTORE_KILLS_SEED"
ROWS = 300
PATIENCE_S = 60
"""Far more than a server takes to start."""


def serve(place: Path, said: Connection) -> None:
    """Serve the store until it is killed."""
    verbs = import_verbs([str(place / "staging")])
    address = ListenAddress(path=str(place / "socket"))
    with kvstore.open(place / "store") as store, serving(app(store, verbs=verbs), address) as run:
        said.send(run.url)
        with suppress(EOFError):
            said.recv()


class Server:
    """A process that serves the store."""

    def __init__(self, spawn: Any, place: Path) -> None:
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(place, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.url: str = self._pipe.recv()

    def kill(self) -> None:
        """End it by SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def wanted(night: int) -> dict[int, dict[str, Any]]:
    """The rows of the table after a load, each of which differs from those of all other loads."""
    return {n: {"id": n, "mail": f"{night}/{n}", "zone": f"z{n % 3}"} for n in range(ROWS)}


def rows_of(night: int) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        rows = list(wanted(night).values())
        for first in range(0, ROWS, 100):
            yield pa.RecordBatch.from_pylist(rows[first : first + 100], SCHEMA)

    return pa.RecordBatchReader.from_batches(SCHEMA, batches())


class Job(threading.Thread):
    """A load by URL that runs again, under one id, until it knows that it was done."""

    def __init__(self, url: str, night: int) -> None:
        super().__init__(daemon=True)
        self._url, self._night = url, night
        self.stamp: kvstore.Timestamp | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while self.stamp is None:
                with (
                    suppress(IndeterminateError),
                    connect(self._url, patience=PATIENCE_S) as client,
                ):
                    table = client.table("users")
                    rows, known = rows_of(self._night), self._night
                    self.stamp = bulk.import_table(table, rows, import_id=known)
        except BaseException as error:  # noqa: BLE001  # the test raises it
            self.error = error


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_a_load_by_url_is_done_once_whatever_moment_its_server_is_killed_at(
    spawn: Any, tmp_path: Path, kills: int
) -> None:
    pick, staging, hits = seeded(SEED), tmp_path / "staging", 0
    staging.mkdir()
    with kvstore.open(tmp_path / "store") as store:
        store.table("users", SCHEMA, "id", INDEXES).put_batch(list(wanted(0).values()))
    server = Server(spawn, tmp_path)
    stamps: dict[int, int] = {}
    for night in range(1, kills + 1):
        job = Job(server.url, night)
        job.start()
        sealed = (each for each in iter(lambda: [*staging.glob("*/import.json")], None))
        while not next(sealed) and job.is_alive():
            pass  # the server is asked next
        time.sleep(pick.random() * 0.03)  # the moment of the kill is the subject
        hits += job.stamp is None
        server.kill()
        with kvstore.open(tmp_path / "store") as store:
            found = state_of(store)
            assert found in (wanted(night - 1), wanted(night))
            assert found == wanted(night) or job.stamp is None
            store.verify().require_ok()
        server = Server(spawn, tmp_path)
        job.join()
        if job.error is not None:
            raise job.error
        assert job.stamp is not None
        stamps[night] = int(job.stamp)
        with connect(server.url) as client:
            again = bulk.import_table(client.table("users"), rows_of(0), import_id=night)
        assert again == stamps[night]
    server.kill()
    with kvstore.open(tmp_path / "store") as store:
        assert state_of(store) == wanted(kills)
        added = {each.import_id: each.added for each in store.imports.all()}
        assert added == stamps
        assert [int(each.timestamp) for each in store.table("users").history(7)][:-1] == [
            stamps[night] for night in range(kills, 0, -1)
        ]
    assert not list(staging.iterdir())
    assert not list((tmp_path / "store" / "ingest").iterdir())
    assert hits, "no kill came in the middle of a load"
