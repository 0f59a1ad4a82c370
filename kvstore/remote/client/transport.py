"""From an address to an answer: endpoints, HTTP/1.1 on one socket, idle connections, and attempts
again where that is safe.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.arguments import is_many, key_list
from kvstore.base.meters import WorkCount
from kvstore.base.paths import require_absolute
from kvstore.base.span import require_key
from kvstore.base.timestamp import (
    OTHER_UNITS_MAX,
    TimeLike,
    Timestamp,
    counts_from_now,
    is_count,
    to_timestamp,
)
from kvstore.changes.epochs import ambient
from kvstore.errors import (
    AccessDeniedError,
    ClosedError,
    ConflictError,
    DeterminateError,
    IndeterminateError,
    KVStoreError,
    NotFoundError,
    NotListeningError,
    NotUniqueError,
    PreconditionError,
    RetryableError,
    TableAlteredError,
    UsageError,
)
from kvstore.limits import (
    CLIENT_CONNECTIONS_MAX,
    CLIENT_HEAD_BYTES_MAX,
    CLIENT_LARGE_BYTES_S,
    CLIENT_RETRY_S,
    CLIENT_RETRY_S_MAX,
    CONTROL_DIAL_S,
    FEED_POLL_S_MAX,
    SERVER_BODY_BYTES_MAX,
)
from kvstore.loops.lookup import are_keys
from kvstore.mvcc import Version
from kvstore.mvcc.arrow import binary_array
from kvstore.remote import control_socket
from kvstore.remote.client import calls
from kvstore.remote.client.calls import (
    ClientRequest,
    Reply,
    ReplyHead,
    read_head,
    strange,
    told_at_end,
    told_by,
)
from kvstore.remote.protocol import (
    ARROW_TYPE,
    KEYS_SCHEMA,
    READ_SCHEMA,
    SHARING_HEADER,
    failure_of,
)
from kvstore.remote.verbs import FLOOR, GET_MANY, HISTORY, TIMES, TTL, Verb
from kvstore.tables.joins import times_given

# --------------------------------------------------------------------------------------------------
# The address of a server: a host and a port, with TLS or without it, or the path of a Unix
# socket.

_PORT = 7447
_ABSENT = (
    "check the path (a URL begins with http:// or https://); "
    "patience= waits for a server that is going to listen there"
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address, and what every request to it carries."""

    host: str = ""
    port: int = 0
    path: str = ""
    root: str = ""
    """The path at which an application has mounted the server."""
    tls: ssl.SSLContext | None = None
    token: str | None = field(default=None, repr=False)
    store: Path | None = None
    """The directory of a store, whose owner listens there."""
    sharing: str = ""
    """What a guest of a shared store tells of its release."""

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Endpoint:
        """The endpoint of an `http` or `https` URL. Raises `UsageError`.

        A token goes over TLS, or to this machine: any computer on the way could read it otherwise.
        """
        try:
            parts = urlsplit(url)
            port = _PORT if parts.port is None else parts.port
            (parts.hostname or "").encode("idna")
        except ValueError as error:
            raise UsageError(f"{url}: {error}", "write https://host:7447") from error
        # `urlsplit` drops line ends and tabs, and what follows a # would be dropped too.
        is_whole = url.isprintable() and not re.search(r"[\s?#]", url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_whole:
            raise UsageError(f"{url} is no address of a server", "write https://host:7447")
        if parts.username is not None or parts.password is not None:
            raise UsageError("the URL has a password in it", "pass token= instead")
        if parts.scheme == "https":
            tls = tls or ssl.create_default_context()
        elif token and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise UsageError(f"a token would go to {parts.hostname} in the clear", "use https")
        elif tls is not None:
            raise UsageError(f"certificates for {url}, which has no TLS", "write https://")
        return cls(parts.hostname, port, "", parts.path.rstrip("/"), tls, _bearer(token))

    @classmethod
    def of(
        cls,
        address: str | os.PathLike[str],
        token: str | None,
        ca: str | os.PathLike[str] | None,
        patience: float,
    ) -> Endpoint:
        """The endpoint of an address as `kvstore.connect` takes it. A path is looked at again for
        `patience` seconds, until somebody listens there. Raises as `connect`."""
        if isinstance(address, str) and "://" in address:
            tls = client_tls(ca) if address.lower().startswith("https:") else None
            return cls.parse(address, token=token, tls=tls)
        path = require_absolute(address, name="address")
        pauses = Pauses(patience)
        while True:
            is_store = path.is_dir()
            endpoint = cls.of_store(path) if is_store else cls.at_path(str(path), token=token)
            try:
                endpoint.open(CONTROL_DIAL_S).close()
                return endpoint
            except (NotListeningError, DeterminateError) as error:
                if pauses.another():
                    continue
                if not path.exists():
                    raise NotFoundError(f"no store and no socket is at {path}", _ABSENT) from error
                raise

    @classmethod
    def at_path(cls, path: str, *, token: str | None = None) -> Endpoint:
        """The endpoint of a Unix socket."""
        return cls(path=path, token=_bearer(token))

    @classmethod
    def of_store(cls, directory: Path) -> Endpoint:
        """The endpoint of the process that has the store in `directory` open."""
        return cls(store=directory)

    def __str__(self) -> str:
        if self.store is not None:
            return f"the owner of {self.store}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.root}"

    @property
    def head(self) -> bytes:
        """The headers that every request carries."""
        host = f"[{self.host}]" if ":" in self.host else self.host or "kvstore"
        lines = [f"Host: {host}:{self.port}" if self.port else f"Host: {host}"]
        if self.token:
            lines.append(f"Authorization: Bearer {self.token}")
        if self.sharing:
            lines.append(f"{SHARING_HEADER}: {self.sharing}")
        return "".join(f"{line}\r\n" for line in lines).encode()

    @property
    def prefix(self) -> str:
        """The path of the mount, as requests have it."""
        return quote(self.root, safe="/%")

    def open(self, timeout: float) -> socket.socket:
        """A connected socket. Raises `NotListeningError` if no owner listens at a store,
        `DeterminateError` if nobody answers, `AccessDeniedError` for a socket of another user and
        for a certificate that is not trusted."""
        try:
            return self._open(timeout)
        except ssl.SSLCertVerificationError as error:
            raise AccessDeniedError(
                str(self), f"its certificate: {error.verify_message}", "pass ca= of its issuer"
            ) from error
        except PermissionError as error:
            raise AccessDeniedError(str(self), str(error)) from error
        except OSError as error:
            raise DeterminateError(f"connecting to {self}", str(error)) from error

    def _open(self, timeout: float) -> socket.socket:
        if self.store is not None:
            return control_socket.dial(self.store, timeout)
        if self.path:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            place = Path(self.path)
            try:
                opened.settimeout(timeout)
                with control_socket.short(place.parent, place.name) as address:
                    opened.connect(address)
            except BaseException:
                opened.close()
                raise
            return opened
        opened = socket.create_connection((self.host, self.port), timeout)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is None:
            return opened
        try:
            return self.tls.wrap_socket(opened, server_hostname=self.host)
        except BaseException:
            opened.close()
            raise


def client_tls(ca: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """The TLS of a client that trusts the issuers of the machine, or the issuers in the file
    `ca`."""
    try:
        return ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
    except OSError as error:
        raise UsageError(f"certificates {ca}: {error}", "pass a PEM file") from error


def _bearer(token: str | None) -> str | None:
    if token is None:
        return None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("a token is one word of ASCII", "pass the token of a token file")
    return token


# --------------------------------------------------------------------------------------------------
# HTTP/1.1 on one socket: a request out, an answer in. One thread at a time.
#
# Python's `http.client` takes three times as long for a small request, most of it for headers.

_RECEIVE_BYTES = 256 << 10


class Connection:
    """One connection. An error of the operating system leaves it unusable."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self.where = str(endpoint)
        self._timeout, self._is_longer = timeout, False
        self._socket = endpoint.open(timeout)
        self.wait_up_to(timeout)
        self._buffer = b""
        self._head = endpoint.head
        self._prefix = endpoint.prefix

    def wait_up_to(self, timeout: float) -> None:
        """Bound each wait for the server from now on."""
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(timeout)
        else:  # the kernel's timeouts spare a system call for each one of ours
            self._socket.settimeout(None)
            seconds = struct.pack("ll", int(timeout), int(timeout % 1 * 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def send(self, method: str, target: str, headers: bytes, body: bytes | pa.Buffer) -> None:
        """Send a request. The answer to a large one may come later than another one's."""
        line = f"{method} {self._prefix}{target} HTTP/1.1\r\n".encode()
        size = len(body)
        head = b"%s%s%sContent-Length: %d\r\n\r\n" % (line, self._head, headers, size)
        if size < 16_384:
            self._socket.sendall(head + body if size else head)
        else:
            self._socket.sendall(head)
            self._socket.sendall(body)
        if size > SERVER_BODY_BYTES_MAX:
            self._is_longer = True
            self.wait_up_to(self._timeout + size / CLIENT_LARGE_BYTES_S)

    def receive_head(self) -> ReplyHead:
        """The head of the answer. Raises `ConnectionResetError` if there is none."""
        while True:
            buffer = self._buffer
            end = buffer.find(b"\r\n\r\n")
            if end >= 0:
                self._buffer = buffer[end + 4 :]
                head = read_head(buffer[:end], self.where)
                if head.status != 100:
                    if self._is_longer:
                        self._is_longer = False
                        self.wait_up_to(self._timeout)
                    return head
                continue
            if len(buffer) > CLIENT_HEAD_BYTES_MAX:
                raise strange(self.where, "an endless head")
            self._buffer = buffer + self._more()

    def receive(self, length: int) -> bytes:
        """The next `length` bytes."""
        buffer = self._buffer
        if len(buffer) == length:
            self._buffer = b""
            return buffer
        if len(buffer) > length:
            self._buffer = buffer[length:]
            return buffer[:length]
        self._buffer = b""
        # Not all at once: a hostile length must not take memory for bytes that never come.
        parts, missing = [buffer], length - len(buffer)
        while missing:
            part = self._socket.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionResetError("the connection ended inside an answer")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def chunks(self) -> Iterator[bytes]:
        """The chunks of a body, to its end."""
        while True:
            size = self._line()
            try:
                length = int(size.partition(b";")[0], 16)
            except ValueError as error:
                raise strange(self.where, f"a chunk of {size[:40]!r} bytes") from error
            if length:
                yield self.receive(length)
            if self._line():
                raise strange(self.where, "a chunk that is longer than it says")
            if not length:
                return

    def is_stale(self) -> bool:
        """Whether the server has closed an idle connection, or sent what nobody asked for."""
        if self._buffer:
            return True
        is_tls = isinstance(self._socket, ssl.SSLSocket)
        try:
            if is_tls:  # a socket with a timeout of Python's would wait for it
                ready = select.poll()
                ready.register(self._socket, select.POLLIN)
                if not ready.poll(0):
                    return False
            # The socket below TLS may have tickets of TLS that nobody asked for.
            news = socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not news or not is_tls

    def close(self) -> None:
        """Close the socket. Repeatable."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > CLIENT_HEAD_BYTES_MAX:
                raise strange(self.where, "an endless line")
            self._buffer += self._more()
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        return line

    def _more(self) -> bytes:
        part = self._socket.recv(_RECEIVE_BYTES)
        if not part:
            raise ConnectionResetError("the connection ended before an answer")
        return part


# --------------------------------------------------------------------------------------------------
# Requests over idle connections, and again where that is safe.
#
# A request is sent again if it surely was not done, if it only reads, or if it takes effect once
# however often it comes. Every other failure is `IndeterminateError`: the caller must look.
#
# Invariants
# 1. A connection serves one request at a time, and no other process: a forked child opens its own.
# 2. A connection with an answer that was not read to its end is closed, never used again.
# 3. All attempts of a `once` request carry one token; two requests never share one.
# 4. Behind an attempt that may have been done, no error tells the caller that nothing was done,
#    unless the store has decided so with the token of the request in hand.

T = TypeVar("T")

FROM_CLIENT: Final = (
    "after the fork, take another from the client, which has connections of its own"
)
"""The remedy of a handle that a client has given to another process."""

_ACCEPT = f"Accept: {ARROW_TYPE}\r\n".encode()


_DECIDED: Final = (ConflictError, NotUniqueError, PreconditionError, TableAlteredError)
"""Refusals of a write by the store. It gives none of them to a write that it has done: see
`kvstore.remote.server.verbs.writes`."""


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

    def call(self, verb: Verb[T], **arguments: Any) -> T:
        """Call a verb, and return its result; see `send`."""
        return self.send(calls.request(verb, arguments))

    def rows(self, verb: Verb[Any], **arguments: Any) -> pa.RecordBatchReader:
        """Call a verb that answers with rows; see `rows`."""
        return rows(self, calls.request(verb, arguments))

    def table(self, verb: Verb[Any], sent: pa.Table, **arguments: Any) -> pa.Table:
        """Call a verb with rows, and return the rows of its answer; see `send`."""
        return self.send(calls.rows_request(verb, sent, arguments, Reply.table))

    def work(self, verb: Verb[T], progress: TellProgress | None, **arguments: Any) -> T:
        """Call a verb of long work, and return its result. An error that `progress` raises ends the
        work at its next step."""
        assert verb.result is not None, "work has a result"
        found = outcome(self, verb.name, self.rows(verb, **arguments), progress)
        try:
            return verb.result.read(found)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise strange(self.where, f"an answer to another question: {error!r}") from error

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


class Pauses:
    """The pauses between attempts, each longer than the one before, for `patience` seconds.
    The last attempt comes when they are over: what has come by then is found."""

    __slots__ = ("_count", "_ends_at")

    def __init__(self, patience: float) -> None:
        self._ends_at, self._count = time.monotonic() + patience, 0

    def another(self) -> bool:
        """Return True when it is time for another attempt, and False if there is none."""
        left = self._ends_at - time.monotonic()
        if left <= 0:
            return False
        if self._count:
            time.sleep(min(CLIENT_RETRY_S * 2 ** (self._count - 1), CLIENT_RETRY_S_MAX, left))
        self._count = min(self._count + 1, _DOUBLINGS_MAX)
        return True


_DOUBLINGS_MAX: Final = 30


class Attempts:
    """The attempts at one request: whether another one follows a failure, and what the caller is
    told if none does."""

    __slots__ = ("_pauses", "_request", "_unknown", "_where")

    def __init__(self, request: ClientRequest[object], where: str, patience: float) -> None:
        """Attempts begin for `patience` seconds from now."""
        self._request, self._where, self._pauses = request, where, Pauses(patience)
        self._unknown: KVStoreError | None = None
        """The failure of the first attempt that may have been done."""

    def failed(self, error: KVStoreError) -> None:
        """Return when it is time for the next attempt. Raises the error of the request if this
        failure is the last one."""
        if not self._may_repeat(error):
            raise self._told(error)
        if isinstance(error, IndeterminateError) and not self._request.is_read:
            self._unknown = self._unknown or error
        if not self._pauses.another():
            raise self._told(error)

    def _may_repeat(self, error: KVStoreError) -> bool:
        if type(error) in (RetryableError, DeterminateError):
            return True
        request = self._request
        if isinstance(error, IndeterminateError):
            return request.is_read or request.is_repeatable or request.once
        # The client has reached a server there before: it is started anew.
        return type(error) is NotListeningError

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


# --------------------------------------------------------------------------------------------------
# Rows as they arrive: an Arrow stream of a server as a record batch reader.
#
# Each chunk of the body is one message of the stream, so its bytes become a batch without a copy.


def rows(pool: Pool, request: ClientRequest[Any]) -> pa.RecordBatchReader:
    """The rows that a request asks for. Raises its error before the first row, or later, from the
    reader. The connection is used again after the last row."""
    return rows_of(pool, *pool.open(request))


def rows_of(pool: Pool, connection: Connection, head: ReplyHead) -> pa.RecordBatchReader:
    """The rows of an answer that has begun, as `rows` has them."""
    batches = _batches(pool, connection, head)
    schema = next(batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


TellProgress: TypeAlias = "Callable[[int], None]"


def outcome(
    pool: Pool, name: str, told: pa.RecordBatchReader, progress: TellProgress | None
) -> Mapping[str, Any]:
    """The result of long work, out of the rows that tell of it."""
    for batch in told:
        (row,) = batch.to_pylist()
        if row["result"] is not None:
            result: Mapping[str, Any] = json.loads(row["result"])
            return result
        if row["error"] is not None:
            raise failure_of(json.loads(row["error"]), status=500, where=pool.where)
        if progress is not None:
            progress(WorkCount.of(row["done"], row["total"], is_about=row["is_about"]))
    raise IndeterminateError(f"{name} by {pool.where}", "the answer ended without a result")


def read_whole(
    pool: Pool, request: ClientRequest[Any], read: Callable[[pa.RecordBatchReader], T]
) -> T:
    """The result of `read`, which reads all rows that a request asks for. Where their stream breaks
    off, the request is sent again within the client's patience, and `read` begins again."""
    attempts = None
    while True:
        opened = pool.open(request)  # this waits for an absent server by itself
        try:
            with rows_of(pool, *opened) as reader:
                return read(reader)
        except KVStoreError as error:  # a failure is rare
            attempts = attempts or pool.attempts(request)  # patience begins with the first failure
            attempts.failed(error)


def _batches(pool: Pool, connection: Connection, head: ReplyHead) -> Iterator[Any]:
    """The schema, then the batches."""
    is_whole = False
    try:
        require_rows(connection, head, pool.where)
        messages = connection.chunks()
        schema = pa.ipc.read_schema(pa.py_buffer(next(messages)))
        yield schema
        for message in messages:
            if len(message) > 8:
                yield read_batch(message, schema, pool.where)
        is_whole = True
    except (pa.ArrowException, StopIteration) as error:
        raise strange(pool.where, f"no Arrow stream: {error}") from error
    except OSError as error:
        raise IndeterminateError(f"a stream of {pool.where}", str(error) or repr(error)) from error
    finally:
        if is_whole:
            pool.give(connection, head)
        else:
            connection.close()


def require_rows(connection: Connection, head: ReplyHead, where: str) -> None:
    """Raise the error that the server answered with in the place of rows."""
    if head.length is None and head.status < 400:
        return
    body = connection.receive(head.length or 0)
    error = Reply(head.status, head.kind, body, where).error
    raise error or strange(where, "no rows")


def read_batch(message: bytes, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """The batch of a message. Raises the error that it carries in the place of rows."""
    read = pa.ipc.read_message(message)
    batch = pa.ipc.read_record_batch(read, schema)
    if not batch.num_rows:
        raise failure(message, schema, where)
    return batch


def failure(message: bytes, schema: pa.Schema, where: str) -> KVStoreError:
    """The error in the metadata of a batch without rows."""
    stream = schema.serialize().to_pybytes() + message
    with pa.ipc.open_stream(stream) as reader:
        return told_by(reader.read_next_batch_with_custom_metadata().custom_metadata, where)


# --------------------------------------------------------------------------------------------------
# The frontiers of a served store: each is one round trip.


class ServedFrontiers:
    """The times and the id of a store behind a server."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    @property
    def since(self) -> Timestamp:
        """See `Store.since`. One round trip, as for each name below."""
        return self._time("since")

    @property
    def upper(self) -> Timestamp:
        """See `Store.upper`."""
        return self._time("upper")

    @property
    def durable(self) -> Timestamp:
        """See `Store.durable`."""
        return self._time("durable")

    @property
    def whole_since(self) -> Timestamp:
        """See `Store.whole_since`."""
        return self._time("whole_since")

    @property
    def indexed_since(self) -> Timestamp:
        """See `Store.indexed_since`."""
        return self._time("indexed_since")

    @property
    def store_id(self) -> str:
        """See `Store.store_id`."""
        return str(self.pool.call(TIMES)["store_id"])

    def now(self) -> Timestamp:
        """See `Store.now`."""
        return self._time("now")

    def to_time(self, time: TimeLike, *, name: str = "time") -> Timestamp:
        """See `Store.to_time`. One round trip for a time that counts from now, else none."""
        return to_timestamp(time, name=name, now=self.now)

    def times_still(
        self, as_of: TimeLike | Sequence[TimeLike] | None
    ) -> TimeLike | Sequence[TimeLike] | None:
        """The times of labels as they are sent: those that count from now become instants, all by
        one round trip. One time for all keys stays as it is."""
        if not is_many(as_of) or not any(map(counts_from_now, as_of)):
            return as_of
        now = int(self.now())
        return [
            to_timestamp(time, name="as_of", now=lambda: now) if counts_from_now(time) else time
            for time in as_of
        ]

    def _time(self, name: str) -> Timestamp:
        found: Timestamp = self.pool.call(TIMES)[name]
        return found


# --------------------------------------------------------------------------------------------------
# Reads of keys, which the client and its tables share.


def values_of(
    pool: Pool, keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None
) -> list[bytes | None]:
    """See `Store.get_many`."""
    sent, at = _asked(keys, as_of)
    found: list[bytes | None] = pool.table(GET_MANY, sent, as_of=at).column("value").to_pylist()
    return found


def floors_of(
    pool: Pool,
    keys: Sequence[bytes],
    as_of: TimeLike | Sequence[TimeLike] | None,
    prefix: bytes | None,
) -> list[tuple[bytes, bytes] | None]:
    """See `Store.floor_many`."""
    below = None if prefix is None else require_key(prefix, name="prefix")
    sent, at = _asked(keys, as_of)
    found = pool.table(FLOOR, sent, as_of=at, below=below)
    pairs = zip(found.column("key").to_pylist(), found.column("value").to_pylist(), strict=True)
    return [None if key is None else (key, value) for key, value in pairs]


def versions_of(pool: Pool, key: bytes) -> list[Version]:
    """See `Store.history`."""
    key = require_key(key)
    found = pool.call(HISTORY, key=key)
    return [Version(key, each["timestamp"], each["value"]) for each in found]


def time_left(pool: Pool, key: bytes) -> timedelta | None:
    """See `Store.ttl`."""
    seconds = pool.call(TTL, key=key)["seconds"]
    return None if seconds is None else timedelta(seconds=seconds)


def _asked(
    keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None
) -> tuple[pa.Table, TimeLike | None]:
    """The rows of a read of many keys, and the time of all of them if they have one."""
    keys = key_list(keys)
    if not are_keys(keys):
        keys = [require_key(key) for key in keys]
    if not is_many(as_of):
        return pa.table([binary_array(keys)], schema=KEYS_SCHEMA), as_of
    given = times_given(as_of, len(keys))
    times = [to_timestamp(time, name="as_of") for time in given]
    columns = [binary_array(keys), pa.array(times, pa.int64())]
    if not times or min(times) > OTHER_UNITS_MAX:
        return pa.table(columns, READ_SCHEMA.names[:2]), None
    is_number = pa.array([is_count(time) for time in given], pa.bool_())
    none = pa.scalar(None, pa.int64())
    numbers = pc.if_else(is_number, columns[1], none)
    instants = pc.if_else(is_number, none, columns[1])
    return pa.table([columns[0], numbers, instants], schema=READ_SCHEMA), None
