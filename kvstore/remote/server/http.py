"""HTTP as the server speaks it: heads, statuses, bodies in and out, streams of rows, and waits for
the disk.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from kvstore.codec.json import read_object
from kvstore.errors import (
    AccessDeniedError,
    ClosedError,
    ConflictError,
    CorruptionError,
    DependencyError,
    FencedError,
    HistoryGoneError,
    HistoryHeldError,
    KeyConflictError,
    KVStoreError,
    NotACounterError,
    NotFoundError,
    NotUniqueError,
    NotYetWrittenError,
    OtherReleaseError,
    OutOfSpaceError,
    PreconditionError,
    RetryableError,
    TableAlteredError,
    UsageError,
    storage_errors,
)
from kvstore.limits import (
    JSON_ANSWER_BYTES_MAX,
    JSON_ITEM_BYTES,
    JSON_ROWS_MAX,
    PAGE_FORM_BYTES_MAX,
    SERVER_BYTES_S_MIN,
    SERVER_LARGE_PART_BYTES,
    SERVER_REQUEST_S_MAX,
    SERVER_SHORT_BYTES_MAX,
    SERVER_SPOOL_PART_BYTES,
)
from kvstore.remote.protocol import (
    ARROW_TYPE,
    ERROR_NAME,
    JSON_TYPE,
    SHARING,
    SHARING_HEADER,
    failure_fields,
    to_json,
    unquoted,
)
from kvstore.remote.verbs import UnknownChangesetError, Verb
from kvstore.timeline.request_notes import RequestToken
from kvstore.version import __version__

# --------------------------------------------------------------------------------------------------
# The extra `server`: packages that only a process which serves a store needs.

_PACKAGES: Final = ("uvicorn", "httptools")


def require_extra() -> None:
    """Raise `UsageError`, which names the command to run, where a package is not installed."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise UsageError(
                f"a server needs the package {package!r}", "run: pip install 'kvstore-mvcc[server]'"
            )


# --------------------------------------------------------------------------------------------------
# The head of an HTTP request: the parts of its line and headers that a server of a store needs.
#
# Invariants
# 1. A path is compared as bytes, after one decoding of each part: `..`, double slashes and encoded
#    slashes are bytes of a key like any other, and lead nowhere.
# 2. A browser on this machine may be steered by a stranger's page. Callers without a token are
#    served only if no header shows a browser, a proxy or another host's name.

TOKEN_PATTERN: Final = (
    r"([A-Za-z0-9_-]{1,64})(?:\.([0-9]{1,18})(?:\.([0-9]{1,18}|[0-8][0-9]{18}))?)?"
)
"""A writer, the number of its request, and a time before it was first sent."""
_TOKEN: Final = re.compile(TOKEN_PATTERN.encode())
_LOCAL_HOSTS: Final = frozenset({b"127.0.0.1", b"localhost", b"[::1]", b"kvstore"})
_LOCAL_CLIENTS: Final = ("127.", "::1", "::ffff:127.")
_BROWSERS: Final = frozenset({b"origin", b"sec-fetch-site", b"referer"})
FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
"""Headers that tell where a body ends. A request has one of them at most."""
_SHARING: Final = SHARING_HEADER.lower().encode()
_RELEASE_BYTES_MAX: Final = 64
_PROXIES: Final = frozenset({b"forwarded", b"x-forwarded-for", b"via"})


class Head(NamedTuple):
    """The line and the headers of a request."""

    method: str
    path: bytes
    query: bytes
    headers: Mapping[bytes, bytes]
    client: str | None
    is_secure: bool = False
    """Whether it came by TLS, to this process or to a proxy that says so."""

    @property
    def length(self) -> int | None:
        """The length of the body; None where it comes in chunks. Raises `UsageError`."""
        found = self.headers.get(b"content-length")
        coding = self.headers.get(b"transfer-encoding")
        if found is None:
            if coding is not None and coding.lower() != b"chunked":
                raise UsageError("a body in a coding besides chunked", "send it as it is")
            return None if coding is not None else 0
        if coding is not None or not found.isdigit() or len(found) > 18:
            raise UsageError("content-length is no number", "send the length of the body")
        return int(found)

    @property
    def wants_json(self) -> bool:
        """Whether the caller asks for JSON where rows travel as Arrow."""
        return JSON_TYPE.encode() in self.headers.get(b"accept", b"")

    @property
    def token(self) -> RequestToken | None:
        """The token of the request, by the header `Idempotency-Key`. Raises `UsageError`."""
        text = self.headers.get(b"idempotency-key")
        if text is None:
            return None
        match = _TOKEN.fullmatch(text)
        if match is None:
            raise UsageError(
                "Idempotency-Key", "send up to 64 letters, digits, - and _, and a dot and a number"
            )
        writer, serial, known = match.groups()
        return RequestToken(
            writer.decode(), int(serial or 0), None if known is None else int(known)
        )

    @property
    def changeset(self) -> str | None:
        """The name of the changeset that the request belongs to, by the header
        `Kvstore-Changeset`."""
        name = self.headers.get(b"kvstore-changeset")
        return None if name is None else name.decode("latin-1")

    def require_release(self, store: Path | None) -> None:
        """Raise `OtherReleaseError` for a guest of a shared store whose release shares by other
        rules than this one."""
        told = self.headers.get(_SHARING)
        if told is None:
            return
        number, _, caller = told[:_RELEASE_BYTES_MAX].decode("latin-1").partition(" ")
        if number != str(SHARING):
            raise OtherReleaseError(
                str(store),
                os.getpid(),
                release=__version__,
                caller=caller,
                found=number,
                supported=SHARING,
            )

    def require_local(self) -> None:
        """Raise `AccessDeniedError` unless a program on this machine calls. Serves servers without
        tokens."""
        self._require_near(not _BROWSERS.isdisjoint(self.headers))

    def require_here(self) -> None:
        """Raise `AccessDeniedError` unless a program or a browser on this machine calls, by a name
        of this machine. The caller finds out by itself which site a browser acts for."""
        self._require_near(False)

    def _require_near(self, is_browser: bool) -> None:
        client = self.client
        cause = ""
        if client is not None and not client.startswith(_LOCAL_CLIENTS):
            cause = "it comes from another machine"
        elif is_browser or not _PROXIES.isdisjoint(self.headers):
            cause = "it comes from a browser, or through a proxy"
        elif client is not None and _host(self.headers) not in _LOCAL_HOSTS:
            cause = "it names another host"
        if cause:
            raise AccessDeniedError(
                "the call", f"{cause}, and the server has no tokens", "give the server tokens"
            )


def head_of(scope: Mapping[str, Any]) -> Head:
    """The head of an ASGI request. Its path is below the place where the application is mounted."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    root = scope.get("root_path", "")
    if root:
        raw = raw.removeprefix(quote(root).encode())
    client = scope.get("client")
    headers = dict(scope["headers"])
    if len(headers) < len(scope["headers"]):
        for name in FRAMING:  # of several lines a proxy may believe another one than we do
            lines = [value for each, value in scope["headers"] if each == name]
            if len(lines) > 1:
                headers[name] = b", ".join(lines)
    scheme = headers.get(b"x-forwarded-proto", scope.get("scheme", "").encode())
    return Head(
        scope["method"],
        raw.partition(b"?")[0],
        scope["query_string"],
        headers,
        None if client is None or not client[0] else client[0],
        scheme == b"https",
    )


def fields_of(query: bytes) -> dict[str, Any]:
    """The arguments of a query string, as bytes. Raises `UsageError` for one that comes twice."""
    found: dict[str, Any] = {}
    for part in query.split(b"&") if query else ():
        name, _, value = part.partition(b"=")
        text = unquoted(name).decode("utf-8", "replace")
        if text in found:
            raise UsageError(f"argument {text!r} comes twice", "pass it once")
        found[text] = unquoted(value)
    return found


def _host(headers: Mapping[bytes, bytes]) -> bytes:
    host = headers.get(b"host", b"").lower()
    if host.startswith(b"["):
        return host.partition(b"]")[0] + b"]"
    return host.partition(b":")[0]


# --------------------------------------------------------------------------------------------------
# The HTTP status of each error: for proxies and people. Clients go by the class in the body.
#
# 400 and 413 say that the request is not as the document of the server describes it; 404 that it
# names something that is not there; 409 that the state of the store refuses it.


class RequestError(UsageError):
    """A request that HTTP has a status of its own for. For clients it is a `UsageError`. `allow`
    names the methods of a path, where the request came by another one."""

    def __init__(self, what: str, remedy: str, *, status: int, allow: str = "") -> None:
        super().__init__(what, remedy)
        self.status, self.allow = status, allow


class UnreadBodyError(RequestError):
    """A request whose body is not read to its end. The answer closes the connection, which would
    wait for the rest for as long as the caller likes."""


_STATUS: Final[tuple[tuple[type[KVStoreError], int], ...]] = (
    (AccessDeniedError, 403),
    (UnknownChangesetError, 404),
    (NotFoundError, 404),
    (ClosedError, 503),
    (NotACounterError, 409),
    (NotUniqueError, 409),
    (KeyConflictError, 409),
    (UsageError, 400),
    (PreconditionError, 412),
    (ConflictError, 409),
    (DependencyError, 409),
    (HistoryHeldError, 409),
    (TableAlteredError, 409),
    (RetryableError, 503),
    (HistoryGoneError, 410),
    (NotYetWrittenError, 425),
    (FencedError, 409),
    (OutOfSpaceError, 507),
)


def status_of(error: KVStoreError) -> int:
    """The HTTP status with which a server answers an error of the store.

    It is 4xx where the caller has to change the request or to read anew, 503 where nothing was done
    and the same request may succeed, and 500 for damage, for failures of storage and for an outcome
    that is unknown. An application may answer its own callers with it. Needs no extra.
    """
    return error.status if isinstance(error, RequestError) else status_of_class(type(error))


def status_of_class(kind: type[KVStoreError]) -> int:
    """The status of the errors of a class."""
    return next((status for each, status in _STATUS if issubclass(kind, each)), 500)


# --------------------------------------------------------------------------------------------------
# One exchange over ASGI: the body and the arguments of a request in, a whole answer out.
#
# Invariants
# 1. A body is bounded in bytes, the time between two parts of it is bounded, and so is the time of
#    the whole body, by its size.
# 2. Arrow data of a caller is checked in full before anything reads its buffers.

Message: TypeAlias = "MutableMapping[str, Any]"
Receive: TypeAlias = "Callable[[], Awaitable[MutableMapping[str, Any]]]"
Send: TypeAlias = "Callable[[MutableMapping[str, Any]], Awaitable[None]]"
T = TypeVar("T")


Body: TypeAlias = "bytes | mmap"
"""The body of a request. A large one lies in a temporary file, and its pages come as they are
read."""


class CallerGoneError(ConnectionResetError):
    """The caller went away before its request was whole: nothing was done, and nobody is told."""


def arguments_of(head: Head, verb: Verb[Any], body: Body) -> tuple[dict[str, Any], pa.Table | None]:
    """The arguments of a verb, from the query and the body. Raises `UsageError`."""
    require_method(head, verb.methods)
    fields = fields_of(head.query)
    if head.method != "POST":
        return fields, None
    kind = content_type(head)
    if kind == ARROW_TYPE:
        if verb.rows is None:
            raise RequestError(f"{verb.name} takes no rows", f"send {JSON_TYPE}", status=415)
        return fields, _table(body, verb.rows)
    if kind == JSON_TYPE:
        assert isinstance(body, bytes), "only Arrow streams are spooled"
        try:
            found = read_object(body or b"{}", where="the request")
        except CorruptionError as error:
            raise UsageError(f"the request: {error.problem}", "send a JSON object") from error
        for name in found if fields else ():
            if name in fields:
                raise UsageError(
                    f"argument {name!r} is in the query and in the body", "pass it once"
                )
        return {**fields, **found}, None
    if body:
        named = f"send {JSON_TYPE} or {ARROW_TYPE}"
        raise RequestError(f"content-type {kind[:100]!r}", named, status=415)
    return fields, None


def require_method(head: Head, methods: tuple[str, ...]) -> None:
    """Raise `RequestError` for a request by another method."""
    if head.method not in methods:
        allow = ", ".join(methods)
        what = f"{head.path[:100].decode('latin-1')} by {head.method[:20]}"
        raise RequestError(what, f"use {allow}", status=405, allow=allow)


def _table(body: Body, schema: pa.Schema) -> pa.Table:
    """The rows of an Arrow stream, checked in full: their buffers come from a stranger. An empty
    schema takes all columns."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            names = [field.name for field in schema if field.name in reader.schema.names]
            table = reader.read_all()
        table.validate(full=True)
        if not len(schema):
            return table
        wanted = pa.schema([schema.field(name) for name in names])
        missing = [f.name for f in schema if not f.nullable and f.name not in names]
        if missing or table.num_columns != len(names):
            raise UsageError("the columns of the Arrow stream", f"send {', '.join(schema.names)}")
        found = table.cast(wanted)
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"the Arrow stream: {error}", "send an Arrow IPC stream") from error
    for field in wanted:
        if not field.nullable and found.column(field.name).null_count:
            raise UsageError(f"a null in column {field.name!r}", "send none")
    return found


def parsed_bytes(head: Head, body: Body) -> int:
    """The memory that the arguments in a body take beside their texts, about: 0 for a short body of
    JSON. For Arrow, what compressed buffers unpack to."""
    if content_type(head) == ARROW_TYPE:
        return unpacked_bytes(body)
    if len(body) <= SERVER_SHORT_BYTES_MAX or content_type(head) != JSON_TYPE:
        return 0
    assert isinstance(body, bytes), "only Arrow streams are spooled"
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    return len(_TEXTS.sub(b"", marks)) * JSON_ITEM_BYTES


# Compressed buffers of an Arrow stream. Arrow allocates what each of them says that it unpacks to,
# and writes no more.
#
#     metadata of a message := flatbuffer, a table: 2 header (a record batch, or a dictionary whose
#                              field 1 is one)
#     record batch          := 2 buffers (a vector of offset i64, length i64)  3 compression
#     compressed buffer     := bytes that it unpacks to i64 (-1: it is stored as it is) | bytes

_STORED: Final = 1 << 40
"""More bytes than any buffer may unpack to: larger numbers count as this one."""


def unpacked_bytes(body: Body) -> int:
    """The bytes to which the compressed buffers of an Arrow stream unpack; 0 if none is compressed.
    A stream that is damaged counts up to the damage, at which its reader stops too."""
    total = 0
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
        for message in messages:
            if message.type in ("record batch", "dictionary"):
                total += _unpacked(message.metadata, message.body, message.type == "dictionary")
    except (pa.ArrowException, ValueError, OSError, struct.error):
        pass  # the reader tells what is wrong
    return total


def _unpacked(metadata: pa.Buffer, body: pa.Buffer, is_dictionary: bool) -> int:
    data = memoryview(metadata)
    batch = _table_at(data, _field(data, _table_at(data, 0), 2))
    if is_dictionary:
        batch = _table_at(data, _field(data, batch, 1))
    if not _field(data, batch, 3):
        return 0
    vector = _table_at(data, _field(data, batch, 2))
    [count] = struct.unpack_from("<I", data, vector)
    places = np.frombuffer(data, "<i8", 2 * count, vector + 4).reshape(-1, 2)
    starts = places[places[:, 1] >= 8, 0]
    starts = starts[(starts >= 0) & (starts <= body.size - 8)]
    if not len(starts):
        return 0
    words = np.ndarray((body.size - 7,), "<i8", body, strides=(1,))
    return int(np.clip(words[starts], 0, _STORED).sum(dtype=np.int64))


def _table_at(data: memoryview, at: int) -> int:
    """Where the table or vector lies to which the offset at a place leads."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a table lies; 0 for a field that is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    [size] = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * number >= size:
        return 0
    [offset] = struct.unpack_from("<H", data, vtable + 4 + 2 * number)
    return table + offset if offset else 0


_NO_MARKS: Final = bytes(set(range(256)) - set(b'"[{,'))
"""All bytes but the ones that begin an item of JSON, or a text."""
_TEXTS: Final = re.compile(rb'"[^"]*"')


def content_type(head: Head) -> str:
    """The type of the body, without its parameters."""
    return head.headers.get(b"content-type", b"").partition(b";")[0].strip().decode("latin-1")


async def read_body(receive: Receive, most: int) -> bytes:
    """The body of a request. Raises `UsageError` if it is longer or slower than it may be, and
    `CallerGoneError`."""
    parts = [part async for part in _parts(receive, most)]
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def spool_body(
    receive: Receive, most: int, by_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
) -> mmap:
    """The body of a large request, in a temporary file without a name, which the system removes
    behind the last use of the result. Raises as `read_body`, and `OutOfSpaceError` where the
    directory for temporary files (`TMPDIR`) is full."""
    waiting: list[bytes] = []
    size = 0
    with storage_errors("the directory for temporary files (TMPDIR)"), TemporaryFile() as file:

        def write() -> None:
            file.write(b"".join(waiting))
            waiting.clear()

        async for part in _parts(receive, most):
            waiting.append(part)
            size += len(part)
            if size >= SERVER_SPOOL_PART_BYTES:
                size = 0
                await by_thread(write)
        write()
        file.flush()
        return mmap(file.fileno(), 0, access=ACCESS_READ)


async def _parts(receive: Receive, most: int) -> AsyncIterator[bytes]:
    """The parts of a body, as they come."""
    size, begun = 0, time.monotonic()
    while True:
        left_s = size / SERVER_BYTES_S_MIN + begun - time.monotonic()
        message = await _in_time(receive(), SERVER_REQUEST_S_MAX + min(left_s, 0.0))
        if message["type"] != "http.request":
            raise CallerGoneError("the client has gone")
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            what = f"a request of more than {most} bytes"
            raise UnreadBodyError(what, "send smaller batches", status=413)
        yield part
        if not message.get("more_body"):
            return


async def read_form(head: Head, receive: Receive) -> bytes:
    """The body of a request of the page. Raises `UsageError` for a long one."""
    length = head.length
    if length is None or length > PAGE_FORM_BYTES_MAX:
        remedy = f"send {PAGE_FORM_BYTES_MAX} bytes at most"
        raise UnreadBodyError("a form that is too long", remedy, status=413)
    return await read_body(receive, length) if length else b""


async def _in_time(receiving: Awaitable[T], seconds: float) -> T:
    """Wait for more of a request, for a bounded time. A timer costs 1 us, `wait_for` 30."""
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def cancel() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, cancel)
    try:
        return await receiving
    except asyncio.CancelledError as error:
        if not is_late:
            raise
        what = f"the rest of the request did not come within {seconds:.3g} s"
        raise UnreadBodyError(what, "send it faster", status=400) from error
    finally:
        timer.cancel()


def is_cut_off(error: Exception) -> bool:
    """Whether a part of an answer met a connection that had just broken off: uvloop then refuses
    the part with an error that has no class of its own."""
    return type(error) is RuntimeError and "the handler is closed" in str(error)


async def send_part(send: Send, part: bytes) -> bool:
    """Send a part of a stream, once the client has taken most of the parts before. Returns behind a
    large part once it was taken, so that a stream has one such part in memory. An empty part ends
    the answer, and only then False is returned."""
    size = len(part)
    message: Message = {"type": "http.response.body", "body": part, "more_body": size > 0}
    del part
    await within_time(send(message), max(size, SERVER_LARGE_PART_BYTES))
    message["body"] = b""
    if size > SERVER_LARGE_PART_BYTES:
        await within_time(send(message), size)
    return size > 0


async def within_time(sending: Awaitable[None], size: int) -> None:
    """Wait for a client to take `size` bytes, for a bounded time."""
    try:
        await asyncio.wait_for(sending, SERVER_REQUEST_S_MAX + size / SERVER_BYTES_S_MIN)
    except asyncio.TimeoutError as error:
        raise ConnectionAbortedError("the client does not read its answer") from error


class Departure:
    """Tells whether the caller of a long answer has gone: a server then drops parts of the answer
    without an error. A context manager; after its block the body of the request cannot be read."""

    def __init__(self, receive: Receive) -> None:
        self._waiting = asyncio.ensure_future(_until_gone(receive))

    @property
    def has_come(self) -> bool:
        """Whether the caller has gone."""
        return self._waiting.done()

    def __enter__(self) -> Departure:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] == "http.request":
        pass


async def send_bare(send: Send, message: MutableMapping[str, Any]) -> None:
    """Send a message without its body: the answer to HEAD."""
    if message["type"] == "http.response.body":
        message["body"] = b""
    await send(message)


async def send_json(send: Send, answer: Any, status: int = 200) -> None:
    """Answer with JSON."""
    await send_whole(send, status, JSON_TYPE, json.dumps(answer).encode())


async def send_error(send: Send, error: KVStoreError, status: int = 0) -> None:
    """Answer with an error. A `status` above 0 replaces the status of the error's class."""
    status = status or status_of(error)
    body = json.dumps(failure_fields(error)).encode()
    extra = ((b"www-authenticate", b"Bearer"),) if status == 401 else ()
    if isinstance(error, RequestError) and error.allow:
        extra = ((b"allow", error.allow.encode()),)
    if isinstance(error, UnreadBodyError):
        extra = (*extra, (b"connection", b"close"))
    await send_whole(send, status, JSON_TYPE, body, extra)


async def send_whole(
    send: Send,
    status: int,
    kind: str,
    body: bytes,
    extra: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Answer with a whole body."""
    start: Message = start_of(status, kind)
    start["headers"] += [(b"content-length", b"%d" % len(body)), *extra]
    await send(start)
    last: Message = {"type": "http.response.body", "body": body}
    await (send(last) if len(body) < SERVER_SHORT_BYTES_MAX else within_time(send(last), len(body)))


def start_of(status: int, kind: str) -> dict[str, Any]:
    """The beginning of an answer."""
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind.encode()), (b"cache-control", b"no-store")],
    }


# --------------------------------------------------------------------------------------------------
# Rows as the parts of an Arrow IPC stream, pulled one by one.
#
# A part is one message of the stream. A failure after the first part becomes a last batch without
# rows, whose metadata has the error: a plain reader of Arrow sees no false row, and sees that the
# stream breaks off.

DEFECT: Final = KVStoreError("the server has a defect", "see its log")
"""The error of a caller for a bug of ours, whose details stay here."""

_END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class BrokenStreamError(Exception):
    """The stream failed, and its last part tells why: the connection must be closed."""


class VerbFailedError(Exception):
    """A verb failed with an error of the operating system. It has a class of its own, because the
    server takes an `OSError` for the departure of the caller."""


def arrow_parts(reader: pa.RecordBatchReader) -> Iterator[bytes]:
    """The parts of the stream. Raises `BrokenStreamError` behind the part that has an error."""
    schema = reader.schema
    yield schema.serialize().to_pybytes()
    try:
        for batch in reader:
            if batch.num_rows:
                yield batch.serialize().to_pybytes()
    except KVStoreError as error:
        yield _broken(schema, error)
        raise BrokenStreamError from error
    except Exception as error:
        yield _broken(schema, DEFECT)
        if isinstance(error, OSError):
            raise VerbFailedError from error
        raise
    yield _END


def json_rows(reader: pa.RecordBatchReader) -> tuple[list[dict[str, Any]], bool]:
    """The rows as JSON, and whether these are all. It ends after `JSON_ROWS_MAX` rows, and behind
    the batch that reaches `JSON_ANSWER_BYTES_MAX`."""
    rows: list[dict[str, Any]] = []
    size = 0
    for batch in _batches(reader):
        if size >= JSON_ANSWER_BYTES_MAX and batch.num_rows:
            return rows, False
        size += batch.nbytes
        part = batch.slice(0, JSON_ROWS_MAX - len(rows))
        cells = [_cells(column) for column in part.columns]
        names = part.schema.names
        rows.extend(dict(zip(names, row, strict=True)) for row in zip(*cells, strict=True))
        if len(rows) == JSON_ROWS_MAX:
            return rows, False
    return rows, True


def _batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except OSError as error:
        raise VerbFailedError from error


def _cells(column: pa.Array) -> list[Any]:
    """The cells of a column as JSON has them. Python's times have no nanoseconds."""
    if pa.types.is_timestamp(column.type):
        texts = column.cast(pa.string()).to_pylist()
        return [None if text is None else text.replace(" ", "T", 1) for text in texts]
    return [_cell(cell) for cell in column.to_pylist()]


def _cell(cell: Any) -> Any:
    """A cell as JSON: bytes as everywhere, and a text for what JSON has no form for."""
    if cell is None or isinstance(cell, bool | int | str):
        return cell
    if isinstance(cell, bytes):
        return to_json(cell)
    if isinstance(cell, float):
        return cell if math.isfinite(cell) else _NUMBERS[str(cell)]
    if isinstance(cell, dict):
        return {name: _cell(each) for name, each in cell.items()}
    if isinstance(cell, list | tuple):
        return [_cell(each) for each in cell]
    return cell.isoformat() if hasattr(cell, "isoformat") else str(cell)


_NUMBERS: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""Numbers that JSON does not have, as texts."""


def _broken(schema: pa.Schema, error: KVStoreError) -> bytes:
    """A message with an empty batch and the error."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        told = json.dumps(failure_fields(error)).encode()
        writer.write_batch(_empty(schema), custom_metadata={ERROR_NAME: told})
        end = sink.tell()
    # The writer writes the schema together with the first batch.
    return bytes(memoryview(sink.getvalue())[schema.serialize().size : end])


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


# --------------------------------------------------------------------------------------------------
# Waiting for the disk on an event loop: commits that wait together share an fsync and a thread.


class Syncs:
    """The commits of one store that wait for the disk. Belongs to one event loop."""

    def __init__(self, wait: Callable[[int], Awaitable[None]]) -> None:
        """`wait` returns once everything below a time is on disk."""
        self._wait = wait
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def wait(self, upper: int) -> None:
        """Return once everything below `upper` is on disk. Raises `StorageError`."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((upper, future))
        if self._task is None:
            self._task = loop.create_task(self._run())
        await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                error: KVStoreError | None = None
                try:
                    await self._wait(max(upper for upper, _ in waiting))
                except KVStoreError as failed:
                    error = failed
                for _, future in waiting:
                    if future.done():  # the client has gone
                        continue
                    if error is None:
                        future.set_result(None)
                    else:
                        future.set_exception(error)
        finally:
            self._task = None
