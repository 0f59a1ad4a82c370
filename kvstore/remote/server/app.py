"""The server as an ASGI application: HTTP requests in, calls of the service, answers out; and its
OpenAPI document.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import pyarrow as pa
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvstore import opening
from kvstore.base.arguments import require_path
from kvstore.base.forks import own
from kvstore.codec.json import read_object
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    KVStoreError,
    NotFoundError,
    OutOfSpaceError,
    RetryableError,
    StorageError,
    UsageError,
)
from kvstore.limits import (
    JSON_ITEM_BYTES,
    PAGE_FORM_BYTES_MAX,
    SERVER_BODY_BYTES_MAX,
    SERVER_BYTES_S_MIN,
    SERVER_LARGE_PART_BYTES,
    SERVER_MAKERS_MAX,
    SERVER_MEMORY_BYTES_MAX,
    SERVER_REQUEST_S_MAX,
    SERVER_SHORT_BYTES_MAX,
    SERVER_STREAMS_MAX,
    SERVER_THREADS_MAX,
    SERVER_WAITS_MAX,
)
from kvstore.metrics.prometheus import HasMetrics, PrometheusCollector
from kvstore.remote import results
from kvstore.remote.parameters import TIME, VALUE, Parameter, Schema
from kvstore.remote.protocol import (
    ARROW_TYPE,
    JSON_TYPE,
    KEYS_PATH,
    OCTETS_TYPE,
    VERBS_PATH,
    failure_fields,
    unquoted,
)
from kvstore.remote.server.access import WHOLE, Grant, Token, Tokens
from kvstore.remote.server.http import (
    DEFECT,
    TOKEN_PATTERN,
    BrokenStreamError,
    Head,
    RequestError,
    Syncs,
    arrow_parts,
    fields_of,
    head_of,
    json_rows,
    status_of,
    status_of_class,
)
from kvstore.remote.server.invocation import Answer, ServedVerb
from kvstore.remote.server.page import Page, PageAnswer, Section, is_of_page, require_templates
from kvstore.remote.server.service import Service
from kvstore.remote.verbs import READ, VERBS, UnknownChangesetError, Verb
from kvstore.store import Store
from kvstore.version import __version__

# --------------------------------------------------------------------------------------------------
# The metrics of a store as Prometheus reads them: `GET /metrics`.

METRICS_PATH: Final = b"/metrics"
METRICS_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


def exposition(store: HasMetrics) -> bytes:
    """The metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(store))
    return generate_latest(registry)


# --------------------------------------------------------------------------------------------------
# The OpenAPI document of a server, made from the declarations by which it checks requests.

_ERROR: Final = {
    "type": "object",
    "required": ["error", "what", "remedy", "fields"],
    "properties": {
        "error": {"type": "string", "description": "the class in kvstore.errors"},
        "what": {"type": "string"},
        "remedy": {"type": "string"},
        "fields": {"type": "object"},
    },
    "additionalProperties": False,
}
_TOKEN_SCHEMA: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "writer, or writer.number: the server does the request once",
    "schema": {"type": "string", "pattern": f"^{TOKEN_PATTERN}$"},
}
_CHANGESET: Final = {
    "name": "Kvstore-Changeset",
    "in": "header",
    "description": "the name of an open changeset, which the write belongs to",
    "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
}
_ROWS: Final = results.fields(rows=results.items(results.ANY_OBJECT), whole=results.FLAG).schema
_OF_ALL: Final = (UsageError, AccessDeniedError, RetryableError, StorageError)
"""Errors that any verb may raise: the request is wrong, or is refused, or comes at a bad moment."""
_MEANINGS: Final = {
    400: "the request is not as this document describes it",
    401: "a caller without a token that the server knows",
    403: "the caller has no right to it",
    404: "the request names something that is not there",
    409: "the state of the store refuses the request; nothing was done",
    410: "the history of this time is gone",
    412: "the condition does not hold; nothing was done",
    413: "the request is too large",
    415: "a body of another type",
    425: "the time was not written yet",
    500: "the storage has failed, or the server has a defect",
    503: "surely not done: try again",
    507: "the disk is full",
}


def openapi(verbs: Iterable[ServedVerb]) -> dict[str, Any]:
    """The document (OpenAPI 3.1)."""
    verbs = list(verbs)
    paths: dict[str, Any] = {KEYS_PATH + "{key}": _of_keys(verbs)}
    for verb in verbs:
        paths[VERBS_PATH + verb.declared.name] = _of_verb(verb.declared, verb.text)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvstore",
            "version": __version__,
            "description": "Arguments of a POST may also be in its query, each in one place. A "
            "path that takes GET takes HEAD as well. Every other method is answered with 405.",
        },
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, "Bytes": VALUE.schema, "Time": TIME.schema},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _of_keys(verbs: Iterable[ServedVerb]) -> dict[str, Any]:
    octets = {OCTETS_TYPE: {"schema": {"type": "string", "format": "binary"}}}
    found: dict[str, Any] = {}
    for served in verbs:
        verb, method = served.declared, served.declared.key_method
        if not method:
            continue
        key = {
            "name": "key",
            "in": "path",
            "required": True,
            "description": "the bytes of the key, percent-encoded",
            "schema": verb.parameters["key"].query_schema,
        }
        query = {name: kind for name, kind in verb.parameters.items() if name not in _OF_PATH}
        assert verb.result is not None
        answer: dict[str, Any] = {JSON_TYPE: {"schema": verb.result.schema}}
        operation = _operation(verb, served.text, octets | answer if method == "GET" else answer)
        operation["operationId"] = f"{verb.name}_key"
        operation["parameters"] = [key, *_query(query), *_headers(verb)]
        if method == "PUT":
            # A request without a body sets the empty value.
            operation["requestBody"] = {"required": False, "content": octets}
            operation["responses"]["413"] = _failure(413)
        if method == "GET":
            absent = results.fields(found=results.Result({"const": False}, bool)).schema
            operation["responses"]["404"] = {
                "description": "the key is absent",
                "content": {JSON_TYPE: {"schema": absent}},
            }
        found[method.lower()] = operation
    return found


_OF_PATH: Final = ("key", "value")


def _of_verb(verb: Verb[Any], text: str) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if not verb.has_json or verb.rows is not None:
        answer[ARROW_TYPE] = {}
    shown = [verb.result.schema] if verb.result is not None and verb.has_json else []
    if ARROW_TYPE in answer:
        shown.append(_ROWS)
    answer[JSON_TYPE] = {"schema": shown[0] if len(shown) == 1 else {"oneOf": shown}}
    posted = _operation(verb, text, answer)
    posted["parameters"] = _headers(verb)
    content: dict[str, Any] = {}
    takes_json = verb.rows is None or any(kind.is_rows for kind in verb.parameters.values())
    schema = _arguments(verb)
    if takes_json:
        content[JSON_TYPE] = {"schema": schema}
    if verb.rows is not None:
        columns = ", ".join(f"{field.name}: {field.type}" for field in verb.rows) or "any columns"
        described = f"an Arrow IPC stream of {columns}; other arguments are in the query"
        content[ARROW_TYPE] = {"schema": {"description": described}}
    if verb.rows is not None and not takes_json:
        posted["parameters"] += _query(verb.parameters)
    is_required = bool(schema.get("required") or verb.one_of) or not takes_json
    posted["requestBody"] = {"required": is_required, "content": content}
    for status in (413, 415):
        posted["responses"][str(status)] = _failure(status)
    found = {"post": posted}
    if "GET" in verb.methods:
        read = _operation(verb, text, answer)
        read["operationId"] = f"{verb.name}_by_query"
        read["parameters"] = _query(verb.parameters)
        found["get"] = read
    return found


def _arguments(verb: Verb[Any]) -> dict[str, Any]:
    """The schema of the JSON object of a call: the rules of `Verb.read`."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(kind) for name, kind in verb.parameters.items()},
        "additionalProperties": False,
    }
    required = [name for name, kind in verb.parameters.items() if kind.is_required]
    if required:
        schema["required"] = required
    if verb.one_of:
        schema["anyOf"] = [{"required": [name]} for name in verb.one_of]
    if verb.apart:
        schema["allOf"] = [{"not": {"required": list(pair)}} for pair in verb.apart]
    if verb.needs:
        schema["dependentRequired"] = {one: [other] for one, other in verb.needs}
    return schema


def _operation(verb: Verb[Any], text: str, content: dict[str, Any]) -> dict[str, Any]:
    statuses = {401, *map(status_of_class, (*_OF_ALL, *verb.errors))}
    if verb.right != READ:
        statuses.add(status_of_class(OutOfSpaceError))
    if verb.is_grouped:
        statuses.add(status_of_class(UnknownChangesetError))
    return {
        "operationId": verb.name,
        "description": f"{text} Needs the right `{verb.right}`.",
        "responses": {
            "200": {"description": "done", "content": content},
            **{str(status): _failure(status) for status in sorted(statuses)},
        },
    }


def _failure(status: int) -> dict[str, Any]:
    error = {"$ref": "#/components/schemas/Error"}
    return {"description": _MEANINGS[status], "content": {JSON_TYPE: {"schema": error}}}


def _headers(verb: Verb[Any]) -> list[dict[str, Any]]:
    return [_TOKEN_SCHEMA] * verb.once + [_CHANGESET] * verb.is_grouped


def _schema(kind: Parameter) -> Schema:
    """The schema of an argument in JSON. The commonest ones have names."""
    for name, named in (("Bytes", VALUE), ("Time", TIME)):
        if kind.schema is named.schema and not kind.is_nullable:
            return {"$ref": f"#/components/schemas/{name}"}
    return kind.json_schema


def _query(parameters: Mapping[str, Parameter]) -> list[dict[str, Any]]:
    found = []
    for name, kind in parameters.items():
        schema = _schema(kind) if kind.query_schema is None else kind.query_schema
        if schema:
            found.append(
                {"name": name, "in": "query", "required": kind.is_required, "schema": schema}
            )
    return found


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


class CallerGoneError(ConnectionResetError):
    """The caller went away before its request was whole: nothing was done, and nobody is told."""


def arguments_of(
    head: Head, verb: Verb[Any], body: bytes
) -> tuple[dict[str, Any], pa.Table | None]:
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


def _table(body: bytes, schema: pa.Schema) -> pa.Table:
    """The rows of an Arrow stream, checked in full: their buffers come from a stranger. An empty
    schema takes all columns."""
    try:
        with pa.ipc.open_stream(body) as reader:
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


def parsed_bytes(head: Head, body: bytes) -> int:
    """The memory that the arguments in a body take beside their texts, about: 0 for a short body,
    and for Arrow."""
    if len(body) <= SERVER_SHORT_BYTES_MAX or content_type(head) != JSON_TYPE:
        return 0
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    return len(_TEXTS.sub(b"", marks)) * JSON_ITEM_BYTES


_NO_MARKS: Final = bytes(set(range(256)) - set(b'"[{,'))
"""All bytes but the ones that begin an item of JSON, or a text."""
_TEXTS: Final = re.compile(rb'"[^"]*"')


def content_type(head: Head) -> str:
    """The type of the body, without its parameters."""
    return head.headers.get(b"content-type", b"").partition(b";")[0].strip().decode("latin-1")


async def read_body(receive: Receive, most: int) -> bytes:
    """The body of a request. Raises `UsageError` if it is longer or slower than it may be, and
    `CallerGoneError`."""
    parts: list[bytes] = []
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
            raise RequestError(what, "send smaller batches", status=413)
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_form(head: Head, receive: Receive) -> bytes:
    """The body of a request of the page. Raises `UsageError` for a long one."""
    length = head.length
    if length is None or length > PAGE_FORM_BYTES_MAX:
        remedy = f"send {PAGE_FORM_BYTES_MAX} bytes at most"
        raise RequestError("a form that is too long", remedy, status=413)
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
        raise UsageError(
            f"the rest of the request did not come within {seconds:.3g} s", "send it faster"
        ) from error
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
# The server as an ASGI application: HTTP requests in, calls of the service, answers out.
#
# A service mounts it into its own application, and `kvstore serve` runs it alone:
#
#     app.mount("/flights", kvstore.server.app(store, tokens=[...]))
#
# Short reads and commits that wait for nobody are done on the event loop, because a thread costs
# more than they do. Everything else is done by threads, `SERVER_THREADS_MAX` at most; answers of
# many rows are made by few others, because each is in memory several times while it is made.
#
# Invariants
# 1. A request is bounded in bytes and in time before it is read, and all requests together in
#    bytes.
# 2. Each failure is answered by one error of the tree, as JSON; a bug of ours is logged, and
#    answered without its details.
# 3. A stream has one large part in memory, and a client must take it in bounded time.

Scope: TypeAlias = "MutableMapping[str, Any]"

_KEYS: Final = KEYS_PATH.encode()
_VERBS: Final = VERBS_PATH.encode()
_OPENAPI: Final = _VERBS + b"openapi.json"
_KEY_VERBS: Final = {each.key_method: each for each in VERBS.values() if each.key_method}
_KEY_METHODS: Final = ("GET", "HEAD", "PUT", "DELETE")
_READING: Final = ("GET", "HEAD")
_DOCUMENT: Final = (*_READING, "POST")  # by which clients call any name
_LOGGER: Final = logging.getLogger("kvstore.remote.server")


class App:
    """An ASGI application that serves one store; see `app`."""

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        tokens: Iterable[Token] | Tokens | None = None,
        verbs: Sequence[ServedVerb] = (),
        make_page: Callable[[Store, Tokens | None], Page] = Page,
    ) -> None:
        # The application may open it after a change of the directory.
        self._source = store if isinstance(store, Store) else require_path(store)
        self._make_page = make_page
        self._page: Page | None = None
        self._tokens = tokens if tokens is None or isinstance(tokens, Tokens) else Tokens(tokens)
        self._verbs = verbs
        self._process = os.getpid()
        """The process that has the threads."""
        self._lock = threading.Lock()
        self._service: Service | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._waiters: ThreadPoolExecutor | None = None
        self._makers: ThreadPoolExecutor | None = None
        self._bytes = 0
        self._streams = self._waits = 0
        self._syncs: WeakKeyDictionary[asyncio.AbstractEventLoop, Syncs] = WeakKeyDictionary()

    # -- beginning and end ------------------------------------------------------------------

    @property
    def service(self) -> Service:
        """The service. A store that was given by its path is opened at the first use."""
        if self._service is None:
            with self._lock:
                if self._service is None:
                    given, self._process = self._source, os.getpid()
                    store = given if isinstance(given, Store) else opening.open(given)
                    self._threads = ThreadPoolExecutor(SERVER_THREADS_MAX, "kvstore-server")
                    self._waiters = ThreadPoolExecutor(SERVER_WAITS_MAX, "kvstore-waiter")
                    self._makers = ThreadPoolExecutor(SERVER_MAKERS_MAX, "kvstore-maker")
                    self._service = Service(store, self._verbs)
                    own(self._service, f"the server of {store!r}")
        return self._service

    @property
    def tokens(self) -> Tokens | None:
        """The tokens, of which every call needs one; None if calls need none."""
        return self._tokens

    @property
    def has_tokens(self) -> bool:
        """Whether every call needs a token."""
        return self._tokens is not None

    def close(self) -> None:
        """End the threads, and close a store that this application has opened. Repeatable. Does
        nothing in a process that was forked after the first request."""
        if os.getpid() != self._process:
            return
        with self._lock:
            service, self._service = self._service, None
            threads, self._threads = self._threads, None
        for each in (threads, self._waiters, self._makers):
            if each is not None:
                each.shutdown(wait=True, cancel_futures=True)
        if service is not None:
            service.changesets.close()
            if not isinstance(self._source, Store):
                service.store.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            await self._serve(head_of(scope), receive, send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:  # a websocket
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            try:
                _ = self.service
            except KVStoreError as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
        self.close()
        await send({"type": "lifespan.shutdown.complete"})

    # -- one request ------------------------------------------------------------------------

    async def _serve(self, head: Head, receive: Receive, send: Send) -> None:
        if head.method == "HEAD":
            send = partial(send_bare, send)
        taken, status = 0, 0
        try:
            if head.path == b"/healthz":
                require_method(head, _READING)
                await send_json(send, {"ok": True})
                return
            if is_of_page(head.path):
                await self._serve_page(head, receive, send)
                return
            status = 401  # of a caller without a token that is known
            access = self._admit(head)
            status = 0
            length = head.length
            if length is None or length > SERVER_BODY_BYTES_MAX:
                if length is not None:
                    raise RequestError(
                        f"a request of {length} bytes, at most {SERVER_BODY_BYTES_MAX} are taken",
                        "send smaller batches, or import the data",
                        status=413,
                    )
                length = SERVER_BODY_BYTES_MAX
            self._require_room(length)
            self._bytes += length
            taken = length
            body = await read_body(receive, length) if length else b""
            await self._answer(head, access, body, receive, send)
            self._count()
        except KVStoreError as error:
            self._count(failed=True)
            await send_error(send, error, status if self.has_tokens else 0)
        except CallerGoneError:
            return  # no error of ours: a stranger must not fill the log
        except (BrokenStreamError, asyncio.CancelledError, OSError) as error:
            if isinstance(error, BrokenStreamError):
                self._count(failed=True)
            raise
        except Exception as error:
            if is_cut_off(error):
                raise CallerGoneError("the client has gone") from error
            self._count(failed=True)
            _LOGGER.exception("a call of %s failed", head.path[:100])
            await send_error(send, DEFECT)
            raise error
        finally:
            self._bytes -= taken

    def _count(self, *, failed: bool = False) -> None:
        """Count a request, unless the application was closed meanwhile."""
        service = self._service
        with suppress(KVStoreError):  # a forked child has no service
            if service is not None:
                service.store.requests.count(failed=failed)

    async def _serve_page(self, head: Head, receive: Receive, send: Send) -> None:
        """Answer a request of the page, by a thread."""
        body = await read_form(head, receive)
        answer = await self._in_thread(partial(self._page_answer, head, body))
        await send_whole(send, answer.status, answer.kind, answer.body, answer.headers)

    def _page_answer(self, head: Head, body: bytes) -> PageAnswer:
        if self._page is None:
            require_templates()
            self._page = self._make_page(self.service.store, self._tokens)
        return self._page.answer(head, body)

    def _admit(self, head: Head) -> Grant:
        """The access of the caller. Raises `AccessDeniedError`."""
        if self._tokens is None:
            head.require_local()
            return WHOLE
        return self._tokens.access(head.headers.get(b"authorization", b""))

    async def _answer(
        self, head: Head, access: Grant, body: bytes, receive: Receive, send: Send
    ) -> None:
        service, path = self.service, head.path
        if path.startswith(_KEYS):
            await self._answer_key(service, head, access, body, receive, send)
            return
        if path == METRICS_PATH:
            require_method(head, _READING)
            access.require(READ)
            access.require_whole("metrics")
            text = await self._in_thread(partial(exposition, service.store))
            await send_whole(send, 200, METRICS_TYPE, text)
            return
        if not path.startswith(_VERBS):
            raise NotFoundError("no such path", "see /v1/openapi.json")
        if path == _OPENAPI:
            require_method(head, _DOCUMENT)
            await send_json(send, openapi(service.verbs.values()))
            return
        verb = service.verb(path[len(_VERBS) :].decode("utf-8", "replace"))
        parsed = parsed_bytes(head, body)
        if parsed > SERVER_MEMORY_BYTES_MAX:
            raise UsageError("a JSON of too many items", "send less at a time, or an Arrow stream")
        self._require_room(parsed)
        self._bytes += parsed
        try:
            fields, table = arguments_of(head, verb.declared, body)
            answer = await self._run(service, verb, access, fields, table, head, len(body))
        finally:
            self._bytes -= parsed
        await self._reply(head, answer, receive, send)

    def _require_room(self, size: int) -> None:
        """Raise `RetryableError` while the other requests leave no room for `size` bytes."""
        if self._bytes + size > SERVER_MEMORY_BYTES_MAX:
            raise RetryableError("the server has requests of too many bytes", "try again")

    async def _run(
        self,
        service: Service,
        verb: ServedVerb,
        access: Grant,
        fields: dict[str, Any],
        table: pa.Table | None,
        head: Head,
        size: int,
    ) -> Answer:
        """The answer of a verb: on the event loop if it is short, else by a thread."""
        declared = verb.declared
        if declared.is_short and size <= SERVER_SHORT_BYTES_MAX and "read_at" not in fields:
            done = service.run_short(verb, access, fields, table, head.token, head.changeset)
            if done is not None:
                answer, upper = done
                if upper:
                    await self._durable(service, upper)
                return answer
        args = (verb, access, fields, table, head.token, head.changeset)
        run = partial(service.run, *args)
        return await (self._wait(run) if declared.waits else self._in_thread(run))

    async def _wait(self, work: Callable[[], T]) -> T:
        """Do work that waits for others, by a thread that nothing else needs."""
        if self._waits >= SERVER_WAITS_MAX:
            raise RetryableError(f"{self._waits} callers of the server wait", "try again later")
        self._waits += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._waiters, work)
        finally:
            self._waits -= 1

    async def _durable(self, service: Service, upper: int) -> None:
        """Wait for the disk. The commits of one event loop wait together."""
        loop = asyncio.get_running_loop()
        syncs = self._syncs.get(loop)
        if syncs is None:
            wait = service.store.requests.wait_durable
            syncs = self._syncs[loop] = Syncs(lambda upper: self._in_thread(partial(wait, upper)))
        await syncs.wait(upper)

    async def _answer_key(
        self,
        service: Service,
        head: Head,
        access: Grant,
        body: bytes,
        receive: Receive,
        send: Send,
    ) -> None:
        require_method(head, _KEY_METHODS)
        declared = _KEY_VERBS["GET" if head.method == "HEAD" else head.method]
        verb = service.verb(declared.name)
        key = unquoted(head.path[len(_KEYS) :])
        fields = fields_of(head.query) if head.query else {}
        if "key" in fields or "value" in fields:
            raise UsageError("a key and a value in the query", "the path is the key")
        fields["key"] = key
        if not declared.is_read:
            if head.method == "PUT":
                fields["value"] = body
            answer = await self._run(service, verb, access, fields, None, head, len(body))
            await self._reply(head, answer, receive, send)
            return
        access.require(declared.right)
        is_long = service.store.requests.has_due  # then the read writes first
        if head.wants_json:
            read = partial(service.run, verb, access, fields)
            await self._reply(
                head, await self._in_thread(read) if is_long else read(), receive, send
            )
            return
        look_up = partial(service.value, access, fields)
        value = await self._in_thread(look_up) if is_long else look_up()
        if value is None:
            await send_json(send, {"found": False}, status=404)
        else:
            await send_whole(send, 200, OCTETS_TYPE, value)

    # -- answers ----------------------------------------------------------------------------

    async def _reply(self, head: Head, answer: Answer, receive: Receive, send: Send) -> None:
        if not isinstance(answer, pa.RecordBatchReader):
            await send_json(send, answer)
        elif head.wants_json:
            rows, whole = await self._made(partial(json_rows, answer))
            await send_json(send, {"rows": rows, "whole": whole})
        else:
            await self._stream(answer, receive, send)

    async def _stream(self, reader: pa.RecordBatchReader, receive: Receive, send: Send) -> None:
        if self._streams >= SERVER_STREAMS_MAX:
            raise RetryableError(f"the server has {self._streams} open streams", "try again later")
        self._streams += 1
        parts = arrow_parts(reader)
        try:
            first = await self._made(partial(next, parts))
            await send(start_of(200, ARROW_TYPE))
            await send_part(send, first)
            with Departure(receive) as departure:
                following = partial(next, parts, b"")
                while await send_part(send, await self._made(following)):
                    if departure.has_come:
                        return
        finally:
            self._streams -= 1
            await self._made(partial(_end, parts, reader))

    async def _made(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._makers, work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def app(
    store: Store | str | os.PathLike[str],
    tokens: Iterable[Token] | None = None,
    *,
    verbs: Sequence[ServedVerb] = (),
    sections: Sequence[Section] = (),
) -> App:
    """An ASGI application that serves `store`: an open store, or the path of one.

    A store given by its path is opened at the first request (so in a worker, behind its fork) and
    closed when the application ends. With `tokens` every call needs one. Without tokens only
    programs on this machine are served, and nobody behind a proxy; a browser on this machine sees
    the page at `/ui/` alone, and changes nothing. `verbs` adds verbs to the verbs of every store,
    and `sections` adds sections to its page. Costs nothing until it is called.
    """
    return App(store, tokens=tokens, verbs=verbs, make_page=partial(Page, sections=sections))


def _end(parts: Iterator[bytes], reader: pa.RecordBatchReader) -> None:
    """End a stream, also one that was not read to its end: it releases its history."""
    close = getattr(parts, "close", None)
    if close is not None:
        close()
    reader.close()
