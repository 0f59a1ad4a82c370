"""Connections that a hostile or slow client cannot keep: bounds around uvicorn's HTTP protocol.

uvicorn bounds neither the head of a request nor the time in which it arrives, nor the time in which
an answer is taken. This module needs the extra `server`.

Invariants
1. Bytes that are no body are bounded for each request: line, headers, chunk sizes and trailers. So
   are the requests that wait behind another one of their connection.
2. A connection that has not sent a whole head after `SERVER_REQUEST_S_MAX`, and one that takes its
   answer at less than `SERVER_BYTES_S_MIN`, is cut. `kvstore.server.outbox` bounds what answers
   keep in memory.
3. The end of the server waits for requests under way, and not for clients that are idle.
4. A connection above `SERVER_CONNECTIONS_MAX` is told that the server is full, and that nothing of
   its request was done.
5. Clients cannot fill the log: requests that are no HTTP, answers that clients do not take, and
   streams that break off with an error leave no line.
6. An idle server sleeps: uvicorn's own loop wakes ten times a second, and notices its end so late.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import signal
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import HANDLED_SIGNALS, ServerState

from kvstore.errors import RetryableError
from kvstore.limits import (
    SERVER_BYTES_S_MIN,
    SERVER_CONNECTIONS_MAX,
    SERVER_HEAD_BYTES_MAX,
    SERVER_LARGE_PART_BYTES,
    SERVER_PIPELINED_MAX,
    SERVER_REQUEST_S_MAX,
    SERVER_ROW_COPIES,
    SERVER_TURNED_AWAY_MAX,
    SERVER_TURNED_AWAY_S,
)
from kvstore.protocol import JSON_TYPE, failure_fields
from kvstore.server.head import FRAMING
from kvstore.server.outbox import Outbox, Unsent
from kvstore.server.streams import BrokenStreamError

_FAREWELL_LOOKS: Final = 2
_FAREWELL_S: Final = 0.05
_END_LOOK_S: Final = 0.001
"""Before the first look for connections that are left at the end. Later looks come less often."""


class _FaultsOfServer(logging.Filter):
    """Passes failures of the server, and none that a client can bring about."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return record.levelno >= logging.ERROR and not (
            kind is not None and issubclass(kind, BrokenStreamError | ConnectionError)
        )


_LOGGER: Final = logging.getLogger("kvstore.server.http")
_LOGGER.addFilter(_FaultsOfServer())
_LOGGER.setLevel(logging.ERROR)  # below, uvicorn makes texts for each connection


class GuardedState(ServerState):
    """The state that the connections of one server share."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = Unsent()
        self.turned_away = 0
        """Connections that are told that the server is full."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, within bounds."""

    server_state: GuardedState
    transport: Any

    _overhead = 0
    """Bytes of the present request that are no body."""
    _has_head = False
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _farewells = 0
    _is_turned_away = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _LOGGER
        self._cycles: deque[Any] = deque()
        """The requests that are not answered yet, and some that are. The first one that is not is
        being answered."""

    def connection_made(self, transport: Any) -> None:
        has_tls = transport.get_extra_info("sslcontext") is not None
        outbox: Any = Outbox(
            transport,
            self.server_state.unsent,
            self._memory_of,
            tls_descriptor=transport.get_extra_info("socket").fileno() if has_tls else None,
        )
        super().connection_made(outbox)
        if len(self.connections) - self.server_state.turned_away > SERVER_CONNECTIONS_MAX:
            self._turn_away()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self.transport.end()
        if self._is_turned_away:
            self.server_state.turned_away -= 1
        for cycle in self._cycles:  # uvicorn tells the newest one only
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Send the answers that wait to a client that has closed its half. TLS sends no more."""
        if self.scheme == "https":
            self.transport.drop()
            return False
        self.transport.close()
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_turned_away or self.transport.is_closing():
            return
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > SERVER_HEAD_BYTES_MAX:
            self.transport.abort()
        elif not self._has_head and self._late is None and self._overhead:
            self._expect_head()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= SERVER_PIPELINED_MAX:
            self.transport.abort()
            raise ConnectionAbortedError("too many requests wait")  # it ends the parsing
        if sum(name in FRAMING for name, _ in self.headers) > 1:
            raise ValueError("two lengths")  # it is answered with the status 400, and a close
        self._has_head = True
        if self._late is not None:
            self._late.cancel()
            self._late = None
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        self._answering()

    def on_body(self, body: bytes) -> None:
        self._overhead -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._overhead, self._has_head = 0, False
        super().on_message_complete()

    def pause_writing(self) -> None:
        self.transport.pause()
        super().pause_writing()
        if self._stuck is None:
            self._watch()

    def resume_writing(self) -> None:
        self.transport.resume()
        self.loop.call_soon(self._hand_on)

    def _hand_on(self) -> None:
        if not self.transport.hand_on():
            return
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def end_farewell(self) -> None:
        """Cut the connection if it is closing, and two calls in a row have found that its client
        has everything.

        TLS closes by a message of each side. An idle client sends none, because it does not read,
        and the loop would wait 30 s for it.
        """
        is_waiting = self.transport.is_closing() and not _unsent(self.transport)
        self._farewells = self._farewells + 1 if is_waiting else 0
        # between two looks the loop sends its remaining bytes
        if self._farewells >= _FAREWELL_LOOKS:
            self.transport.abort()

    def _memory_of(self, size: int) -> int:
        """The memory of an answer that waits. A row that fills a part of a stream is in memory more
        often: the scan behind it keeps it while the client reads."""
        is_row = size > SERVER_LARGE_PART_BYTES and self._answering().chunked_encoding
        return size * SERVER_ROW_COPIES if is_row else size

    def _answering(self) -> Any:
        """The request that is being answered: `cycle` is the newest one, which may wait."""
        while self._cycles[0].response_complete:
            self._cycles.popleft()
        return self._cycles[0]

    def _turn_away(self) -> None:
        """Answer before the request has come, and take nothing of it."""
        if self.server_state.turned_away >= SERVER_TURNED_AWAY_MAX:
            self.transport.abort()
            return
        self._is_turned_away = True
        self.server_state.turned_away += 1
        self.transport.write(_full())
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._late = self.loop.call_later(SERVER_TURNED_AWAY_S, self.transport.abort)

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(SERVER_REQUEST_S_MAX, self.transport.abort)

    def _watch(self) -> None:
        least = int(SERVER_REQUEST_S_MAX * SERVER_BYTES_S_MIN)
        most = max(_unsent(self.transport) - least, 0)
        self._stuck = self.loop.call_later(SERVER_REQUEST_S_MAX, self._look, most)

    def _look(self, most: int) -> None:
        """Cut the connection unless `most` bytes are left at most."""
        if _unsent(self.transport) > most:
            self.transport.abort()
        else:
            self._watch()

    def _cancel(self) -> None:
        for timer in (self._late, self._stuck):
            if timer is not None:
                timer.cancel()
        self._late = self._stuck = None


def _full() -> bytes:
    """The answer to a connection above the bound, as bytes: no request was parsed."""
    error = RetryableError(
        f"the server has {SERVER_CONNECTIONS_MAX} connections",
        "try again later: nothing was done",
    )
    body = json.dumps(failure_fields(error)).encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: %s\r\nContent-Length: %d\r\n"
        b"Cache-Control: no-store\r\nConnection: close\r\n\r\n%s"
    ) % (JSON_TYPE.encode(), len(body), body)


def _unsent(transport: Any) -> int:
    """How many bytes the client's machine does not have yet."""
    size: int = transport.get_write_buffer_size()
    opened = transport.get_extra_info("socket")
    if opened is None:  # a transport of TLS has lost it
        return size
    try:
        waiting = fcntl.ioctl(opened.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:  # closed meanwhile; macOS does not tell of sockets
        return size
    return size + int.from_bytes(waiting, sys.byteorder)


class GuardedServer(Server):
    """uvicorn's server. `is_up` is set once it serves, or has failed to begin. `ready` is called
    once it serves, in its event loop, and `ending` before it ends, by a thread."""

    def __init__(
        self,
        config: Config,
        *,
        ready: Callable[[], None] = lambda: None,
        ending: Callable[[], None] | None = None,
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        super().__init__(config)
        self.server_state: GuardedState = GuardedState()
        self.is_up = threading.Event()
        self._ready, self._ending = ready, ending

    @property
    def should_exit(self) -> bool:
        """Whether the server ends. Setting it, from any thread or signal handler, ends the
        server."""
        return self._is_ending

    @should_exit.setter
    def should_exit(self, is_ending: bool) -> None:
        self._is_ending = is_ending
        if is_ending and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._ended.set)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)  # it makes the headers of each answer
        if not self.should_exit:  # it may have been set before there was a loop
            await self._ended.wait()

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
            self._ready()
        finally:
            self.is_up.set()

    async def shutdown(self, sockets: Any = None) -> None:
        if self._ending is not None:
            await asyncio.to_thread(self._ending)
        for each in [*self.servers, *(sockets or [])]:
            each.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        ending = asyncio.ensure_future(self._end_farewells())
        try:
            await asyncio.wait_for(self._until_quiet(), self.config.timeout_graceful_shutdown)
        except asyncio.TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        finally:
            ending.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()

    async def _until_quiet(self) -> None:
        state, pause_s = self.server_state, 0.0
        while (state.connections or state.tasks) and not self.force_exit:
            await asyncio.sleep(pause_s)
            pause_s = min(max(pause_s * 2, _END_LOOK_S), _FAREWELL_S)
        for server in self.servers:
            await server.wait_closed()

    async def _end_farewells(self) -> None:
        while True:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, GuardedProtocol)
                connection.end_farewell()
            await asyncio.sleep(_FAREWELL_S)
