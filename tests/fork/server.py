"""A server that forks its workers before they are needed: `python -m tests.fork.server PLACE`.

The master opens a store and writes to it all the time; workers inherit the socket and the handle.
Each connection is one request, a line, answered by a line. Prints the port, then, once it is told
to end (SIGTERM), how its workers ended.

    inherited KEY   by the master's handle: the name of the error
    read KEY        by a handle that the worker has opened to read
    keep KEY        puts KEY into a store of the worker's own, in memory with a journal: its rows
    write           opens a RocksDB store of the worker's own: the name of the error, or "ok"
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import kvstore
from kvstore.errors import KVStoreError
from kvstore.store import Store
from tests.harness.forks import reap

WORKERS = 3


def main() -> None:
    place = Path(sys.argv[1])
    listener = socket.create_server(("127.0.0.1", 0))
    with kvstore.open(place / "store", durability="sync") as store:
        store.put(b"k", b"v")
        threading.Thread(target=load, args=(store,), daemon=True).start()
        workers = [fork_worker(place, number, listener, store) for number in range(WORKERS)]
        print(listener.getsockname()[1], flush=True)
        signal.sigwait({signal.SIGTERM})
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        print([reap(worker) for worker in workers], flush=True)


def load(store: Store) -> None:
    """Write until the store is closed."""
    number = 0
    while True:
        try:
            store.put(b"row %d" % number, bytes(1000))
        except KVStoreError:
            return
        number += 1


def fork_worker(place: Path, number: int, listener: socket.socket, store: Store) -> int:
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        with kvstore.open(place / f"own-{number}", engine="memory") as own:
            while True:
                serve(listener, Answers(place, store, own))
    return worker


def serve(listener: socket.socket, answers: Answers) -> None:
    connection, _ = listener.accept()
    with connection, connection.makefile("rw") as lines:
        name, *arguments = lines.readline().split()
        answer: Callable[..., object] = getattr(answers, name)
        try:
            lines.write(f"{answer(*arguments)}\n")
        except KVStoreError as error:
            lines.write(f"{type(error).__name__}\n")


class Answers:
    """The questions that a worker answers."""

    def __init__(self, place: Path, inherited: Store, own: Store) -> None:
        self._place = place
        self._inherited = inherited
        self._own = own

    def inherited(self, key: str) -> object:
        return self._inherited.get(key.encode())

    def read(self, key: str) -> object:
        with kvstore.open_read_only(self._place / "store") as reader:
            return (reader.get(key.encode()) or b"").decode()

    def keep(self, key: str) -> object:
        self._own.put(key.encode(), b"")
        return len(list(self._own.scan()))

    def write(self) -> object:
        with kvstore.open(self._place / f"other-{os.getpid()}"):
            return "ok"


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
