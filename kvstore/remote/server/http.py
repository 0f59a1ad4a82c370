"""Requests and answers of the server's transports: heads, status codes, streams of rows, and waits
for the disk.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import pyarrow as pa

from kvstore.errors import (
    AccessDeniedError,
    ClosedError,
    ConflictError,
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
    OutOfSpaceError,
    PreconditionError,
    RetryableError,
    TableAlteredError,
    UsageError,
)
from kvstore.limits import JSON_ANSWER_BYTES_MAX, JSON_ROWS_MAX
from kvstore.remote.protocol import ERROR_NAME, JSON_TYPE, failure_fields, to_json, unquoted
from kvstore.remote.verbs import UnknownChangesetError
from kvstore.timeline.request_notes import RequestToken

# --------------------------------------------------------------------------------------------------
# The extra `server`: packages that only a process which serves a store needs.

_PACKAGES: Final = ("uvicorn", "httptools")


def require_extra() -> None:
    """Raise `UsageError`, which names the command to run, where a package is not installed."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise UsageError(
                f"a server needs the package {package!r}", "run: pip install kvstore-mvcc[server]"
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
    """The status: 500 for damage and for failures of storage."""
    return error.status if isinstance(error, RequestError) else status_of_class(type(error))


def status_of_class(kind: type[KVStoreError]) -> int:
    """The status of the errors of a class."""
    return next((status for each, status in _STATUS if issubclass(kind, each)), 500)


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
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


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
