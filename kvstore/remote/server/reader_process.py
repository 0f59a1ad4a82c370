"""A reader process of a server: it answers reads from the files of the store.

    reads       a live reader of this process, which looks at the writer's files before each read
    the rest    the owner of the store, by the connections of a `Forwarder`

Its owner starts it (`kvstore.remote.server.readers`) with a line of JSON on stdin, and keeps
stdin open as long as it lives. The process writes a line to stdout once it is ready.

Invariants
1. A read shows each commit whose answer was sent before the read came, whichever process took it.
2. A caller is admitted here before anything is handed to the owner, because the owner sees no
   address of the caller. The owner compares the token once more.
3. A read that this process cannot answer at present is answered by the owner. So is a read behind
   the time at which a key expires, until the owner has deleted the key.
4. The process ends with its owner, also with one that was killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.errors import (
    DeterminateError,
    IndeterminateError,
    NotListeningError,
    NotYetWrittenError,
    RetryableError,
    StorageError,
    UsageError,
)
from kvstore.limits import (
    CLIENT_CONNECTIONS_MAX,
    CLIENT_HEAD_BYTES_MAX,
    CONTROL_DIAL_S,
    SERVER_IDLE_S_MAX,
    SERVER_READER_STALENESS_S,
    SERVER_SPOOL_PART_BYTES,
)
from kvstore.metrics.slow import warn_of_slow
from kvstore.remote import control_socket
from kvstore.remote.client.calls import ReplyHead, read_head
from kvstore.remote.live import LiveReader, follow
from kvstore.remote.protocol import KEYS_PATH, VERBS_PATH
from kvstore.remote.server import log_lines
from kvstore.remote.server.app import App
from kvstore.remote.server.http import (
    Body,
    Departure,
    Head,
    Message,
    Receive,
    Send,
    read_form,
    send_part,
    start_of,
    within_time,
)
from kvstore.remote.server.running import SharingServer, server_config, server_tls
from kvstore.remote.server.tokens import Grant, Tokens
from kvstore.remote.verbs import VERBS

_KEYS: Final = KEYS_PATH.encode()
_VERBS: Final = VERBS_PATH.encode()
READS: Final = frozenset(_VERBS + name.encode() for name, verb in VERBS.items() if verb.from_files)
"""The paths of the verbs that a reader answers. Others write, or tell of the owner."""

_MENDED_BY_OWNER: Final = (NotYetWrittenError, RetryableError, StorageError)
"""Failures of a reader that the owner does not have: it can complete the present time, and no file
is taken away from it."""


class ReadingApp(App):
    """The application of a reader process."""

    measures = False  # the owner does

    def __init__(self, reader: LiveReader, tokens: Tokens | None, owner: Forwarder) -> None:
        super().__init__(reader, tokens=tokens)
        self._reader, self._owner = reader, owner
        self._is_fresh = False

    async def _answer(
        self, head: Head, access: Grant, body: Body, receive: Receive, send: Send
    ) -> None:
        if _is_read(head):
            answer = _Answer(send)
            try:
                self._catch_up()
                if not self._reader.is_waiting:
                    await super()._answer(head, access, body, receive, answer)
                    return
            except _MENDED_BY_OWNER:
                if answer.has_begun:
                    raise
        await self._owner.forward(head, body, receive, send)

    async def _serve_page(self, head: Head, receive: Receive, send: Send) -> None:
        """The owner makes the page: it knows the claims, and does what a form asks for."""
        if not self.has_tokens:
            head.require_here()
        body = await read_form(head, receive)
        await self._owner.forward(head, body, receive, send)

    def _catch_up(self) -> None:
        """Look at the writer's files, once for all requests that have come. A request that comes
        later begins in a later turn of the event loop, behind `_expire`."""
        if not self._is_fresh:
            self._reader.refresh()
            self._is_fresh = True
            asyncio.get_running_loop().call_soon(self._expire)

    def _expire(self) -> None:
        self._is_fresh = False


class _Answer:
    """Sends an answer, and knows whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)


def _is_read(head: Head) -> bool:
    if head.path.startswith(_KEYS):
        return head.method in ("GET", "HEAD")
    return head.path in READS


def main() -> None:
    """Read the orders of the owner, and serve until a signal comes or the owner has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the owner ends its readers
    orders = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_owner, name="kvstore-owner", daemon=True).start()
    listener = socket.socket(fileno=orders["listener"])
    store, tokens = Path(orders["store"]), orders["tokens"]
    told = log_lines.Log(*orders["log"])
    with log_lines.told(told), follow(store, SERVER_READER_STALENESS_S) as reader:
        if told.slow is not None:
            warn_of_slow(reader, told.slow)
        owner = Forwarder(store, orders["owner"])
        known = None if tokens is None else Tokens.of_fields(tokens)
        run(ReadingApp(reader, known, owner), listener, orders["tls"], ready=_say_ready)
        owner.close()


def run(
    app: App, listener: socket.socket, tls: list[str] | None, *, ready: Callable[[], None]
) -> None:
    """Accept connections at a socket that other processes share, until a signal comes."""
    context: Any = None if tls is None else server_tls(*tls)
    SharingServer(server_config(app, context), listener, ready=ready).run([])


def _say_ready() -> None:
    os.write(1, b"ready\n")


def _end_with_owner() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)


# --------------------------------------------------------------------------------------------------
# Requests that a reader process hands to the owner of the store, and the owner's answers.
#
# Invariants
# 1. A request travels with the headers that a server reads, and without all others.
# 2. A chunk of an answer becomes one part of the caller's answer, because clients read Arrow
#    messages by chunks. An answer that breaks off at the owner breaks off at the caller.
# 3. A connection with an answer that was not read to its end is closed.

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

    async def forward(self, head: Head, body: Body, receive: Receive, send: Send) -> None:
        """Give the caller the owner's answer. Raises `DeterminateError` if the owner cannot be
        reached, and `IndeterminateError` if it sends no answer."""
        request = _request(head, len(body))
        line = self._taken() or await self._dialled()
        is_whole = False
        try:
            found = await self._asked(line, request, body)
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

    async def _asked(self, line: _Line, request: bytes, body: Body) -> ReplyHead:
        try:
            if isinstance(body, bytes):
                line.writer.writelines([request, body] if body else [request])
                await line.writer.drain()
            else:
                line.writer.write(request)
                for at in range(0, len(body), SERVER_SPOOL_PART_BYTES):
                    line.writer.write(body[at : at + SERVER_SPOOL_PART_BYTES])
                    await line.writer.drain()
            head = await line.reader.readuntil(b"\r\n\r\n")
            if len(head) > CLIENT_HEAD_BYTES_MAX:
                raise ConnectionResetError("the head of its answer is too long")
            return read_head(head[:-4], str(self._store))
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            where = f"a call of the owner of {self._store}"
            raise IndeterminateError(where, str(error) or repr(error)) from error


def _request(head: Head, length: int) -> bytes:
    """The line and the headers of a request with a body of `length` bytes."""
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
    lines.append(b"Content-Length: %d\r\n\r\n" % length)
    return b"".join(lines)


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
