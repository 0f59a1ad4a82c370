"""Answers on their way to clients: whole ones, and streams of rows.

A client that stops reading holds one part of its stream, for `SERVER_REQUEST_S_MAX`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from kvstore.errors import RetryableError
from kvstore.limits import SERVER_PART_BYTES, SERVER_SHORT_BYTES_MAX, SERVER_STREAMS_MAX
from kvstore.protocol import ARROW_TYPE
from kvstore.server.exchange import (
    Departure,
    Receive,
    Send,
    send_whole,
    start_of,
    within_time,
)
from kvstore.server.room import Room, Share
from kvstore.server.streams import arrow_parts

InThread: TypeAlias = "Callable[[Callable[[], Any]], Awaitable[Any]]"


class Answers:
    """The answers that one application is sending. `in_thread` does work that waits."""

    def __init__(self, in_thread: InThread) -> None:
        self.room = Room()
        self._streams = 0
        self._in_thread = in_thread

    async def send(self, send: Send, kind: str, body: bytes, *, is_read: bool = True) -> None:
        """Send a whole answer. Raises `RetryableError` while others leave no room for the answer
        to a read. The answer to a write waits: it must not say that nothing was done."""
        if len(body) < SERVER_SHORT_BYTES_MAX:
            await send_whole(send, 200, kind, body)
            return
        with self.room.share() as share:
            if is_read:
                share.take(len(body))
            else:
                await share.wait(len(body))
            await send_whole(send, 200, kind, body)

    async def stream(
        self, reader: pa.RecordBatchReader, receive: Receive, send: Send, share: Share
    ) -> None:
        """Send the rows of `reader` as an Arrow stream. Raises `RetryableError` for one stream too
        many."""
        if self._streams >= SERVER_STREAMS_MAX:
            raise RetryableError(f"the server has {self._streams} open streams", "try again later")
        self._streams += 1
        parts = arrow_parts(reader)
        try:
            first = await self._in_thread(partial(next, parts))
            await send(start_of(200, ARROW_TYPE))
            await _send_part(send, first)
            with Departure(receive) as departure:
                if not await self._send_parts(parts, departure, send, share):
                    return
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._streams -= 1
            await self._in_thread(partial(_end, parts, reader))

    async def _send_parts(
        self, parts: Iterator[bytes], departure: Departure, send: Send, share: Share
    ) -> bool:
        """Send the parts; returns whether the client is there at the end. The next part is made
        while the client takes the one before, if there is room for both."""
        size, before = share.size or SERVER_PART_BYTES, 0
        while not departure.has_come:
            if share.size == before and not share.add(size):
                await _send_part(send, b"")  # waits until the part before has gone out
                before = 0
                await share.wait(size)
            part = await self._in_thread(partial(next, parts, None))
            if part is None:
                return True
            size = len(part)
            share.become(before + size)
            await _send_part(send, part)  # returns once the part before has gone out
            share.become(size)
            before = size
        return False


async def _send_part(send: Send, part: bytes) -> None:
    await within_time(send({"type": "http.response.body", "body": part, "more_body": True}))


def _end(parts: Iterator[bytes], reader: pa.RecordBatchReader) -> None:
    """End a stream, also one that was not read to its end: it releases its history."""
    close = getattr(parts, "close", None)
    if close is not None:
        close()
    reader.close()
