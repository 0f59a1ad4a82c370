"""One exchange over ASGI: the body and the arguments of a request in, a whole answer out.

Invariants
1. A body is bounded in bytes, the time between two parts of it is bounded, and so is the time of
   the whole body, by its size.
2. Arrow data of a caller is checked in full before anything reads its buffers.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias, TypeVar

import pyarrow as pa

from kvstore.codec.json import read_object
from kvstore.errors import CorruptionError, KVStoreError, UsageError
from kvstore.limits import (
    JSON_ITEM_BYTES,
    PAGE_FORM_BYTES_MAX,
    SERVER_BYTES_S_MIN,
    SERVER_LARGE_PART_BYTES,
    SERVER_REQUEST_S_MAX,
    SERVER_SHORT_BYTES_MAX,
)
from kvstore.protocol import ARROW_TYPE, JSON_TYPE, failure_fields
from kvstore.server.head import Head, fields_of
from kvstore.server.status import RequestError, status_of
from kvstore.server.verbs import Verb

Message: TypeAlias = "MutableMapping[str, Any]"
Receive: TypeAlias = "Callable[[], Awaitable[MutableMapping[str, Any]]]"
Send: TypeAlias = "Callable[[MutableMapping[str, Any]], Awaitable[None]]"
T = TypeVar("T")


class CallerGoneError(ConnectionResetError):
    """The caller went away before its request was whole: nothing was done, and nobody is told."""


def arguments_of(head: Head, verb: Verb, body: bytes) -> tuple[dict[str, Any], pa.Table | None]:
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
