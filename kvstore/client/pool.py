"""Requests over idle connections, and again where that is safe.

A request is sent again if it surely was not done, if it only reads, or if it takes effect once
however often it comes. Every other failure is `IndeterminateError`: the caller must look.

Invariants
1. A connection serves one request at a time, and no other process: a forked child opens its own.
2. A connection with an answer that was not read to its end is closed, never used again.
3. All attempts of a `once` request carry one token; two requests never share one.
4. Behind an attempt that may have been done, no error tells the caller that nothing was done,
   unless the store has decided so with the token of the request in hand.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections import deque
from typing import Final, TypeVar

from kvstore.changes.changeset import ambient
from kvstore.client.calls import ClientRequest
from kvstore.client.connection import Connection
from kvstore.client.endpoint import Endpoint
from kvstore.client.reply import Reply, ReplyHead, strange, told_at_end
from kvstore.errors import (
    ClosedError,
    ConflictError,
    DeterminateError,
    IndeterminateError,
    KVStoreError,
    NotListeningError,
    NotUniqueError,
    PreconditionError,
    RetryableError,
    TableAlteredError,
    UsageError,
)
from kvstore.limits import CLIENT_CONNECTIONS_MAX, CLIENT_RETRY_S, FEED_POLL_S_MAX
from kvstore.protocol import ARROW_TYPE

T = TypeVar("T")

FROM_CLIENT: Final = (
    "after the fork, take another from the client, which has connections of its own"
)
"""The remedy of a handle that a client has given to another process."""

_ACCEPT = f"Accept: {ARROW_TYPE}\r\n".encode()


_DECIDED: Final = (ConflictError, NotUniqueError, PreconditionError, TableAlteredError)
"""Refusals of a write by the store. It gives none of them to a write that it has done: see
`kvstore.server.verbs.writes`."""


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
        attempts = self.attempts(request)
        try:
            while True:
                found = self._attempt(request, token)
                if isinstance(found, Reply):
                    return self._read(request, found)
                attempts.failed(found)
        finally:
            if writer is not None and len(self._writers) < CLIENT_CONNECTIONS_MAX:
                self._writers.append(writer)

    def open(self, request: ClientRequest[object]) -> tuple[Connection, ReplyHead]:
        """Send a request that is answered with rows, and return the connection with the head of its
        answer.

        The caller reads the body, and gives the connection back or closes it.
        """
        attempts = self.attempts(request)
        while True:
            try:
                return self._open(request, b"")
            except KVStoreError as error:  # noqa: PERF203  # a failure is rare
                attempts.failed(error)

    def attempts(self, request: ClientRequest[object]) -> Attempts:
        """The attempts at a request, whose time begins now."""
        return Attempts(request, self.where, self._patience)

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
        """The answer to one attempt, or the error of it."""
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
        if not (request.is_read or request.is_repeatable):
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


class Attempts:
    """The attempts at one request: whether another one follows a failure, and what the caller is
    told if none does."""

    __slots__ = ("_count", "_ends_at", "_request", "_unknown", "_where")

    def __init__(self, request: ClientRequest[object], where: str, patience: float) -> None:
        """Attempts begin for `patience` seconds from now."""
        self._request, self._where = request, where
        self._ends_at, self._count = time.monotonic() + patience, 0
        self._unknown: KVStoreError | None = None
        """The failure of the first attempt that may have been done."""

    def failed(self, error: KVStoreError) -> None:
        """Return when it is time for the next attempt. Raises the error of the request if this
        failure is the last one."""
        wait = CLIENT_RETRY_S * 2 ** min(self._count - 1, 6) if self._count else 0.0
        if time.monotonic() + wait > self._ends_at or not self._may_repeat(error):
            raise self._told(error)
        if isinstance(error, IndeterminateError) and not self._request.is_read:
            self._unknown = self._unknown or error
        time.sleep(wait)
        self._count += 1

    def _may_repeat(self, error: KVStoreError) -> bool:
        if type(error) in (RetryableError, DeterminateError):
            return True
        request = self._request
        if isinstance(error, IndeterminateError):
            return request.is_read or request.is_repeatable or request.once
        # An owner that comes back knows whether it has done the request.
        return self._unknown is not None and type(error) is NotListeningError

    def _told(self, error: KVStoreError) -> KVStoreError:
        """The error that the caller gets: this one, unless it says that nothing was done, and an
        earlier attempt may have been."""
        unknown = self._unknown
        denies = isinstance(error, RetryableError | UsageError) and not isinstance(error, _DECIDED)
        if unknown is None or not denies:
            return error
        first = unknown.cause if isinstance(unknown, IndeterminateError) else unknown.what
        told = IndeterminateError(
            f"a request to {self._where}", f"{first}; when it was sent again: {error.what}"
        )
        told.__cause__ = error
        return told


def _whole(connection: Connection, head: ReplyHead, received: list[bytes]) -> bytes:
    """The body of an answer. Its chunks are added to `received` as they come."""
    if head.length is not None:
        return connection.receive(head.length) if head.length else b""
    for chunk in connection.chunks():
        received.append(chunk)  # noqa: PERF402  # a stream that breaks off leaves its chunks
    return b"".join(received)
