"""Room for answers: the bytes of all answers that a server is sending, bounded together.

A client that reads slowly keeps its answer in the server's memory until it is cut off, after
`SERVER_REQUEST_S_MAX` at most. So many such clients must not take all of the memory.

Invariants
1. An answer has its bytes counted before they are given to the connection, and until the client has
   taken them.
2. Parts of streams wait for room, the first to come first. A wait ends, because each answer that
   holds bytes ends in bounded time, and streams are bounded in number. A whole answer is in memory
   already: a read is refused, and may be asked for again.
3. An answer that finds nobody else has room, whatever its size.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from kvstore.errors import RetryableError
from kvstore.limits import SERVER_ANSWER_BYTES_MAX


class _Waiter(NamedTuple):
    woken: asyncio.Future[None]
    size: int


class Room:
    """The room of one application."""

    def __init__(self) -> None:
        self._held = 0
        self._waiting: deque[_Waiter] = deque()

    def share(self) -> Share:
        """The share of one answer, which is empty at first."""
        return Share(self)

    def fits(self, size: int) -> bool:
        """Whether there is room for `size` bytes more."""
        return not self._held or self._held + size <= SERVER_ANSWER_BYTES_MAX

    def is_open(self, size: int) -> bool:
        """Whether `size` bytes more may be counted now: nobody waits, and there is room."""
        return not self._waiting and self.fits(size)

    def change(self, size: int) -> None:
        """Count `size` bytes more, or fewer, and let waiters in."""
        self._held += size
        while self._waiting and self.fits(self._waiting[0].size):
            waiter = self._waiting.popleft()
            if not waiter.woken.done():
                self._held += waiter.size
                waiter.woken.set_result(None)

    async def enter(self, size: int) -> None:
        """Count `size` bytes more, once there is room and everyone who came before is in."""
        if self.is_open(size):
            self._held += size
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), size)
        self._waiting.append(waiter)
        try:
            await waiter.woken
        except asyncio.CancelledError:
            if waiter.woken.cancelled():
                with suppress(ValueError):
                    self._waiting.remove(waiter)
                self.change(0)
            else:
                self.change(-size)
            raise


class Share:
    """The bytes that one answer holds. A context manager, which gives them back."""

    __slots__ = ("_room", "size")

    def __init__(self, room: Room) -> None:
        self._room = room
        self.size = 0

    async def wait(self, size: int) -> None:
        """Hold `size` bytes, once there is room."""
        self.give_back()
        await self._room.enter(size)
        self.size = size

    def add(self, size: int) -> bool:
        """Hold `size` bytes more, if there is room now. Returns whether there was."""
        if not self._room.is_open(size):
            return False
        self.become(self.size + size)
        return True

    def take(self, size: int) -> None:
        """Hold `size` bytes. Raises `RetryableError` if there is no room."""
        self.give_back()
        if not self._room.fits(size):
            raise RetryableError("the server has answers of too many bytes", "try again")
        self.become(size)

    def become(self, size: int) -> None:
        """Hold `size` bytes: they are in memory already."""
        change, self.size = size - self.size, size
        self._room.change(change)

    def give_back(self) -> None:
        """Hold nothing. Repeatable."""
        if self.size:
            self.become(0)

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
