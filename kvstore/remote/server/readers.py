"""Reader processes behind one port: a server's reads scale past the interpreter lock.

    with Readers(app, listener, count=4) as readers: ...

The processes share one listening socket, and each takes connections while it is idle. They hand
writes to the owner of the store, which this process is, through a socket in the store's directory.
`kvstore.remote.server.reader_process` is such a process.

Invariants
1. A process that ended is started again, after a pause that grows with each failure in a row.
2. No process outlives its owner: each has the end of a pipe, and ends when the pipe closes.
3. Secrets of tokens are neither in arguments nor in the environment of a process. It gets digests,
   through its pipe.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any, Final

from kvstore.base.background import Failures
from kvstore.base.clock import Clock
from kvstore.base.forks import own, undivided
from kvstore.errors import Argument, StorageError, UsageError
from kvstore.limits import (
    SERVER_READER_GRACE_S,
    SERVER_READER_PAUSE_S,
    SERVER_READER_PAUSE_S_MAX,
    SERVER_READER_START_S,
    SERVER_READERS_MAX,
    SERVER_REQUEST_S_MAX,
)
from kvstore.opening import engine_at
from kvstore.remote import control_socket
from kvstore.remote.server import log_lines
from kvstore.remote.server.app import App

_MAIN: Final = "from kvstore.remote.server.reader_process import main; main()"


class ReaderProcess:
    """One reader process, seen from its owner."""

    def __init__(self, orders: dict[str, Any]) -> None:
        """Start it. It finds our imports, also from a path that the caller has added."""
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        with undivided():  # a copy of our end of the pipe in a fork would keep it alive
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(orders["listener"],),
                start_new_session=True,  # the owner handles an interrupt, and ends it
            )
            own(self, "a reader process of a server", endings=("kill",))
        self.pid = self._process.pid
        with suppress(BrokenPipeError):
            self._orders.write(json.dumps(orders).encode() + b"\n")
            self._orders.flush()

    @property
    def _orders(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def fork_let_go(self) -> None:
        """Close the copy of our end of the pipe in a forked child."""
        os.close(self._orders.fileno())

    def wait_ready(self) -> None:
        """Return once it answers. Raises `StorageError` if it does not."""
        heard = self._process.stdout
        assert heard is not None
        ready = select.poll()
        ready.register(heard, select.POLLIN)
        with heard:
            if not ready.poll(SERVER_READER_START_S * 1000) or not heard.readline():
                self.kill()
                raise StorageError(
                    f"reader process {self.pid} ended with {self.wait()} before it was ready",
                    "see its message on stderr",
                )

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()

    def stop(self) -> None:
        """Have it answer the requests under way, and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def reap(self, timeout: float) -> None:
        """Wait for its end, and end it at once after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._orders.close()


class Readers:
    """The reader processes of one server. A context manager, which starts and ends them."""

    def __init__(
        self,
        app: App,
        listener: socket.socket,
        *,
        count: int,
        tls_files: tuple[str, str] | None = None,
    ) -> None:
        """`listener` is the socket that callers reach, `tls_files` the certificate and its key.
        Raises `UsageError` for a store that processes cannot follow."""
        if not 1 <= count <= SERVER_READERS_MAX:
            raise UsageError(Argument("readers", str(count)), f"pass 0 to {SERVER_READERS_MAX}")
        store = app.service.store
        if store.path is None or engine_at(store.path) != "rocksdb":
            raise UsageError("readers of a store in memory", "serve a store of the engine rocksdb")
        self._path = store.path.absolute()
        self._name = f"{control_socket.HELPERS_PREFIX}{secrets.token_hex(4)}"
        self.count = count
        tokens = app.tokens
        self._orders = {
            "store": str(self._path),
            "owner": self._name,
            "listener": listener.fileno(),
            "tokens": None if tokens is None else tokens.to_fields(),
            "tls": tls_files,
            "log": log_lines.begun(),
        }
        self._failures = Failures("kvstore.remote.server", Clock())
        store.upkeep.watch("server", self._failures)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._processes: list[ReaderProcess] = []
        self._threads: list[threading.Thread] = []
        with undivided():
            self.socket = control_socket.listen(self._path, self._name)
            """Where the readers reach the owner."""
            own(self, f"the reader processes of {self._path}", endings=("stop",))

    def __enter__(self) -> Readers:
        """Start the processes, and return once all of them answer. Raises `StorageError` if one
        does not begin: it has said why on stderr."""
        try:
            self._processes += (ReaderProcess(self._orders) for _ in range(self.count))
            for process in self._processes:
                process.wait_ready()
        except BaseException:
            self.stop()
            raise
        for place in range(self.count):
            thread = threading.Thread(
                target=self._watch, args=(place,), name="kvstore-reader", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def fork_let_go(self) -> None:
        """Close the copy of the socket in a forked child."""
        os.close(self.socket.fileno())

    def stop(self) -> None:
        """End the processes behind the requests under way. Repeatable."""
        with self._lock:
            self._stopping.set()
        for process in self._processes:
            process.stop()
        for process in self._processes:
            process.reap(SERVER_REQUEST_S_MAX + SERVER_READER_GRACE_S)
        for thread in self._threads:
            thread.join()
        control_socket.remove(self._path, self._name)
        self.socket.close()

    def _watch(self, place: int) -> None:
        """Start the process of a place again, each time that it has ended."""
        while True:
            process = self._processes[place]
            code = process.wait()
            if self._stopping.is_set():
                return
            told = StorageError(f"it ended with {code}", "it is started again")
            self._failures.note(f"reader process {process.pid}", told)
            pause_s = self._failures.delay_s(SERVER_READER_PAUSE_S, SERVER_READER_PAUSE_S_MAX)
            if self._stopping.wait(pause_s):
                return
            with self._lock:
                if self._stopping.is_set():
                    return
                process.reap(0)
                self._processes[place] = process = ReaderProcess(self._orders)
            with suppress(StorageError):  # noted in the next turn
                process.wait_ready()
                self._failures.succeeded()
