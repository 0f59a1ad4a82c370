"""Connections that a hostile or slow client cannot keep: bounds around uvicorn's HTTP protocol.

uvicorn bounds neither the head of a request nor the time in which it arrives, nor the time in which
an answer is taken. This module needs the extra `server`.

Invariants
1. Bytes that are no body are bounded for each request: line, headers, chunk sizes and trailers.
2. A connection that has not sent a whole head after `SERVER_REQUEST_S_MAX`, and one that has taken
   nothing of its answer in that time, is cut.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import HANDLED_SIGNALS

from kvstore.limits import (
    SERVER_CONNECTIONS_MAX,
    SERVER_HEAD_BYTES_MAX,
    SERVER_REQUEST_S_MAX,
)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, within bounds."""

    _overhead = 0
    """Bytes of the present request that are no body."""
    _has_head = False
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > SERVER_CONNECTIONS_MAX:
            transport.abort()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > SERVER_HEAD_BYTES_MAX:
            self.transport.abort()
        elif not self._has_head and self._late is None and self._overhead:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._has_head = True
        if self._late is not None:
            self._late.cancel()
            self._late = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._overhead, self._has_head = 0, False
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(SERVER_REQUEST_S_MAX, self.transport.abort)

    def _watch(self, size: int) -> None:
        self._stuck = self.loop.call_later(SERVER_REQUEST_S_MAX, self._look, size)

    def _look(self, before: int) -> None:
        size = self.transport.get_write_buffer_size()
        if size >= before:
            self.transport.abort()
        else:
            self._watch(size)

    def _cancel(self) -> None:
        for timer in (self._late, self._stuck):
            if timer is not None:
                timer.cancel()
        self._late = self._stuck = None


class GuardedServer(Server):
    """uvicorn's server. `is_up` is set once it serves, or has failed to begin."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End the server at a signal. uvicorn would raise the signal again behind its own end, and
        the process would die with its store open."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.is_up.set()
