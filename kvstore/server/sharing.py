"""A server that accepts at a socket which other processes share.

It takes one connection at a time. asyncio's own servers take all waiting connections, so one of
several idle processes would get them all. This module needs the extra `server`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn import Config

from kvstore.limits import SERVER_ACCEPT_PAUSE_S
from kvstore.server.guarded import GuardedProtocol, GuardedServer


class SharingServer(GuardedServer):
    """A server of one of the processes that share `listener`."""

    def __init__(
        self, config: Config, listener: socket.socket, *, ready: Callable[[], None]
    ) -> None:
        super().__init__(config, ready=ready, ending=None)
        listener.setblocking(False)
        self._listener = listener
        self._handshakes: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        await super().startup(sockets)

    async def shutdown(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        await super().shutdown(sockets)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # another process has taken it
            return
        except OSError:  # no descriptor is free
            loop.remove_reader(self._listener)
            loop.call_later(SERVER_ACCEPT_PAUSE_S, self._accept_again)
            return
        connection.setblocking(False)
        task = loop.create_task(self._begin(connection))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _accept_again(self) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def _begin(self, connection: socket.socket) -> None:
        config = self.config
        with suppress(OSError, asyncio.TimeoutError):  # a handshake that fails is the caller's
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: GuardedProtocol(
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                ),
                connection,
                ssl=config.ssl,
            )
            return
        connection.close()
