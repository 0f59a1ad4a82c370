"""Requests of each verb, and how their answers are read: bytes in, bytes out, no socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import pyarrow as pa

from kvstore.base.arguments import is_many, key_list, require_integer, require_limit, require_value
from kvstore.base.span import Span, require_key
from kvstore.base.timestamp import (
    NS_PER_SECOND,
    OLDEST,
    OTHER_UNITS_MAX,
    TIMESTAMP_MAX,
    TimeLike,
    Timestamp,
    counts_from_now,
    is_oldest,
    is_plain_number,
    to_timestamp,
)
from kvstore.errors import KVStoreError, StorageError, UsageError
from kvstore.limits import BATCH_BYTES_MAX, CLIENT_URL_KEY_BYTES_MAX, SERVER_BODY_BYTES_MAX
from kvstore.loops.lookup import are_keys
from kvstore.mvcc import OpenWriteSet, Version
from kvstore.mvcc.arrow import binary_array
from kvstore.remote.protocol import (
    ARROW_TYPE,
    ERROR_NAME,
    JSON_TYPE,
    KEYS_PATH,
    LABELS_SCHEMA,
    READ_SCHEMA,
    VERBS_PATH,
    WRITES_SCHEMA,
    WriteOp,
    arguments_json,
    failure_of,
    from_json,
    quoted,
    span_fields,
    to_json,
)
from kvstore.tables.definition import is_entry
from kvstore.tables.joins import times_given
from kvstore.timeline.expiries import Expires, sent_expiry
from kvstore.transaction import UNCHECKED, ReadSet, Unchecked

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
        return [None if put is None or put.marked is not value else put.due for value, put in found]

    def put_rows(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        due: int | None = None,
        rows: Sequence[bytes] = (),
    ) -> None:
        """Set keys of a table, until `due`, an expiry as `sent_expiry` makes it."""
        super().put_rows(keys, values)
        if due is not None:
            for key, row in zip(keys, rows, strict=True):
                self._expire(key, due, row)
        self.has_rows = True
        self.entries.update(filter(is_entry, keys))

    def delete_rows(self, keys: Iterable[bytes]) -> None:
        """Delete keys of a table."""
        keys = list(keys)
        super().delete_rows(keys)
        self.has_rows = True
        self.entries.update(filter(is_entry, keys))


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
# Requests of each verb, and how their answers are read: bytes in, bytes out, no socket.
#
# Each function makes the request of the method of `Store` with its name, for each kind of client.

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ClientRequest(Generic[T_co]):
    """One request, and the reader of its answer.

    The server does a `once` request once, however often it comes. A request that `is_read` changes
    nothing, and one that `is_repeatable` changes nothing when it comes again.
    """

    method: str
    target: str
    read: Callable[[Reply], T_co]
    body: bytes | pa.Buffer = b""
    kind: str = ""
    is_read: bool = False
    once: bool = False
    is_repeatable: bool = False


def verb(
    name: str,
    fields: Mapping[str, Any],
    read: Callable[[Reply], T],
    **how: bool,
) -> ClientRequest[T]:
    """A verb with arguments as JSON. Arguments that are None are left out. `how` is a field of
    `ClientRequest`."""
    body = arguments_json(fields)
    return ClientRequest("POST", VERBS_PATH + name, read, body, JSON_TYPE, **how)


def of_rows(
    name: str, table: pa.Table, query: Mapping[str, Any], read: Callable[[Reply], T], **how: bool
) -> ClientRequest[T]:
    """A verb with rows as an Arrow stream. Its other arguments are in the query."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    target = VERBS_PATH + name + _query(**query)
    return ClientRequest("POST", target, read, sink.getvalue(), ARROW_TYPE, **how)


def ns(time: TimeLike | None, name: str = "as_of") -> int | str | None:
    """A time as the server reads it: a number, or a word, which counts from the server's time."""
    if time is None:
        return None
    if isinstance(time, timedelta):
        # The instant is the check: the age lies within the timeline, and not ahead.
        age = TIMESTAMP_MAX - to_timestamp(time, name=name, now=lambda: TIMESTAMP_MAX)
        return f"-{age // 1000}us"
    if counts_from_now(time):
        return str(time)
    at = to_timestamp(time, name=name)
    if at > OTHER_UNITS_MAX or type(time) is int or is_plain_number(time):
        return int(at)
    return str(at)  # a small number would be refused: it may count seconds


def since(time: TimeLike) -> int | str | None:
    """The beginning of a window in the form that the server reads. It may be `"oldest"`."""
    return OLDEST if is_oldest(time) else ns(time, "since")


# -- reads ----------------------------------------------------------------------------------


def get(key: bytes, as_of: TimeLike | None) -> ClientRequest[bytes | None]:
    """See `Store.get`."""
    key = require_key(key)
    if len(key) > CLIENT_URL_KEY_BYTES_MAX:
        fields = {"key": to_json(key), "as_of": ns(as_of)}
        return verb("get", fields, _value, is_read=True)
    query = _query(as_of=ns(as_of))
    return ClientRequest("GET", f"{KEYS_PATH}{quoted(key)}{query}", _raw, is_read=True)


def get_many(
    keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None
) -> ClientRequest[list[bytes | None]]:
    """See `Store.get_many`."""
    return _many("get_many", keys, as_of, {}, lambda table: table.column("value").to_pylist())


def floor_many(
    keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None, prefix: bytes | None
) -> ClientRequest[list[tuple[bytes, bytes] | None]]:
    """See `Store.floor_many`."""

    if prefix is not None:
        prefix = require_key(prefix, name="prefix")

    def rows(table: pa.Table) -> list[tuple[bytes, bytes] | None]:
        pairs = zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True)
        return [None if key is None else (key, value) for key, value in pairs]

    return _many("floor", keys, as_of, {"below": prefix}, rows)


def history(key: bytes) -> ClientRequest[list[Version]]:
    """See `Store.history`."""
    key = require_key(key)

    def read(reply: Reply) -> list[Version]:
        return [
            Version(key, Timestamp(each["timestamp"]), _bytes(each["value"]))
            for each in reply.json()["versions"]
        ]

    return verb("history", {"key": to_json(key)}, read, is_read=True)


def scan(
    span: Span, as_of: TimeLike | None, reverse: bool, limit: int | None, batch_rows: int | None
) -> ClientRequest[Reply]:
    """See `Store.scan_batches`."""
    fields = {
        **span_fields(span),
        "as_of": ns(as_of),
        "reverse": reverse,
        "limit": require_limit(limit),
        "batch_rows": batch_rows,
    }
    return verb("scan", fields, _whole, is_read=True)


def keys(
    span: Span, as_of: TimeLike | None, reverse: bool, limit: int | None
) -> ClientRequest[Reply]:
    """See `Store.keys`."""
    fields = {
        **span_fields(span),
        "as_of": ns(as_of),
        "reverse": reverse,
        "limit": require_limit(limit),
    }
    return verb("keys", fields, _whole, is_read=True)


def count(span: Span, as_of: TimeLike | None) -> ClientRequest[int]:
    """See `Store.count`."""
    fields = {**span_fields(span), "as_of": ns(as_of)}
    return verb("count", fields, lambda reply: int(reply.json()["count"]), is_read=True)


def join(
    keys: pa.Array, times: pa.Array, first: int, age_max: int | None, *, null_if_gone: bool
) -> ClientRequest[Reply]:
    """The values of keys, each at its time. `age_max` is in nanoseconds."""
    table = pa.table([keys, times], schema=LABELS_SCHEMA)
    query: dict[str, Any] = {"first": first, "null_if_gone": "true" if null_if_gone else "false"}
    if age_max is not None:
        query["max_age"] = f"{age_max / NS_PER_SECOND:.6f}"
    return of_rows("join", table, query, _whole, is_read=True)


def lease(name: str, at: TimeLike | None, seconds: float) -> ClientRequest[dict[str, Any]]:
    """Keep history from `at` on for some seconds. The same call again moves the lease."""
    fields = {"name": name, "at": ns(at, "at"), "seconds": seconds}
    return verb("lease", fields, Reply.json, is_repeatable=True)


def release_lease(name: str) -> ClientRequest[dict[str, Any]]:
    """End a lease. Nothing happens if it has ended."""
    return verb("release_lease", {"name": name}, Reply.json, is_repeatable=True)


def fields_of(name: str) -> ClientRequest[dict[str, Any]]:
    """A verb without arguments that answers with names and figures."""
    return verb(name, {}, Reply.json, is_read=True)


def sync() -> ClientRequest[Timestamp]:
    """See `Store.sync`."""
    return verb("sync", {}, lambda r: Timestamp(r.json()["upper"]), is_repeatable=True)


def upper() -> ClientRequest[Timestamp]:
    """See `Store.upper`."""
    return verb("times", {}, lambda r: Timestamp.from_ns(r.json()["upper"]), is_read=True)


def newest() -> ClientRequest[Timestamp]:
    """The newest complete time. Each delete that is due by now lies at or below it."""
    return verb("resolve", {}, lambda r: Timestamp.from_ns(r.json()["as_of"]), is_read=True)


# -- writes ---------------------------------------------------------------------------------


def put(
    key: bytes, value: bytes, durability: str | None, expires: Expires | None = None
) -> ClientRequest[Timestamp]:
    """See `Store.put`."""
    key, value = require_key(key), require_value(value)
    if len(key) > CLIENT_URL_KEY_BYTES_MAX:
        fields = {"key": to_json(key), "value": to_json(value), "durability": durability}
        return verb("put", {**fields, "expires": _expiry(expires)}, _timestamp, once=True)
    query = _query(durability=durability, expires=_expiry(expires))
    target = f"{KEYS_PATH}{quoted(key)}{query}"
    return ClientRequest("PUT", target, _timestamp, value, once=True)


def delete(key: bytes, durability: str | None) -> ClientRequest[Timestamp]:
    """See `Store.delete`."""
    fields = {"key": to_json(require_key(key)), "durability": durability}
    return verb("delete", fields, _timestamp, once=True)


def delete_range(
    start: bytes, end: bytes, idempotent: bool, durability: str | None
) -> ClientRequest[Timestamp | None]:
    """See `Store.delete_range`."""
    fields = {
        "start": to_json(require_key(start, name="start", room=1)),
        "end": to_json(require_key(end, name="end", room=1)),
        "idempotent": idempotent,
        "durability": durability,
    }
    return verb("delete_range", fields, _timestamp_or_none, once=True)


def conditional(
    name: str,
    key: bytes,
    value: bytes | None,
    expected: bytes | Unchecked | None,
    unchanged_since: TimeLike | None,
    durability: str | None,
    expires: Expires | None = None,
) -> ClientRequest[Timestamp]:
    """The request of `Store.put_if` and of `Store.delete_if`."""
    fields: dict[str, Any] = {"key": to_json(require_key(key)), "durability": durability}
    fields["expires"] = _expiry(expires)
    if name == "put_if":
        fields["value"] = to_json(require_value(value))
    if unchanged_since is not None:
        fields["unchanged_since"] = ns(unchanged_since, "unchanged_since")
    request = verb(name, fields, _timestamp, once=True)
    if expected is UNCHECKED:
        return request
    if expected is not None and not isinstance(expected, bytes | bytearray | memoryview):
        raise UsageError(
            f"expected must be bytes or None, not {type(expected).__name__}", "encode it first"
        )
    body = json.dumps(
        {
            **json.loads(request.body),
            "expected": expected if expected is None else to_json(bytes(expected)),
        }
    ).encode()
    return ClientRequest("POST", VERBS_PATH + name, _timestamp, body, JSON_TYPE, once=True)


def increment(
    key: bytes, by: int, durability: str | None, expires: Expires | None = None
) -> ClientRequest[int]:
    """See `Store.increment`."""
    number = require_integer(by, name="by")
    fields = {"key": to_json(require_key(key)), "by": number, "durability": durability}
    if expires is not None:  # an older server refuses an argument that it does not know
        fields["expires"] = _expiry(expires)
    return verb("increment", fields, lambda reply: int(reply.json()["sum"]), once=True)


def revert_range(span: Span, to: TimeLike) -> ClientRequest[Timestamp | None]:
    """See `Store.revert_range`. Done twice it writes once: the second time no key differs."""
    fields = {**span_fields(span), "to": ns(to, "to")}
    return verb("revert_range", fields, _timestamp_or_none)


def pop(key: bytes, durability: str | None) -> ClientRequest[bytes | None]:
    """See `Store.pop`."""
    fields = {"key": to_json(require_key(key)), "durability": durability}
    return verb("pop", fields, _value, once=True)


def ttl(key: bytes) -> ClientRequest[timedelta | None]:
    """See `Store.ttl`."""

    def read(reply: Reply) -> timedelta | None:
        seconds = reply.json()["seconds"]
        return None if seconds is None else timedelta(seconds=seconds)

    return verb("ttl", {"key": to_json(require_key(key))}, read, is_read=True)


def persist(key: bytes, durability: str | None) -> ClientRequest[Timestamp | None]:
    """See `Store.persist`."""
    fields = {"key": to_json(require_key(key)), "durability": durability}
    return verb("persist", fields, _timestamp_or_none, once=True)


def batch(
    writes: SentWriteSet,
    durability: str | None,
    reads: ReadSet | None = None,
    read_at: int | None = None,
    *,
    definitions: Mapping[str, str] | None = None,
) -> ClientRequest[Timestamp]:
    """A batch; with `reads` at the time `read_at`, the commit of a transaction. `definitions` has
    the digests of the tables whose rows it sets. Entries of indexes stay here."""
    # The set has dropped its points that a later range delete covers, so ranges come first.
    rows: list[tuple[int, bytes, bytes | None, bytes | None, int | None]] = [
        (WriteOp.DELETE_RANGE, start, end, None, None) for start, end in writes.ranges
    ]
    for (key, value), expires in zip(writes.points.items(), writes.expiries(), strict=True):
        if key not in writes.entries:
            op = WriteOp.DELETE if value is None else WriteOp.PUT
            rows.append((op, key, None, value, expires))
    if reads is not None:
        rows += ((WriteOp.READ, key, None, None, None) for key in reads.points())
        rows += ((WriteOp.READ_RANGE, span.start, span.end, None, None) for span in reads.spans())
    table = _table(rows)
    made_by = json.dumps(definitions) if definitions else None
    given = {"durability": durability, "read_at": read_at, "definitions": made_by}
    if read_at is not None and writes.has_rows:
        given["rows"] = "true"
    request = of_rows("batch", table, given, _timestamp, once=True)
    if len(request.body) > SERVER_BODY_BYTES_MAX:
        raise UsageError(
            f"the writes have {len(request.body)} bytes, at most {SERVER_BODY_BYTES_MAX} travel",
            "commit smaller ones, or import the data (bulk.Import)",
        )
    return request


# -- inside ---------------------------------------------------------------------------------

_ABSENT: Final = 404


def _many(
    name: str,
    keys: Sequence[bytes],
    as_of: TimeLike | Sequence[TimeLike] | None,
    query: Mapping[str, Any],
    rows: Callable[[pa.Table], T],
) -> ClientRequest[T]:
    keys = key_list(keys)
    if not are_keys(keys):
        keys = [require_key(key) for key in keys]
    arrays, names = [binary_array(keys)], ["key"]
    given = dict(query)
    if is_many(as_of):
        times = times_given(as_of, len(keys))
        arrays.append(pa.array([to_timestamp(time, name="as_of") for time in times], pa.int64()))
        names.append("as_of")
    else:
        given["as_of"] = ns(as_of)
    schema = pa.schema([READ_SCHEMA.field(each) for each in names])
    table = pa.table(arrays, schema=schema)
    return of_rows(name, table, given, lambda reply: rows(reply.table()), is_read=True)


def _table(rows: Sequence[tuple[object, ...]]) -> pa.Table:
    """The rows of a batch. The last column is left out where nothing expires: it is rare."""
    columns = list(zip(*rows, strict=True))
    if not any(columns[-1]):
        columns.pop()
    fields = list(WRITES_SCHEMA)[: len(columns)]
    arrays = [pa.array(each, field.type) for each, field in zip(columns, fields, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields))


def _whole(reply: Reply) -> Reply:
    return reply


def _raw(reply: Reply) -> bytes | None:
    return None if reply.status == _ABSENT else reply.body


def _value(reply: Reply) -> bytes | None:
    return _bytes(reply.json()["value"])


def _bytes(found: Any) -> bytes | None:
    return None if found is None else from_json(found, name="the server's answer")


def _timestamp(reply: Reply) -> Timestamp:
    return Timestamp(reply.json()["timestamp"])


def _timestamp_or_none(reply: Reply) -> Timestamp | None:
    found = reply.json()["timestamp"]
    return None if found is None else Timestamp(found)


def _expiry(expires: Expires | None) -> int | str | None:
    """An expiry as JSON and queries have it."""
    if expires is None:
        return None
    sent = sent_expiry(expires)
    return f"+{-sent // 1000}us" if sent < 0 else ns(Timestamp(sent), "expires")


def _query(**given: Any) -> str:
    found = {name: value for name, value in given.items() if value is not None}
    return f"?{urlencode(found, quote_via=quote)}" if found else ""
