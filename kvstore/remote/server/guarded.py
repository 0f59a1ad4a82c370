"""Connections that a hostile or slow client cannot keep: bounds on what it sends, and on what it
does not take.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import HANDLED_SIGNALS, ServerState

from kvstore.errors import RetryableError
from kvstore.limits import (
    SERVER_BYTES_S_MIN,
    SERVER_CONNECTIONS_MAX,
    SERVER_HEAD_BYTES_MAX,
    SERVER_LARGE_PART_BYTES,
    SERVER_PIECE_BYTES,
    SERVER_PIPELINED_MAX,
    SERVER_REQUEST_S_MAX,
    SERVER_ROW_COPIES,
    SERVER_TURNED_AWAY_MAX,
    SERVER_TURNED_AWAY_S,
    SERVER_UNSENT_BYTES_MAX,
)
from kvstore.remote.protocol import JSON_TYPE, failure_fields
from kvstore.remote.server.http import FRAMING, BrokenStreamError

# --------------------------------------------------------------------------------------------------
# Answers that clients have not taken: handed to the kernel piece by piece, and bounded together.
#
# A client that reads slowly keeps its answer in the server's memory, and a server has many clients.
# So a large answer waits here, before the transport, and the memory that it takes is counted.
# Nobody waits for room, or small answers would wait behind large ones: where there is none, the
# server cuts the connection that has kept the most memory for the longest time.
#
# Invariants
# 1. A transport gets a piece only while it has room, so it holds one piece beside its own buffer. A
#    piece is a copy: a view of an answer would keep the whole answer, which nobody counts any more.
# 2. Bytes leave in the order in which they were written, and before the end of the connection. The
#    transport is closed once: asyncio's transport of TLS forgets its protocol at a second call.
# 3. Answers that wait take at most `SERVER_UNSENT_BYTES_MAX`, unless one connection has them all.
#    An answer counts whole until its last piece is handed on, because it is in memory for so long.

_AT_ONCE: Final = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which closing waits for nothing."""


class Unsent:
    """The memory of the answers that wait at all connections of one server. For one event loop."""

    def __init__(self) -> None:
        self.memory = 0
        self.slow: set[Outbox] = set()
        """The connections with answers that wait."""

    def change(self, outbox: Outbox, memory: int) -> None:
        """Count `memory` bytes more, or fewer, that answers take at `outbox`."""
        self.memory += memory
        if outbox.memory:
            self.slow.add(outbox)
        else:
            self.slow.discard(outbox)

    def make_room(self, newest: Outbox) -> None:
        """Cut connections other than `newest` until the answers that wait are within their bound.
        O(slow connections) for each."""
        while self.memory > SERVER_UNSENT_BYTES_MAX and (others := self.slow - {newest}):
            now = time.monotonic()
            max(others, key=lambda each: each.burden(now)).abort()


class _Answer(NamedTuple):
    data: bytes
    memory: int


class Outbox:
    """The transport of one connection, behind a queue of large answers. All but writing and ending
    goes to the transport."""

    def __init__(
        self,
        transport: Any,
        unsent: Unsent,
        memory_of: Callable[[int], int] = int,
        *,
        tls_descriptor: int | None = None,
    ) -> None:
        """`memory_of` tells the memory of an answer that is being written, of so many bytes.
        `tls_descriptor` is the descriptor of a connection by TLS."""
        self.memory = 0
        """Bytes of memory that the answers take that wait."""
        self._transport = transport
        self._unsent = unsent
        self._memory_of = memory_of
        self._answers: deque[_Answer] = deque()
        self._size = 0
        """Bytes of these answers."""
        self._handed_on = 0
        """Bytes of the first answer that the transport has got."""
        self._since = 0.0
        self._is_full = self._is_ending = self._has_closed = False
        self._is_dropping = self._has_ended = False
        self._departure = None
        if tls_descriptor is not None:
            self._departure = select.poll()
            self._departure.register(tls_descriptor, getattr(select, "POLLRDHUP", 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send `data` behind the data before it. Does nothing once the connection ends: a transport
        would write a line of log for each of many pieces."""
        if self._is_dropping or not data or self._is_lost():
            return
        if not self._answers and len(data) <= SERVER_PIECE_BYTES:
            self._transport.write(data)
            return
        if not self._answers:
            self._since = time.monotonic()
        answer = _Answer(data, self._memory_of(len(data)))
        self._answers.append(answer)
        self._change(len(data), answer.memory)
        self._hand_on()
        if self._answers:
            self._unsent.make_room(self)

    def pause(self) -> None:
        """Hand on nothing: the transport has no room."""
        self._is_full = True

    def resume(self) -> None:
        """Note that the transport has room. `hand_on` follows in a turn of the loop of its own:
        asyncio's transport ends twice where a write fails while it tells that it has room."""
        self._is_full = False

    def hand_on(self) -> bool:
        """Hand on what waits, while there is room. Returns whether there is room for more."""
        self._hand_on()
        return not self._is_full

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel does not have yet."""
        size: int = self._transport.get_write_buffer_size()
        return size + self._size - self._handed_on

    def burden(self, now: float) -> float:
        """The memory of what waits, times the seconds for which something has waited."""
        return self.memory * (now - self._since)

    def is_closing(self) -> bool:
        """Whether the connection ends, or has ended."""
        return self._is_ending or bool(self._transport.is_closing())

    def close(self) -> None:
        """End the connection once its data has left. Repeatable."""
        if not self._is_ending:
            self._is_ending = True
            self._close_if_empty()

    def abort(self) -> None:
        """End the connection at once. The kernel drops the bytes that it has not sent: it would
        keep megabytes for a client that takes a byte now and then. Repeatable: the number of its
        descriptor may belong to another file by then."""
        if self._has_ended:
            return
        self.end()
        opened = self._transport.get_extra_info("socket")
        if opened is not None:  # a transport of TLS may have lost it already
            with suppress(OSError):
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._transport.abort()

    def end(self) -> None:
        """Forget what waits, for the connection has ended."""
        self._has_ended = True
        self.drop()

    def drop(self) -> None:
        """Forget what waits, and later writes too: the client takes no more."""
        self._is_dropping = True
        self._answers.clear()
        self._handed_on = 0
        self._change(-self._size, -self.memory)

    def _hand_on(self) -> None:
        """Give the transport pieces while it has room; it calls `pause` through its protocol."""
        while self._answers and not self._is_full:
            if self._is_lost():
                self.drop()
                return
            answer, begin = self._answers[0], self._handed_on
            piece = answer.data[begin : begin + SERVER_PIECE_BYTES]
            self._handed_on += SERVER_PIECE_BYTES
            if self._handed_on >= len(answer.data):
                self._answers.popleft()
                self._handed_on = 0
                self._change(-len(answer.data), -answer.memory)
            self._transport.write(piece)
        if self._is_ending:
            self._close_if_empty()

    def _is_lost(self) -> bool:
        """Whether the transport would drop what it gets. A transport of TLS does not tell that its
        client has closed or was reset, so the kernel is asked."""
        if self._transport.is_closing():
            return True
        if self._departure is None or not self._departure.poll(0):
            return False
        asyncio.get_running_loop().call_soon(self.abort)  # not inside a call of the transport's
        return True

    def _close_if_empty(self) -> None:
        if not self._answers and not self._has_closed:
            self._has_closed = True
            self._transport.close()

    def _change(self, size: int, memory: int) -> None:
        self._size += size
        self.memory += memory
        self._unsent.change(self, memory)


# --------------------------------------------------------------------------------------------------
# Connections that a hostile or slow client cannot keep: bounds around uvicorn's HTTP protocol.
#
# uvicorn bounds neither the head of a request nor the time in which it arrives, nor the time in
# which an answer is taken. This module needs the extra `server`.
#
# Invariants
# 1. Bytes that are no body are bounded for each request: line, headers, chunk sizes and trailers.
#    So are the requests that wait behind another one of their connection.
# 2. A connection that has not sent a whole head after `SERVER_REQUEST_S_MAX`, and one that takes
#    its answer at less than `SERVER_BYTES_S_MIN`, is cut. The section above bounds the memory of
#    answers.
# 3. The end of the server waits for requests under way, and not for clients that are idle.
# 4. A connection above `SERVER_CONNECTIONS_MAX` is told that the server is full, and that nothing
#    of its request was done.
# 5. Clients cannot fill the log: requests that are no HTTP, answers that clients do not take, and
#    streams that break off with an error leave no line.
# 6. An idle server sleeps: uvicorn's own loop wakes ten times a second, and notices its end so
#    late.

_FAREWELL_LOOKS: Final = 2
_FAREWELL_S: Final = 0.05
_TURNS_TO_MAKE: Final = 5
"""Turns of the loop from the accepting of a socket to the end of a connection that came too late:
the task begins, the connection is made, the caller of the task wakes, it is closed, it is lost."""
_END_LOOK_S: Final = 0.001
"""Before the first look for connections that are left at the end. Later looks come less often."""


class _FaultsOfServer(logging.Filter):
    """Passes failures of the server, and none that a client can bring about."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return record.levelno >= logging.ERROR and not (
            kind is not None and issubclass(kind, BrokenStreamError | ConnectionError)
        )


_LOGGER: Final = logging.getLogger("kvstore.remote.server.http")
_LOGGER.addFilter(_FaultsOfServer())
_LOGGER.setLevel(logging.ERROR)  # below, uvicorn makes texts for each connection


class GuardedState(ServerState):
    """The state that the connections of one server share."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = Unsent()
        self.turned_away = 0
        """Connections that are told that the server is full."""
        self.is_ending = False
        """Whether a connection that is made now comes too late."""


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
        if self.server_state.is_ending:
            outbox.close()
        elif len(self.connections) - self.server_state.turned_away > SERVER_CONNECTIONS_MAX:
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

    @property
    def ended_by(self) -> str:
        """The signal that ended the server, and empty if it was another cause."""
        return signal.Signals(self._captured_signals[0]).name if self._captured_signals else ""

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
        # A connection that was accepted just before is made in the next turns of the loop, and must
        # be made before its server closes: asyncio would leave its socket open, and its caller
        # would wait for an answer for as long as it has patience.
        self.server_state.is_ending = True
        loop = asyncio.get_running_loop()
        for listening in [each for server in self.servers for each in server.sockets]:
            loop.remove_reader(listening.fileno())
        for _ in range(_TURNS_TO_MAKE):
            await asyncio.sleep(0)
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
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its call took longer than the time of grace
        for _ in range(_TURNS_TO_MAKE):
            await asyncio.sleep(0)

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
