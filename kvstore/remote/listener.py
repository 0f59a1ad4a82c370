"""The thread that answers on the control socket of one open store.

Invariants
1. The socket is there only while the store is open: it is made behind the opening, and removed
   before the store gives up its lock.
2. A forked child closes its copies of the socket and of all connections. So a caller of a process
   that was killed sees the end, although a child lives on.
3. The thread is the only cost: nothing of the store asks whether somebody listens.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import Any

from uvicorn import Config

from kvstore.base.forks import own, undivided
from kvstore.limits import (
    CONTROL_END_S,
    SERVER_IDLE_S_MAX,
)
from kvstore.remote import control_socket
from kvstore.remote.server.app import App, app
from kvstore.remote.server.guarded import GuardedProtocol, GuardedServer
from kvstore.store import Store


class ListeningStore(Store):
    """A store that answers scripts, from `listen` until it is closed."""

    _listener: Listener | None = None

    def listen(self) -> None:
        """Answer on the control socket from now on."""
        self._listener = Listener(self)

    def close(self) -> None:
        """End the listening, then the store; see `Store.close`."""
        if self._listener is not None:
            self._listener.close()
        super().close()


class Listener:
    """Answers on the control socket until it is closed."""

    def __init__(self, store: Store) -> None:
        assert store.path is not None
        self._path = store.path
        self._app: App = app(store)
        config = Config(
            self._app,
            http=GuardedProtocol,
            ws="none",
            loop="asyncio",  # uvloop has handlers of its own for forks
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(SERVER_IDLE_S_MAX),
            timeout_graceful_shutdown=int(CONTROL_END_S),
        )
        config.load()
        self._server = GuardedServer(config)
        with undivided():
            self._socket = control_socket.listen(self._path)
            own(self, f"the control socket of {self._path}")
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [self._socket]},
            name="kvstore-control",
            daemon=True,
        )
        self._thread.start()

    def fork_let_go(self) -> None:
        """Close the copies of the parent's sockets, in a forked child. See `forks.LetsGo`."""
        connections: set[Any] = self._server.server_state.connections
        for each in [self._socket, *filter(None, map(_socket_of, connections))]:
            with suppress(OSError):
                os.close(each.fileno())

    def close(self) -> None:
        """Take the socket away, end the calls under way, and end the thread. Repeatable."""
        control_socket.remove(self._path)
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self._app.close()


def _socket_of(connection: Any) -> socket.socket | None:
    transport = getattr(connection, "transport", None)
    found: socket.socket | None = transport and transport.get_extra_info("socket")
    return found
