"""Requests, and how their answers are read: bytes in, bytes out, no socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, repeat
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast
from urllib.parse import quote, urlencode

import numpy as np
import pyarrow as pa

from kvstore.base.arguments import SPAN, require_value
from kvstore.base.span import Span, require_key
from kvstore.base.timestamp import Timestamp
from kvstore.errors import KVStoreError, StorageError, UsageError
from kvstore.limits import (
    BATCH_BYTES_MAX,
    CLIENT_URL_KEY_BYTES_MAX,
    SERVER_LARGE_BYTES_MAX,
    SERVER_STREAM_ROWS,
)
from kvstore.mvcc import OpenWriteSet
from kvstore.mvcc.arrow import binary_array
from kvstore.mvcc.write_set import require_plain
from kvstore.remote.protocol import (
    ARROW_TYPE,
    ERROR_NAME,
    JSON_TYPE,
    KEYS_PATH,
    VERBS_PATH,
    WRITES_SCHEMA,
    WriteOp,
    arguments_json,
    failure_of,
    from_json,
    quoted,
)
from kvstore.remote.verbs import BATCH, Verb
from kvstore.tables.definition import entries_among, is_entry
from kvstore.timeline.reserved import FIRST_ROW
from kvstore.transaction import ReadSet

# --------------------------------------------------------------------------------------------------
# The writes of a client, until they are sent.


class SentWriteSet(OpenWriteSet):
    """The writes of a client. The server makes the entries of indexes, and knows which keys belong
    to tables; a transaction of the client reads its own entries here."""

    __slots__ = ("entries", "has_rows")

    def __init__(self, whose: str = "the write set", size_max: int | None = None) -> None:
        super().__init__(whose, BATCH_BYTES_MAX if size_max is None else size_max)
        self.entries: set[bytes] = set()
        self.has_rows = False

    def put_expiring(self, key: bytes, value: bytes, due: int) -> None:
        """Set `key` to `value` until `due`, an expiry as `sent_expiry` makes it."""
        self.put(key, value)
        self._expire(bytes(key), due)

    def expiries(self) -> list[int | None]:
        """The expiry of each point."""
        expiring = self.expiring or {}
        found = ((value, expiring.get(key)) for key, value in self._points.items())
        return [None if value is None or put is None else put.due for value, put in found]

    def put_rows(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        due: int | list[int | None] | None = None,
        rows: Sequence[bytes] = (),
    ) -> None:
        """Set keys of a table, until `due`, an expiry as `sent_expiry` makes it. A list is read
        from the rows, which the server does itself."""
        super().put_rows(keys, values)
        if isinstance(due, int):
            for key, row in zip(keys, rows, strict=True):
                self._expire(key, due, row)
        self.has_rows = True
        self.entries.update(entries_among(keys))

    def delete_range(
        self, start: bytes | None, end: bytes | None, prefix: bytes | None = None
    ) -> None:
        """Delete plain keys. The server would take a span among the keys of tables for one that
        their own calls delete."""
        span = Span.to_delete(start, end, prefix)
        require_plain(span.start)
        super().delete_range(span.start, span.plain().end)

    def delete_row_range(self, start: bytes, end: bytes) -> None:
        """Delete a span of keys of a table."""
        super().delete_row_range(start, end)
        self.has_rows = self.has_rows or start >= FIRST_ROW

    def delete_rows(self, keys: Iterable[bytes]) -> None:
        """Delete keys of a table."""
        keys = list(keys)
        super().delete_rows(keys)
        self.has_rows = True
        self.entries.update(entries_among(keys))


# --------------------------------------------------------------------------------------------------
# An answer of a server: its head, parsed from bytes, and its body as one of the types we know.
#
# Invariants
# 1. A head is bounded. A body takes memory for the bytes that have come, and not for the bytes that
#    it declares. A server may be hostile too.
# 2. An answer that does not parse raises `StorageError`: nobody knows whether the server did the
#    work.

_PASSED: Final = frozenset(
    {
        *(b"allow", b"location", b"set-cookie", b"referrer-policy"),
        *(b"content-security-policy", b"x-content-type-options", b"x-frame-options"),
        *(b"cross-origin-opener-policy", b"cross-origin-resource-policy"),
    }
)


class ReplyHead(NamedTuple):
    """The head of an answer. `length` is None where the body comes in chunks."""

    status: int
    kind: str
    length: int | None
    is_last: bool
    """Whether the server closes the connection behind the answer."""
    passed: tuple[tuple[bytes, bytes], ...] = ()
    """The headers for whoever is behind the caller: of a page, and of an error."""


class Reply(NamedTuple):
    """A whole answer. `where` names the server."""

    status: int
    kind: str
    body: bytes
    where: str

    def json(self) -> dict[str, Any]:
        """The JSON object of the answer. Raises `StorageError` for anything else."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise strange(self.where, f"no JSON: {error}") from error
        if not isinstance(found, dict):
            raise strange(self.where, "no JSON object")
        return _Fields(found, self.where)

    def table(self) -> pa.Table:
        """The rows of the answer. Raises `StorageError`."""
        try:
            with pa.ipc.open_stream(self.body) as reader:
                return reader.read_all()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise strange(self.where, f"no Arrow stream: {error}") from error

    @property
    def error(self) -> KVStoreError | None:
        """The error that the server answered with, if it did."""
        if self.status < 400:
            return None
        fields: Any = None
        if self.kind == JSON_TYPE:
            try:
                fields = json.loads(self.body)
            except (ValueError, RecursionError):
                fields = None
            if self.status == 404 and isinstance(fields, dict) and fields.get("found") is False:
                return None  # the key is absent
        return failure_of(fields, status=self.status, where=self.where)


class _Fields(dict[str, Any]):
    """The fields of an answer. A field that is missing raises `StorageError`: another server is at
    the address."""

    def __init__(self, found: dict[str, Any], where: str) -> None:
        super().__init__(found)
        self._where = where

    def __missing__(self, name: str) -> Any:
        raise strange(self._where, f"JSON without {name!r}")


def read_head(head: bytes, where: str) -> ReplyHead:
    """Parse the head of an answer, up to the empty line. Raises `StorageError`."""
    lines = head.split(b"\r\n")
    status = lines[0][9:12]
    if not lines[0].startswith(b"HTTP/1.") or not status.isdigit():
        raise strange(where, f"no HTTP: {lines[0][:80]!r}")
    kind, length, is_last = "", None, False
    passed: tuple[tuple[bytes, bytes], ...] = ()
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name == b"content-length":
            text = value.strip()
            if not text.isdigit() or len(text) > 18:
                raise strange(where, "a content-length that is no number")
            length = int(text)
        elif name == b"content-type":
            kind = value.partition(b";")[0].strip().decode("latin-1")
        elif name == b"connection":
            is_last = value.strip().lower() == b"close"
        elif name in _PASSED:
            passed += ((name, value.strip()),)
    return ReplyHead(int(status), kind, length, is_last, passed)


def told_at_end(body: bytes, kind: str, where: str) -> KVStoreError | None:
    """The error in the last batch of an Arrow stream that broke off, if the server told it."""
    if kind != ARROW_TYPE:
        return None
    try:
        with pa.ipc.open_stream(body) as reader:
            while True:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
                if not batch.num_rows:
                    return told_by(metadata, where)
    except (StopIteration, pa.ArrowException, OSError, ValueError):
        return None


def told_by(metadata: pa.KeyValueMetadata | None, where: str) -> KVStoreError:
    """The error in the metadata of a batch without rows."""
    told = None if metadata is None else dict(metadata).get(ERROR_NAME)
    if told is None:
        return strange(where, "a batch without rows")
    try:
        found = json.loads(told)
    except (ValueError, RecursionError) as error:
        return strange(where, f"an error that is no JSON: {error}")
    return failure_of(found, status=500, where=where)


def strange(where: str, problem: str) -> StorageError:
    """The error for an answer that no server of ours gives."""
    return StorageError(
        f"{where} answered with {problem}", "check the address, and the proxies on the way"
    )


# --------------------------------------------------------------------------------------------------
# A request of a verb, and how its answer is read: bytes in, bytes out, no socket.

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ClientRequest(Generic[T_co]):
    """One request, and the reader of its answer. The flags are those of the verb."""

    method: str
    target: str
    read: Callable[[Reply], T_co]
    body: bytes | pa.Buffer = b""
    kind: str = ""
    is_read: bool = False
    once: bool = False
    is_repeatable: bool = False


def request(verb: Verb[T], arguments: Mapping[str, Any]) -> ClientRequest[T]:
    """The request of a verb with these arguments; see `Verb.sent`. Raises `UsageError`."""
    if verb.key_method:
        key = require_key(arguments["key"])
        if len(key) <= CLIENT_URL_KEY_BYTES_MAX:
            return _of_key(verb, key, arguments)
    body = json.dumps(verb.sent(arguments)).encode()
    return _of_verb(verb, VERBS_PATH + verb.name, partial(_result, verb), body, JSON_TYPE)


def rows_request(
    verb: Verb[Any], rows: pa.Table, arguments: Mapping[str, Any], read: Callable[[Reply], T]
) -> ClientRequest[T]:
    """The request of a verb with rows as an Arrow stream. Its arguments are in the query."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows, SERVER_STREAM_ROWS)
    target = VERBS_PATH + verb.name + _query(verb.sent(arguments))
    return _of_verb(verb, target, read, sink.getvalue(), ARROW_TYPE)


def request_by_name(name: str, arguments: Mapping[str, Any]) -> ClientRequest[dict[str, Any]]:
    """The request of a verb that may be unknown here. It is sent once, with the arguments that are
    not None as they are."""
    return ClientRequest(
        "POST", VERBS_PATH + name, Reply.json, arguments_json(arguments), JSON_TYPE
    )


def batch_request(
    writes: SentWriteSet,
    durability: str | None,
    reads: ReadSet | None = None,
    read_at: int | None = None,
    *,
    definitions: Mapping[str, str] | None = None,
) -> ClientRequest[Timestamp]:
    """A batch; with `reads` at the time `read_at`, the commit of a transaction. `definitions` has
    the digests of the tables whose rows it sets. Entries of indexes stay here."""
    arguments = {
        "durability": durability,
        "read_at": read_at,
        "definitions": json.dumps(definitions) if definitions else None,
        "rows": True if read_at is not None and writes.has_rows else None,
    }
    return _writes_request(_columns(writes, reads), arguments)


def columns_request(
    rows: Sequence[tuple[pa.Array, pa.Array]], due: int | None, definitions: Mapping[str, str]
) -> ClientRequest[Timestamp]:
    """A batch that sets encoded rows of tables, arrays of keys and of values, until `due`, an
    expiry as `sent_expiry` makes it. The last row of a key wins. Copies the arrays once."""
    keys, values = (pa.chunked_array(list(each)) for each in zip(*rows, strict=True))
    columns = [pa.chunked_array([np.full(len(keys), WriteOp.PUT, np.uint8)]), keys, values]
    names = ["op", "key", "value"]
    if due is not None:
        columns.append(pa.chunked_array([np.full(len(keys), due, np.int64)]))
        names.append("expires")
    schema = pa.schema([WRITES_SCHEMA.field(name) for name in names])
    arguments = {"definitions": json.dumps(definitions)}
    return _writes_request(pa.table(columns, schema=schema), arguments)


def _writes_request(writes: pa.Table, arguments: Mapping[str, Any]) -> ClientRequest[Timestamp]:
    found = rows_request(BATCH, writes, arguments, _committed)
    if len(found.body) > SERVER_LARGE_BYTES_MAX:
        raise UsageError(
            f"the writes have {len(found.body)} bytes, at most {SERVER_LARGE_BYTES_MAX} travel",
            "commit smaller ones, or import the data (bulk.Import)",
        )
    return found


def bounds(span: Span) -> dict[str, bytes | None]:
    """The arguments of a verb for a span."""
    span = SPAN.check("span", span)
    return {"start": span.start or None, "end": span.end}


# -- inside ---------------------------------------------------------------------------------

_ABSENT: Final = 404


def _of_key(verb: Verb[T], key: bytes, arguments: Mapping[str, Any]) -> ClientRequest[T]:
    """The request on the path of a key. The value is the body, the rest is in the query."""
    rest = {name: value for name, value in arguments.items() if name not in ("key", "value")}
    target = f"{KEYS_PATH}{quoted(key)}{_query(verb.sent(rest))}"
    if verb.key_method == "GET":
        return _of_verb(verb, target, _raw, method="GET")
    body = require_value(arguments["value"]) if "value" in verb.parameters else b""
    return _of_verb(verb, target, partial(_result, verb), body, method=verb.key_method)


def _of_verb(
    verb: Verb[Any],
    target: str,
    read: Callable[[Reply], Any],
    body: bytes | pa.Buffer = b"",
    kind: str = "",
    *,
    method: str = "POST",
) -> ClientRequest[Any]:
    flags = (verb.is_read, verb.once, verb.is_repeatable)
    return ClientRequest(method, target, read, body, kind, *flags)


def _result(verb: Verb[T], reply: Reply) -> T:
    assert verb.result is not None, "rows are read as they come"
    return verb.result.read(reply.json())


def _raw(reply: Reply) -> bytes | None:
    return None if reply.status == _ABSENT else reply.body


def _committed(reply: Reply) -> Timestamp:
    at = _result(BATCH, reply)
    if at is None:  # it has writes
        raise strange(reply.where, "no timestamp")
    return at


def _columns(writes: SentWriteSet, reads: ReadSet | None) -> pa.Table:
    """The operations of a batch, without a column that has nulls alone. 0.1 us a row."""
    # The set has dropped its points that a later range delete covers, so ranges come first.
    ranges = [each for each in writes.ranges if not is_entry(each[0])]
    points = writes.points
    expires: list[int | None] = writes.expiries() if writes.expiring else []
    if writes.entries:
        kept = [key not in writes.entries for key in points]
        points = dict(compress(points.items(), kept))
        expires = list(compress(expires, kept))
    known = [] if reads is None else list(reads.points())
    spans = [] if reads is None else [(span.start, span.end) for span in reads.spans()]
    before, behind = len(ranges), len(known) + len(spans)
    keys = [*(start for start, _ in ranges), *points, *known, *(start for start, _ in spans)]
    values: list[bytes | None] = [*repeat(None, before), *points.values(), *repeat(None, behind)]
    try:  # hot: each row is put
        columns = {"value": binary_array(cast("list[bytes]", values))}
        ops = bytes([WriteOp.PUT]) * len(keys)
    except TypeError:
        columns = {"value": pa.array(values, pa.binary())}
        ops = bytes([WriteOp.DELETE_RANGE]) * before
        ops += bytes(WriteOp.DELETE if each is None else WriteOp.PUT for each in points.values())
        ops += bytes([WriteOp.READ]) * len(known) + bytes([WriteOp.READ_RANGE]) * len(spans)
    columns |= {"op": pa.array(np.frombuffer(ops, np.uint8)), "key": binary_array(keys)}
    if ranges or spans:
        none = repeat(None, len(points) + len(known))
        ends = [*(end for _, end in ranges), *none, *(end for _, end in spans)]
        columns["end"] = pa.array(ends, pa.binary())
    if any(expires):
        dues = [*repeat(None, before), *expires, *repeat(None, behind)]
        columns["expires"] = pa.array(dues, pa.int64())
    fields = [field for field in WRITES_SCHEMA if field.name in columns]
    return pa.table([columns[field.name] for field in fields], schema=pa.schema(fields))


def _query(sent: Mapping[str, Any]) -> str:
    """JSON arguments as a query."""
    if not sent:
        return ""
    return "?" + urlencode({name: _in_query(each) for name, each in sent.items()}, quote_via=quote)


def _in_query(sent: Any) -> Any:
    if isinstance(sent, bool):
        return "true" if sent else "false"
    if isinstance(sent, float):
        return f"{sent:.6f}"  # a query has no exponents
    return from_json(sent, name="an argument") if isinstance(sent, dict) else sent
