"""A server that is killed right behind a request: what it has done is done, and its answer is kept
from the client. A relay between the two sees to it."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore
from kvstore.remote.control_socket import CONTROL_DIRECTORY, SOCKET_NAME
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app

_ANY_PORT = ("127.0.0.1", 0)


def own(path: Path, pipe: Connection) -> None:
    """Serve a store at its control socket and at a port, until told to end."""
    with (
        kvstore.open(path, control=True) as store,
        serving(app(store), ListenAddress(*_ANY_PORT)) as running,
    ):
        pipe.send(running.address.port)
        with suppress(EOFError):
            pipe.recv()


class Served:
    """A process that serves a store. The client reaches it through relays."""

    def __init__(self, spawn: Any, path: Path) -> None:
        self._spawn, self._path = spawn, path
        self.url = ""
        self._cut_at = b""
        self._near: list[socket.socket] = []
        self.start()

    def start(self) -> None:
        """Start it, again at the same addresses."""
        pipe, theirs = self._spawn.Pipe()
        self._process = self._spawn.Process(target=own, args=(self._path, theirs))
        self._process.start()
        theirs.close()
        self._pipe, self.hit = pipe, threading.Event()
        """Set once the process was killed by `cut_at`."""
        port = int(pipe.recv())
        place = self._path / CONTROL_DIRECTORY
        (place / SOCKET_NAME).rename(place / "readers-relayed")
        by_path = socket.socket(socket.AF_UNIX)
        by_path.bind(str(place / SOCKET_NAME))
        by_port = socket.create_server(("127.0.0.1", int(self.url.rpartition(":")[2] or 0)))
        self.url = f"http://127.0.0.1:{by_port.getsockname()[1]}"
        self._listeners = [by_path, by_port]

        def at_path() -> socket.socket:
            dialled = socket.socket(socket.AF_UNIX)
            dialled.connect(str(place / "readers-relayed"))
            return dialled

        def at_port() -> socket.socket:
            return socket.create_connection(("127.0.0.1", port))

        for listener, dial in ((by_path, at_path), (by_port, at_port)):
            listener.listen(64)
            _thread(self._accept, listener, dial)

    def cut_at(self, request: bytes) -> None:
        """Kill the process when it answers the next request that has these bytes in it."""
        self._cut_at = request

    def kill(self) -> None:
        """Kill the process, and then end all connections."""
        self._process.kill()
        self._process.join()
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # closing it would not end `accept`
            listener.close()
        for near in self._near:
            with suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
        self._near = []
        self._pipe.close()

    def stop(self) -> None:
        """Have the process close its store, and end."""
        self._pipe.send("end")
        self._process.join()
        assert self._process.exitcode == 0
        self.kill()

    def _accept(self, listener: socket.socket, dial: Callable[[], socket.socket]) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                self._near.append(near)
                _thread(self._relay, near, dial)

    def _relay(self, near: socket.socket, dial: Callable[[], socket.socket]) -> None:
        is_meant = False
        with near, suppress(OSError), dial() as far:
            while True:
                for each in select.select([near, far], [], [])[0]:
                    data = each.recv(1 << 20)
                    if not data:
                        return
                    if each is near:
                        is_meant |= bool(self._cut_at) and self._cut_at in data
                        far.sendall(data)
                    elif is_meant:
                        self._cut_at = b""
                        self.kill()
                        self.hit.set()
                        return
                    else:
                        near.sendall(data)


@contextmanager
def served(spawn: Any, path: Path) -> Iterator[Served]:
    """A process that serves the store at `path`, until the block ends."""
    with ExitStack() as stack:
        running = Served(spawn, path)
        stack.callback(running.kill)
        yield running


def _thread(run: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=run, args=args, daemon=True).start()
