"""Answers that clients have not taken: handed to the kernel piece by piece, and bounded together.

A client that reads slowly keeps its answer in the server's memory, and a server has many clients.
So a large answer waits here, before the transport, and the memory that it takes is counted. Nobody
waits for room, or small answers would wait behind large ones: where there is none, the server cuts
the connection that has kept the most memory for the longest time.

Invariants
1. A transport gets a piece only while it has room, so it holds one piece beside its own buffer.
2. Bytes leave in the order in which they were written, and before the end of the connection.
3. Answers that wait take at most `SERVER_UNSENT_BYTES_MAX`, unless one connection has them all. An
   answer counts whole until its last piece is handed on, because it is in memory for so long.
"""

from __future__ import annotations

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
        self._memory = 0
        self._slow: set[Outbox] = set()

    def change(self, outbox: Outbox, memory: int) -> None:
        """Count `memory` bytes more, or fewer, that answers take at `outbox`."""
        self._memory += memory
        if outbox.memory:
            self._slow.add(outbox)
        else:
            self._slow.discard(outbox)

    def make_room(self, newest: Outbox) -> None:
        """Cut connections other than `newest` until the answers that wait are within their bound.
        O(slow connections) for each."""
        while self._memory > SERVER_UNSENT_BYTES_MAX and (others := self._slow - {newest}):
            now = time.monotonic()
            max(others, key=lambda each: each.burden(now)).abort()


class _Answer(NamedTuple):
    data: bytes
    memory: int


class Outbox:
    """The transport of one connection, behind a queue of large answers. All but writing and ending
    goes to the transport."""

    def __init__(
        self, transport: Any, unsent: Unsent, memory_of: Callable[[int], int] = int
    ) -> None:
        """`memory_of` tells the memory of an answer that is being written, of so many bytes."""
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
        self._is_full = self._is_ending = self._has_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send `data` behind the data before it."""
        if not self._answers and len(data) <= SERVER_PIECE_BYTES:
            self._transport.write(data)
            return
        if self._has_ended or not data:
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

    def resume(self) -> bool:
        """Hand on what waits: the transport has room. Returns whether it has room for more."""
        self._is_full = False
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
        """End the connection once its data has left."""
        self._is_ending = True
        if not self._answers:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once. The kernel drops the bytes that it has not sent: it would
        keep megabytes for a client that takes a byte now and then."""
        self.end()
        with suppress(OSError):  # the connection has ended already
            opened = self._transport.get_extra_info("socket")
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._transport.abort()

    def end(self) -> None:
        """Forget what waits, for the connection has ended."""
        self._has_ended = True
        self._answers.clear()
        self._handed_on = 0
        self._change(-self._size, -self.memory)

    def _hand_on(self) -> None:
        """Give the transport pieces while it has room; it calls `pause` through its protocol."""
        while self._answers and not self._is_full:
            answer, begin = self._answers[0], self._handed_on
            self._handed_on += SERVER_PIECE_BYTES
            if self._handed_on >= len(answer.data):
                self._answers.popleft()
                self._handed_on = 0
                self._change(-len(answer.data), -answer.memory)
            self._transport.write(memoryview(answer.data)[begin : begin + SERVER_PIECE_BYTES])
        if self._is_ending and not self._answers:
            self._transport.close()

    def _change(self, size: int, memory: int) -> None:
        self._size += size
        self.memory += memory
        self._unsent.change(self, memory)
