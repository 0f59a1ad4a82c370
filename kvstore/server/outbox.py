"""Answers that clients have not taken: handed to the kernel piece by piece, and bounded together.

A client that reads slowly keeps its answer in the server's memory, and a server has many clients.
So a large answer waits here, before the transport, and the memory that it takes is counted. Nobody
waits for room, or small answers would wait behind large ones: where there is none, the server cuts
the connection that has kept the most memory for the longest time.

Invariants
1. A transport gets a piece only while it has room, so it holds one piece beside its own buffer. A
   piece is a copy: a view of an answer would keep the whole answer, which nobody counts any more.
2. Bytes leave in the order in which they were written, and before the end of the connection. The
   transport is closed once: asyncio's transport of TLS forgets its protocol at a second call.
3. Answers that wait take at most `SERVER_UNSENT_BYTES_MAX`, unless one connection has them all. An
   answer counts whole until its last piece is handed on, because it is in memory for so long.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from kvstore.limits import SERVER_PIECE_BYTES, SERVER_UNSENT_BYTES_MAX

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
