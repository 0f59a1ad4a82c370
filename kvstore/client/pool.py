"""Requests over idle connections, and again where that is safe.

A request is sent again if it surely was not done, if it only reads, or if the server does it once
however often it comes. Every other failure is `IndeterminateError`: the caller must look.

Invariants
1. A connection serves one request at a time, and no other process: a forked child opens its own.
2. A connection with an answer that was not read to its end is closed, never used again.
3. All attempts of a `once` request carry one token; two requests never share one.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from kvstore.changes.changeset import ambient
from kvstore.client.calls import ClientRequest
from kvstore.client.connection import Connection
from kvstore.client.endpoint import Endpoint
from kvstore.client.reply import Reply, ReplyHead, strange, told_at_end
from kvstore.errors import (
    ClosedError,
    DeterminateError,
    IndeterminateError,
    KVStoreError,
    RetryableError,
)
from kvstore.limits import CLIENT_CONNECTIONS_MAX, CLIENT_RETRY_S, FEED_POLL_S_MAX
from kvstore.protocol import ARROW_TYPE

T = TypeVar("T")

FROM_CLIENT: Final = (
    "after the fork, take another from the client, which has connections of its own"
)
"""The remedy of a handle that a client has given to another process."""

_ACCEPT = f"Accept: {ARROW_TYPE}\r\n".encode()


class TokenSource:
    """A source of tokens: its own random name, and a number for each request."""

    __slots__ = ("name", "serial")

    def __init__(self) -> None:
        self.name = secrets.token_hex(12)
        self.serial = 0


class Pool:
    """The connections of one client. Any thread may use it."""

    def __init__(self, endpoint: Endpoint, *, timeout: float, patience: float) -> None:
        self.endpoint = endpoint
        self.where = str(endpoint)
        self.known = 0
        """A past time of the server: no request that begins now was done before it."""
        self._timeout, self._patience = timeout, patience
        self._idle: deque[Connection] = deque()
        self._writers: deque[TokenSource] = deque()
        self._process = os.getpid()
        self._closed = False

    @property
    def poll_s(self) -> float:
        """How long a call may wait at the server for news: the client must not give up before."""
        return min(FEED_POLL_S_MAX, self._timeout / 2)

    def send(self, request: ClientRequest[T]) -> T:
        """The answer to a request. Raises the error that the server answered with,
        `DeterminateError` if the request was surely not done, `IndeterminateError` if that is
        unknown."""
        writer = self._writer() if request.once else None
        token = self._token(writer)
        repeats = self.repeats(request)
        try:
            while True:
                found = self._attempt(request, token)
                if isinstance(found, Reply):
                    return self._read(request, found)
                if not repeats(found):
                    raise found
        finally:
            if writer is not None and len(self._writers) < CLIENT_CONNECTIONS_MAX:
                self._writers.append(writer)

    def open(self, request: ClientRequest[object]) -> tuple[Connection, ReplyHead]:
        """Send a request that only reads, and return the connection with the head of its answer.

        The caller reads the body, and gives the connection back or closes it.
        """
        repeats = self.repeats(request)
        while True:
            try:
                return self._open(request, b"")
            except KVStoreError as error:  # noqa: PERF203  # a failure is rare
                if not repeats(error):
                    raise

    def repeats(self, request: ClientRequest[T]) -> Callable[[KVStoreError], bool]:
        """Tells whether to send a request again after a failure, and waits before it says so."""
        ends_at, attempt = time.monotonic() + self._patience, 0

        def repeats(error: KVStoreError) -> bool:
            nonlocal attempt
            wait = CLIENT_RETRY_S * 2 ** min(attempt - 1, 6) if attempt else 0.0
            if time.monotonic() + wait > ends_at or not _may_repeat(error, request):
                return False
            time.sleep(wait)
            attempt += 1
            return True

        return repeats

    def close(self) -> None:
        """Close the idle connections. A connection in use closes when it is given back.
        Repeatable."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    # -- inside -----------------------------------------------------------------------------

    def _read(self, request: ClientRequest[T], found: Reply) -> T:
        """The result in an answer. Raises `StorageError` for an answer that no server of ours
        gives."""
        try:
            return request.read(found)
        except KVStoreError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise strange(self.where, f"an answer to another question: {error!r}") from error

    def _attempt(self, request: ClientRequest[T], token: bytes) -> Reply | KVStoreError:
        try:
            connection, head = self._open(request, token)
        except KVStoreError as error:
            return error
        received: list[bytes] = []
        try:
            body = _whole(connection, head, received)
        except OSError as error:
            connection.close()
            told = told_at_end(b"".join(received), head.kind, self.where)
            cause = str(error) or repr(error)
            return told or IndeterminateError(f"a request to {self.where}", cause)
        except BaseException:
            connection.close()
            raise
        self.give(connection, head)
        reply = Reply(head.status, head.kind, body, self.where)
        return reply if head.status < 400 else reply.error or reply

    def _open(self, request: ClientRequest[T], token: bytes) -> tuple[Connection, ReplyHead]:
        """Send the request, and read the head of its answer."""
        connection = self._take()
        headers = _ACCEPT + token if request.method == "POST" else token
        if not request.is_read:
            headers += self._grouped()
        if request.kind:
            headers = b"%sContent-Type: %s\r\n" % (headers, request.kind.encode())
        try:
            try:
                connection.send(request.method, request.target, headers, request.body)
            except (ConnectionError, ssl.SSLEOFError):
                # A server that is full answers and closes before it has the request.
                head = connection.receive_head()
                if head.status < 400:
                    raise
                return connection, head
            return connection, connection.receive_head()
        except OSError as error:
            connection.close()
            cause = str(error) or repr(error)
            raise IndeterminateError(f"a request to {self.where}", cause) from error
        except BaseException:
            connection.close()
            raise

    def _take(self) -> Connection:
        if self._closed:
            raise ClosedError(f"the client of {self.where}")
        if self._process != os.getpid():
            # The sockets and tokens belong to the parent. Closing the copies does not close the
            # parent's.
            idle, self._idle, self._writers = self._idle, deque(), deque()
            self._process = os.getpid()
            for connection in idle:
                connection.close()
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if not connection.is_stale():
                return connection
            connection.close()
        return Connection(self.endpoint, self._timeout)

    def give(self, connection: Connection, head: ReplyHead) -> None:
        """Keep a connection whose answer was read to its end, for the next request."""
        if head.is_last or self._closed or len(self._idle) >= CLIENT_CONNECTIONS_MAX:
            connection.close()
        else:
            self._idle.append(connection)

    def _grouped(self) -> bytes:
        """The header of a write inside a changeset."""
        changeset = ambient(self)
        if changeset is None:
            return b""
        return f"Kvstore-Changeset: {changeset.name}\r\n".encode()

    def _writer(self) -> TokenSource:
        if self._process != os.getpid():
            return TokenSource()
        try:
            return self._writers.pop()
        except IndexError:
            return TokenSource()

    def _token(self, writer: TokenSource | None) -> bytes:
        if writer is None:
            return b""
        writer.serial += 1
        token = f"{writer.name}.{writer.serial}.{self.known}"
        return f"Idempotency-Key: {token}\r\n".encode()


def _whole(connection: Connection, head: ReplyHead, received: list[bytes]) -> bytes:
    """The body of an answer. Its chunks are added to `received` as they come."""
    if head.length is not None:
        return connection.receive(head.length) if head.length else b""
    for chunk in connection.chunks():
        received.append(chunk)  # noqa: PERF402  # a stream that breaks off leaves its chunks
    return b"".join(received)


def _may_repeat(error: KVStoreError, request: ClientRequest[T]) -> bool:
    if type(error) in (RetryableError, DeterminateError):
        return True
    return isinstance(error, IndeterminateError) and (request.is_read or request.once)
