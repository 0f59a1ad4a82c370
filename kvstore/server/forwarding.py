"""Requests that a reader process hands to the owner of the store, and the owner's answers.

Invariants
1. A request travels with the headers that a server reads, and without all others.
2. A chunk of an answer becomes one part of the caller's answer, because clients read Arrow messages
   by chunks. An answer that breaks off at the owner breaks off at the caller.
3. A connection with an answer that was not read to its end is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from kvstore import control_socket
from kvstore.client.reply import ReplyHead, read_head
from kvstore.errors import (
    DeterminateError,
    IndeterminateError,
    NotListeningError,
    UsageError,
)
from kvstore.limits import (
    CLIENT_CONNECTIONS_MAX,
    CLIENT_HEAD_BYTES_MAX,
    CONTROL_DIAL_S,
    SERVER_IDLE_S_MAX,
)
from kvstore.server.exchange import (
    Departure,
    Message,
    Receive,
    Send,
    send_part,
    start_of,
    within_time,
)
from kvstore.server.head import Head

_HEADERS: Final = (
    b"accept",
    b"authorization",
    b"content-type",
    b"idempotency-key",
    b"kvstore-changeset",
    *(b"cookie", b"origin", b"sec-fetch-site"),  # of a browser that asks for the page
)
_BUFFER_BYTES: Final = 1 << 20
"""Bytes that asyncio reads ahead of a relay."""


class _Line(NamedTuple):
    """A connection to the owner."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used_at: float

    @property
    def is_stale(self) -> bool:
        """Whether the owner has closed it, or is about to."""
        idle_s = time.monotonic() - self.used_at
        return self.reader.at_eof() or self.writer.is_closing() or idle_s > SERVER_IDLE_S_MAX / 2


class Forwarder:
    """Sends requests to the owner of one store. For one event loop."""

    def __init__(self, store: Path, name: str) -> None:
        """The owner listens at the socket `name` in the directory `store`."""
        self._store, self._name = store, name
        self._idle: deque[_Line] = deque()

    async def forward(self, head: Head, body: bytes, receive: Receive, send: Send) -> None:
        """Give the caller the owner's answer. Raises `DeterminateError` if the owner cannot be
        reached, and `IndeterminateError` if it sends no answer."""
        request = _request(head, body)
        line = self._taken() or await self._dialled()
        is_whole = False
        try:
            found = await self._asked(line, request)
            is_whole = await _relay(line.reader, found, head.method == "HEAD", receive, send)
            is_whole = is_whole and not found.is_last
        finally:
            if is_whole and len(self._idle) < CLIENT_CONNECTIONS_MAX:
                self._idle.append(line._replace(used_at=time.monotonic()))
            else:
                line.writer.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().writer.close()

    def _taken(self) -> _Line | None:
        while self._idle:
            line = self._idle.pop()
            if not line.is_stale:
                return line
            line.writer.close()
        return None

    async def _dialled(self) -> _Line:
        where = f"asking the owner of {self._store}"
        try:
            dialled = control_socket.dial(self._store, CONTROL_DIAL_S, self._name)
        except NotListeningError as error:
            raise DeterminateError(where, "its process has ended") from error
        dialled.setblocking(False)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=dialled, limit=_BUFFER_BYTES)
        except OSError as error:
            dialled.close()
            raise DeterminateError(where, str(error)) from error
        return _Line(reader, writer, time.monotonic())

    async def _asked(self, line: _Line, request: list[bytes]) -> ReplyHead:
        try:
            line.writer.writelines(request)
            await line.writer.drain()
            head = await line.reader.readuntil(b"\r\n\r\n")
            if len(head) > CLIENT_HEAD_BYTES_MAX:
                raise ConnectionResetError("the head of its answer is too long")
            return read_head(head[:-4], str(self._store))
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            where = f"a call of the owner of {self._store}"
            raise IndeterminateError(where, str(error) or repr(error)) from error


def _request(head: Head, body: bytes) -> list[bytes]:
    target = head.path + (b"?" + head.query if head.query else b"")
    if not target.startswith(b"/") or any(byte <= 32 or byte == 127 for byte in target):
        raise UsageError("a path with spaces or control characters", "percent-encode them")
    lines = [b"%s %s HTTP/1.1\r\nHost: kvstore\r\n" % (head.method.encode(), target)]
    for name in _HEADERS:
        value = head.headers.get(name)
        if value is not None:
            lines.append(b"%s: %s\r\n" % (name, value))
    if head.is_secure:
        lines.append(b"X-Forwarded-Proto: https\r\n")
    lines.append(b"Content-Length: %d\r\n\r\n" % len(body))
    return [b"".join(lines), body] if body else [b"".join(lines)]


async def _relay(
    reader: asyncio.StreamReader, head: ReplyHead, is_bare: bool, receive: Receive, send: Send
) -> bool:
    """Send the answer to the caller. Returns whether it was read to its end."""
    start: Message = start_of(head.status, head.kind)
    start["headers"] += head.passed
    if head.status == 401:
        start["headers"].append((b"www-authenticate", b"Bearer"))
    if head.length is not None:
        try:
            body = b"" if is_bare else await reader.readexactly(head.length)
        except (OSError, EOFError) as error:
            cause = "its answer broke off"
            raise IndeterminateError("a call of the owner of the store", cause) from error
        start["headers"].append((b"content-length", b"%d" % head.length))
        await send(start)
        await within_time(send({"type": "http.response.body", "body": body}), len(body))
        return True
    await send(start)
    with Departure(receive) as departure:
        while not departure.has_come:
            if not await send_part(send, await _chunk(reader)):
                return True
    return False


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a body; the last one is empty. Raises `ConnectionResetError`."""
    try:
        size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
        return (await reader.readexactly(size + 2))[:-2]
    except (EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise ConnectionResetError("the owner's answer broke off") from error
