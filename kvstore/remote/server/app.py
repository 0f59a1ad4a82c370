"""The server as an ASGI application: HTTP requests in, calls of the service, answers out.

A service mounts it into its own application, and `kvstore serve` runs it alone:

    app.mount("/flights", kvstore.server.app(store, tokens=[...]))

Short reads and commits that wait for nobody are done on the event loop, because a thread costs
more than they do. Everything else is done by threads, `SERVER_THREADS_MAX` at most; answers of
many rows are made by few others, because each is in memory several times while it is made.

Invariants
1. A request is bounded in bytes and in time before it is read, and all requests together in
   bytes.
2. Each failure is answered by one error of the tree, as JSON; a bug of ours is logged, and
   answered without its details.
3. A stream has one large part in memory, and a client must take it in bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import pyarrow as pa
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvstore import opening
from kvstore.base.forks import own
from kvstore.base.paths import require_path
from kvstore.errors import KVStoreError, NotFoundError, RetryableError, UsageError
from kvstore.limits import (
    SERVER_BODY_BYTES_MAX,
    SERVER_LARGE_BYTES_MAX,
    SERVER_LARGE_MEMORY_BYTES_MAX,
    SERVER_MAKERS_MAX,
    SERVER_MEMORY_BYTES_MAX,
    SERVER_ROW_BYTES,
    SERVER_SHORT_BYTES_MAX,
    SERVER_SPOOL_BYTES_MAX,
    SERVER_STREAMS_MAX,
    SERVER_THREADS_MAX,
    SERVER_WAITS_MAX,
    VALUE_BYTES_MAX,
)
from kvstore.metrics.prometheus import HasMetrics, PrometheusCollector
from kvstore.remote.protocol import ARROW_TYPE, KEYS_PATH, OCTETS_TYPE, VERBS_PATH, unquoted
from kvstore.remote.server import log_lines
from kvstore.remote.server.document import openapi
from kvstore.remote.server.http import (
    DEFECT,
    Body,
    BrokenStreamError,
    CallerGoneError,
    Departure,
    Head,
    Receive,
    RequestError,
    Send,
    Syncs,
    UnreadBodyError,
    arguments_of,
    arrow_parts,
    content_type,
    fields_of,
    head_of,
    is_cut_off,
    json_rows,
    parsed_bytes,
    read_body,
    read_form,
    require_method,
    send_bare,
    send_error,
    send_json,
    send_part,
    send_whole,
    spool_body,
    start_of,
)
from kvstore.remote.server.invocation import Answer, ServedVerb
from kvstore.remote.server.page import Page, PageAnswer, Section, is_of_page, require_templates
from kvstore.remote.server.service import Service, VerbCall
from kvstore.remote.server.tokens import WHOLE, Grant, Token, Tokens
from kvstore.remote.server.watch import Callers, Watch
from kvstore.remote.verbs import BATCH, READ, VERBS, WRITE
from kvstore.store import Store

Scope: TypeAlias = "MutableMapping[str, Any]"
T = TypeVar("T")

_KEYS: Final = KEYS_PATH.encode()
_VERBS: Final = VERBS_PATH.encode()
_OPENAPI: Final = _VERBS + b"openapi.json"
_BATCH: Final = _VERBS + BATCH.name.encode()
_KEY_VERBS: Final = {each.key_method: each for each in VERBS.values() if each.key_method}
_KEY_METHODS: Final = ("GET", "HEAD", "PUT", "DELETE")
_READING: Final = ("GET", "HEAD")
_DOCUMENT: Final = (*_READING, "POST")  # by which clients call any name
_LOGGER: Final = logging.getLogger("kvstore.remote.server")


@contextmanager
def _timed(service: Service, verb: ServedVerb) -> Iterator[None]:
    """Tell how long the block took, if somebody wants to know of slow operations. A verb that waits
    for others is not slow."""
    slow = service.store.requests.slow
    if slow is None or verb.declared.blocks:
        yield
        return
    began = time.perf_counter()
    try:
        yield
    finally:
        slow.note(f"{verb.declared.name} of a client", time.perf_counter() - began)


def _require_owner(store: Store) -> None:
    """Raise `UsageError` for the handle of a guest: a server commits in its own process."""
    if store.stats().get("role") == "guest":
        raise UsageError(
            f"{store!r} does not own its store, and a server writes by itself",
            "serve it where it is owned, by more processes with kvstore serve --readers N; or call "
            "the handle in an application of your own: see docs/how-to/workers.md",
        )


class App:
    """An ASGI application that serves one store; see `app`."""

    measures: ClassVar = True
    """Whether it watches the store from its start on, for its page."""

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        tokens: Iterable[Token] | Tokens | None = None,
        verbs: Sequence[ServedVerb] = (),
        make_page: Callable[..., Page] = Page,
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
        self._callers = Callers()
        self._watch: Watch | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._waiters: ThreadPoolExecutor | None = None
        self._makers: ThreadPoolExecutor | None = None
        self.tells_requests = True
        """Whether requests are logged, if somebody wants to know of them."""
        self._bytes = self._spooled = 0
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            WeakKeyDictionary()
        )
        """Held while a large request is done: one at a time, for its memory."""
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
                    _require_owner(store)
                    self._threads = ThreadPoolExecutor(SERVER_THREADS_MAX, "kvstore-server")
                    self._waiters = ThreadPoolExecutor(SERVER_WAITS_MAX, "kvstore-waiter")
                    self._makers = ThreadPoolExecutor(SERVER_MAKERS_MAX, "kvstore-maker")
                    self._watch = Watch(store, self._callers)
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
            watch, self._watch, self._page = self._watch, None, None
        if watch is not None:
            watch.close()
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
            head = head_of(scope)
            agent = head.headers.get(b"user-agent", b"").decode("latin-1")
            with self._callers.calling(_address(scope), agent, _named(head)):
                if self.tells_requests and log_lines.tells_requests():
                    await log_lines.telling(partial(self._serve, head, receive), head, send)
                else:
                    await self._serve(head, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:  # a websocket
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            try:
                _ = self.service
                if self.measures:
                    self._watched().start()
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
        taken, spooled, status = 0, 0, 0
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
            length, most = head.length, _longest(head)
            if length is not None and length > most:
                raise UnreadBodyError(
                    f"a request of {length} bytes, at most {most} are taken",
                    "send smaller batches, or import the data",
                    status=413,
                )
            if length is None:
                length = SERVER_BODY_BYTES_MAX
            if length > SERVER_BODY_BYTES_MAX:
                access.require(WRITE)
                if self._spooled + length > SERVER_SPOOL_BYTES_MAX:
                    raise RetryableError("the server has large requests of too many bytes", _AGAIN)
                self._spooled += length
                spooled = length
                await self._serve_large(head, access, length, receive, send)
                self._count()
                return
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
            self._spooled -= spooled

    async def _serve_large(
        self, head: Head, access: Grant, length: int, receive: Receive, send: Send
    ) -> None:
        """Answer a request that waits in a temporary file for its turn. A client that sends slowly
        keeps disk, and nobody's turn."""
        body = await spool_body(receive, length, self._in_thread)
        loop = asyncio.get_running_loop()
        async with self._turns.setdefault(loop, asyncio.Lock()):
            await self._answer(head, access, body, receive, send)

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
            service, watch = self.service, self._watched()
            watch.start()
            self._page = self._make_page(service.store, self._tokens, watch=watch)
        return self._page.answer(head, body)

    def _watched(self) -> Watch:
        """What this server watches, once it has a service."""
        assert self._watch is not None, "the service has a watch"
        return self._watch

    def _admit(self, head: Head) -> Grant:
        """The access of the caller. Raises `AccessDeniedError`."""
        if self._tokens is None:
            head.require_local()
            head.require_release(self.service.store.path)
            return WHOLE
        return self._tokens.access(head.headers.get(b"authorization", b""))

    async def _answer(
        self, head: Head, access: Grant, body: Body, receive: Receive, send: Send
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
            if content_type(head) == ARROW_TYPE:
                raise RequestError(
                    f"an Arrow stream that unpacks to {parsed} bytes, at most "
                    f"{SERVER_MEMORY_BYTES_MAX} are taken",
                    "send smaller batches, or import the data",
                    status=413,
                )
            raise UsageError("a JSON of too many items", "send less at a time, or an Arrow stream")
        self._require_room(parsed)
        self._bytes += parsed
        try:
            with _timed(service, verb):
                parse = partial(arguments_of, head, verb.declared, body)
                size = len(body) + parsed
                is_short = size <= SERVER_SHORT_BYTES_MAX
                fields, table = parse() if is_short else await self._in_thread(parse)
                if table is not None:
                    _require_memory(size, table.num_rows)
                call = VerbCall(verb, access, fields, table, head.token, head.changeset)
                answer = await self._run(service, call, size)
        finally:
            self._bytes -= parsed
        await self._reply(head, answer, receive, send)

    def _require_room(self, size: int) -> None:
        """Raise `RetryableError` while the other requests leave no room for `size` bytes."""
        if self._bytes + size > SERVER_MEMORY_BYTES_MAX:
            raise RetryableError("the server has requests of too many bytes", _AGAIN)

    async def _run(self, service: Service, call: VerbCall, size: int) -> Answer:
        """The answer of a verb, whose request has `size` bytes: on the event loop if it is short,
        else by a thread."""
        declared = call.verb.declared
        if declared.is_short and size <= SERVER_SHORT_BYTES_MAX and "read_at" not in call.fields:
            done = service.run_short(call)
            if done is not None:
                answer, upper = done
                if upper:
                    await self._durable(service, upper)
                return answer
        run = partial(service.run, call)
        return await (self._wait(run) if declared.blocks else self._in_thread(run))

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
        body: Body,
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
                is_here = isinstance(body, bytes)
                fields["value"] = body if is_here else await self._in_thread(partial(bytes, body))
            call = VerbCall(verb, access, fields, None, head.token, head.changeset)
            with _timed(service, verb):
                answer = await self._run(service, call, len(body))
            await self._reply(head, answer, receive, send)
            return
        access.require(declared.right)
        is_long = service.store.requests.has_due  # then the read writes first
        if head.wants_json:
            read = partial(service.run, VerbCall(verb, access, fields))
            await self._reply(
                head, await self._in_thread(read) if is_long else read(), receive, send
            )
            return
        look_up = partial(service.value, access, fields)
        with _timed(service, verb):
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


_AGAIN: Final = "try again"


def _longest(head: Head) -> int:
    """Bytes of the longest request of its kind: a value, and a batch that need not be parsed at
    once, may be large."""
    if head.path == _BATCH and content_type(head) == ARROW_TYPE:
        return SERVER_LARGE_BYTES_MAX
    if head.method == "PUT" and head.path.startswith(_KEYS):
        return max(VALUE_BYTES_MAX, SERVER_BODY_BYTES_MAX)
    return SERVER_BODY_BYTES_MAX


def _require_memory(size: int, rows: int) -> None:
    """Raise `RequestError` for rows that would take too much memory as objects."""
    if size + rows * SERVER_ROW_BYTES > SERVER_LARGE_MEMORY_BYTES_MAX:
        raise RequestError(
            f"{rows} rows in one request", "send smaller batches, or import the data", status=413
        )


def _end(parts: Iterator[bytes], reader: pa.RecordBatchReader) -> None:
    """End a stream, also one that was not read to its end: it releases its history."""
    close = getattr(parts, "close", None)
    if close is not None:
        close()
    reader.close()


def _address(scope: Scope) -> str:
    """The address of a caller for people."""
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client and client[0] else "a Unix socket"


def _named(head: Head) -> str:
    """What a request asks for, without its keys."""
    if is_of_page(head.path):
        return "the page"
    if head.path.startswith(_KEYS):
        return f"{head.method[:10]} of a key"
    verb = head.path.removeprefix(_VERBS).decode("latin-1")
    return verb if verb in VERBS else "another path"


# --------------------------------------------------------------------------------------------------
# The metrics of a store as Prometheus reads them: `GET /metrics`.

METRICS_PATH: Final = b"/metrics"
METRICS_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


def exposition(store: HasMetrics) -> bytes:
    """The metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(store))
    return generate_latest(registry)
