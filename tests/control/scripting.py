"""Scripts beside an owner: backups, imports and garbage collection, one after the other, until they
are killed.

A script reports each turn when it begins and when it is done. If its owner ends, it waits for the
next owner.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.bulk.loading import stored_batches
from kvstore.bulk.manifest import EncodedBy
from kvstore.errors import KVStoreError

ROWS = 40
"""Rows of each import, and as many rows of a table."""

TURNS = ("backup", "import", "gc", "backup", "import")


def imported(number: int) -> dict[bytes, bytes]:
    """The rows of an import."""
    return {b"import/%04d/%02d" % (number, row): b"%d" % number for row in range(ROWS)}


def typed(number: int) -> list[dict[str, Any]]:
    """The rows of a table that the same import has."""
    return [{"id": number * ROWS + row, "mail": f"{number}-{row}"} for row in range(ROWS)]


def users(store: Any) -> kvstore.Table:
    """The table of these rows, in a store or by a client."""
    schema = pa.schema([("id", pa.int64()), ("mail", pa.string())])
    found: kvstore.Table = store.table("users", schema, "id", {"by_mail": kvstore.unique("mail")})
    return found


def staging(place: Path, number: int) -> Path:
    return place / f"staged-{number:04d}"


def stage(client: kvstore.Client, place: Path, number: int) -> Path:
    """The staging directory of an import, built anew unless it was sealed."""
    directory = staging(place, number)
    if not (directory / "import.json").exists():
        shutil.rmtree(directory, ignore_errors=True)
        codec = users(client).codec()
        made = bulk.Import.create(directory)
        with made.writer() as writer:
            for key, value in imported(number).items():
                writer.put(key, value)
        rows = pa.RecordBatch.from_pylist(typed(number), codec.definition.schema)
        for stored in stored_batches(codec, rows):
            with made.writer() as writer:
                writer.write(stored.sort_by("key"))
        made.seal(tables=[EncodedBy.of(codec)])
    return directory


def work(place: Path, seed: int, number: int, pipe: Connection) -> None:
    """Work until killed. Imports are numbered from `number` on."""
    rng = random.Random(seed)
    while True:
        with connected(place / "store") as client:
            try:
                while True:
                    turn = rng.choice(TURNS)
                    pipe.send(("begun", turn, number))
                    pipe.send(("done", turn, number, do(client, place, turn, number)))
                    number += turn == "import"
            except KVStoreError as error:
                pipe.send(("failed", type(error).__name__, str(error)))


def do(client: kvstore.Client, place: Path, turn: str, number: int) -> int:
    """Do one turn; returns a time from its result."""
    if turn == "backup":
        return int(Collection(place / "collection").backup(client).upper)
    if turn == "import":
        return int(bulk.ingest(client, stage(client, place, number)))
    return int(client.gc(keep=timedelta(0)).since)


@contextmanager
def connected(path: Path) -> Iterator[kvstore.Client]:
    """A client, once an owner listens."""
    while True:
        try:
            client = kvstore.connect(path, timeout=120)
        except KVStoreError:
            time.sleep(0.01)  # nothing announces the next owner
            continue
        with client:
            yield client
        return


class Script:
    """A process that works beside the owner."""

    def __init__(self, spawn: Any, place: Path, seed: int, number: int) -> None:
        self._pipe, theirs = spawn.Pipe(duplex=False)
        self.process = spawn.Process(target=work, args=(place, seed, number, theirs))
        self.process.start()
        theirs.close()

    def told(self, timeout: float) -> Iterator[tuple[Any, ...]]:
        """The messages until none comes for `timeout` seconds, or until the script ends."""
        try:
            while self._pipe.poll(timeout):
                yield self._pipe.recv()
        except (EOFError, OSError):
            return

    def wait(self, kind: str) -> list[tuple[Any, ...]]:
        """Its messages up to the first message of this kind."""
        found = [self._pipe.recv()]
        while found[-1][0] != kind:
            found.append(self._pipe.recv())
        return found

    def kill(self) -> list[tuple[Any, ...]]:
        """Kill it; returns its remaining messages."""
        self.process.kill()
        self.process.join()
        return list(self.told(0))
