"""The verbs of a server: what each is called, needs, takes and answers. Client, asynchronous
client, server and OpenAPI document know a verb from here alone.

To add a verb:

1. Declare it here: its name, the right that it needs, its parameters, its result, and whether it
   may come again.
2. Write its work in `kvstore.remote.server.verbs`: `@serves(verbs.NAME)` over a function of an
   `Invocation`. Its docstring is the text of the document. A verb without work stops the import.
3. If users call it, add a method to `Client`: `return self.pool.call(verbs.NAME, key=key)`, and
   `name = awaited(Client.name)` to `AsyncClient`.
4. If a reader process can answer it from the files of the store, set `from_files`.
5. List it in `docs/reference/protocol.md`.

The client sends and the server checks the arguments by the declaration, the client reads the answer
by it, and `/v1/openapi.json` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

import pyarrow as pa

from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.changes.events import EXPAND, IMAGES
from kvstore.errors import (
    ClosedError,
    ConflictError,
    DependencyError,
    FencedError,
    HistoryGoneError,
    HistoryHeldError,
    ImportRefusedError,
    KeyConflictError,
    KVStoreError,
    NotACounterError,
    NotFoundError,
    NotUniqueError,
    NotYetWrittenError,
    PreconditionError,
    TableAlteredError,
    UsageError,
)
from kvstore.feeds import STARTS
from kvstore.limits import (
    READER_LEASE_S_MAX,
    SCAN_PIECES_MAX,
    STREAMS_MAX,
    TABLE_NAME_BYTES_MAX,
    TASK_NAME_BYTES_MAX,
)
from kvstore.remote import results
from kvstore.remote.parameters import (
    BOUND,
    DEFINITION_FORMAT,
    EXPIRY,
    FLAG,
    KEY,
    NAME,
    SPAN,
    START,
    TEXT,
    TIME,
    VALUE,
    Parameter,
    Schema,
    age,
    count,
    integer,
    json_text,
    list_of,
    object_of,
    one_or_many,
    seconds,
    text,
    time_or,
    word,
)
from kvstore.remote.protocol import LABELS_SCHEMA, READ_SCHEMA, WRITES_SCHEMA, WriteOp
from kvstore.remote.results import Result
from kvstore.timeline.durability import DURABILITIES
from kvstore.timeline.expiries import Expires
from kvstore.transaction import COUNTER_MAX, UNCHECKED

T_co = TypeVar("T_co", covariant=True)

READ: Final = "read"
WRITE: Final = "write"
ADMIN: Final = "admin"


class UnknownChangesetError(ClosedError):
    """No changeset has this name, or none any more. For clients it is a `ClosedError`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"changeset {name[:8]!r}")


@dataclass(frozen=True, slots=True)
class Verb(Generic[T_co]):
    """One verb. A client gets a `T_co` for it."""

    name: str
    right: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    result: Result[T_co] | None = None
    """Its answer as JSON; a verb without one answers with rows."""
    rows: pa.Schema | None = None
    """The Arrow stream that it takes in the place of the parameter that `is_rows`, and must have
    where there is none such. It is answered with rows."""
    errors: tuple[type[KVStoreError], ...] = ()
    """What it may raise besides the errors of every request."""

    is_read: bool = False
    """Whether it changes nothing: a client sends it again without a limit."""
    once: bool = False
    """Whether a request with a token is done once, however often it comes."""
    is_repeatable: bool = False
    """Whether it changes nothing when it comes again."""

    from_files: bool = False
    """Whether a reader process answers it, which has the files of the store and nothing else."""
    is_short: bool = False
    """Whether it is done on the event loop of the server if its request is small."""
    blocks: bool = False
    """Whether it waits for others: a thread of its own does it."""
    is_work: bool = False
    """Whether it is long work: rows tell its progress, and the last one has the result."""
    key_method: str = ""
    """The method of HTTP that calls it on a path of keys, with the value as the body."""

    one_of: tuple[str, ...] = ()
    """A call has one of these arguments, or more."""
    apart: tuple[tuple[str, str], ...] = ()
    """A call has one argument of each pair at most."""
    needs: tuple[tuple[str, str], ...] = ()
    """A call with the first argument of a pair has the second."""

    _required: tuple[str, ...] = field(init=False, repr=False)
    _beside_rows: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        required = [name for name, kind in self.parameters.items() if kind.is_required]
        beside_rows = [name for name in required if not self.parameters[name].is_rows]
        object.__setattr__(self, "_required", tuple(required))
        object.__setattr__(self, "_beside_rows", tuple(beside_rows))

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of HTTP by which it is called. What takes rows, or blocks, takes no GET."""
        by_get = self.is_read and self.rows is None and not self.blocks
        return ("GET", "HEAD", "POST") if by_get else ("POST",)

    @property
    def has_json(self) -> bool:
        """Whether it answers with an object of JSON, unless it was sent rows."""
        return self.result is not None and not self.is_work

    @property
    def is_grouped(self) -> bool:
        """Whether its writes may belong to a changeset."""
        return self.right == WRITE and UnknownChangesetError not in self.errors

    def sent(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call as JSON. One that is None is left out; where a null means
        something, `UNCHECKED` is left out. Raises `UsageError`."""
        found = {}
        for name, each in given.items():
            kind = self.parameters[name]
            is_left_out = each is None and not (kind.is_nullable or kind.is_required)
            if each is not UNCHECKED and not is_left_out:
                found[name] = kind.sent(each, name)
        return found

    def read(self, given: Mapping[str, Any], *, has_rows: bool = False) -> dict[str, Any]:
        """The values of the arguments of a call that came. Raises `UsageError` for a call that
        breaks the declaration: a misspelt condition must not be ignored."""
        parameters, found = self.parameters, {}
        for name, each in given.items():
            kind = parameters.get(name)
            if kind is None or (has_rows and kind.is_rows):
                known = ", ".join(parameters) or "none: the verb has no arguments"
                raise UsageError(f"argument {name!r}", f"pass some of {known}")
            found[name] = kind.read(each, name)
        for name in self._beside_rows if has_rows else self._required:
            if name not in found:
                raise UsageError(f"argument {name!r} is missing", parameters[name].hint)
        if self.one_of and found.keys().isdisjoint(self.one_of):
            named = " or ".join(map(repr, self.one_of))
            raise UsageError(f"{self.name} without {named}", "pass one of them")
        for name, other in self.apart:
            if name in found and other in found:
                raise UsageError(f"{name!r} goes without {other!r}", "pass one or the other")
        for name, other in self.needs:
            if name in found and other not in found:
                raise UsageError(f"{name!r} without {other!r}", "pass both")
        return found


ANY_COLUMNS: Final = pa.schema([])
"""The `rows` of a verb that takes an Arrow stream of any columns."""

# -- reads -----------------------------------------------------------------------------------------

_AT_A_TIME: Final = (HistoryGoneError, NotYetWrittenError)
"""The errors of a read at a time."""
_SPAN_APART: Final = (("prefix", "start"), ("prefix", "end"))
_SPAN_AT: Final = {**SPAN, "as_of": TIME}
_WINDOW: Final = {"since": START.required, "upto": TIME}
_CHANGES: Final = {**_WINDOW, **SPAN, "images": word(IMAGES), "expand": word(EXPAND)}
_KEY: Final = {"key": KEY.required}
_MANY: Final = {"keys": list_of(KEY).or_rows, "as_of": one_or_many(TIME)}

GET: Final = Verb(
    "get",
    READ,
    {**_KEY, "as_of": TIME},
    results.one("value", results.or_null(results.BYTES), found=results.FLAG),
    errors=_AT_A_TIME,
    is_read=True,
    from_files=True,
    key_method="GET",
)
GET_MANY: Final = Verb(
    "get_many",
    READ,
    _MANY,
    results.one("values", results.items(results.or_null(results.BYTES))),
    READ_SCHEMA,
    errors=_AT_A_TIME,
    is_read=True,
    from_files=True,
)
FLOOR: Final = Verb(
    "floor",
    READ,
    {**_MANY, "below": KEY},
    results.one(
        "floors",
        results.items(
            results.fields(key=results.or_null(results.BYTES), value=results.or_null(results.BYTES))
        ),
    ),
    READ_SCHEMA,
    errors=_AT_A_TIME,
    is_read=True,
    from_files=True,
)
SCAN: Final[Verb[Any]] = Verb(
    "scan",
    READ,
    {**_SPAN_AT, "reverse": FLAG, "limit": count(), "batch_rows": count(1)},
    errors=_AT_A_TIME,
    is_read=True,
    from_files=True,
    apart=_SPAN_APART,
)
KEYS: Final[Verb[Any]] = Verb(
    "keys",
    READ,
    {**_SPAN_AT, "reverse": FLAG, "limit": count()},
    errors=_AT_A_TIME,
    is_read=True,
    from_files=True,
    apart=_SPAN_APART,
)
COUNT_KEYS: Final = Verb(
    "count",
    READ,
    _SPAN_AT,
    results.one("count", results.COUNT),
    errors=_AT_A_TIME,
    is_read=True,
    from_files=True,
    apart=_SPAN_APART,
)
TTL: Final = Verb(
    "ttl",
    READ,
    _KEY,
    results.fields(
        seconds=results.or_null(results.NUMBER), expires=results.or_null(results.TIMESTAMP)
    ),
    is_read=True,
)
HISTORY: Final = Verb(
    "history",
    READ,
    _KEY,
    results.one(
        "versions",
        results.items(
            results.fields(timestamp=results.TIMESTAMP, value=results.or_null(results.BYTES))
        ),
    ),
    is_read=True,
    from_files=True,
)
CHANGES: Final[Verb[Any]] = Verb(
    "changes", READ, _CHANGES, errors=_AT_A_TIME, is_read=True, from_files=True, apart=_SPAN_APART
)
SPLITS: Final = Verb(
    "splits",
    READ,
    {**SPAN, "count": count(1, SCAN_PIECES_MAX)},
    results.one(
        "splits",
        results.items(results.fields(start=results.BYTES, end=results.or_null(results.BYTES))),
    ),
    is_read=True,
    apart=_SPAN_APART,
)
STATS: Final = Verb("stats", READ, {}, results.ANY_OBJECT, is_read=True)
METRICS: Final = Verb("metrics", READ, {}, results.ANY_OBJECT, is_read=True)
TIMES: Final = Verb(
    "times",
    READ,
    {},
    results.fields(
        since=results.TIMESTAMP,
        upper=results.TIMESTAMP,
        durable=results.TIMESTAMP,
        whole_since=results.TIMESTAMP,
        indexed_since=results.TIMESTAMP,
        now=results.TIMESTAMP,
        store_id=results.TEXT,
    ),
    is_read=True,
)
RESOLVE: Final = Verb(
    "resolve",
    READ,
    {"as_of": TIME},
    results.one("as_of", results.TIMESTAMP),
    errors=_AT_A_TIME,
    is_read=True,
)

# -- reads that many tasks share, and joins --------------------------------------------------------

_LEASE_NAME: Final = text(
    1, 100, hint="pass a random text of 1 to 100 characters: the name of a lease"
)

LEASE: Final = Verb(
    "lease",
    READ,
    {
        "name": _LEASE_NAME.required,
        "at": TIME,
        "seconds": seconds(READER_LEASE_S_MAX, above=0).required,
    },
    results.fields(at=results.TIMESTAMP, is_new=results.FLAG),
    errors=_AT_A_TIME,
    is_repeatable=True,
)
RELEASE_LEASE: Final = Verb(
    "release_lease",
    READ,
    {"name": _LEASE_NAME.required},
    results.fields(released=results.FLAG),
    is_repeatable=True,
)
FILES: Final = Verb(
    "files",
    READ,
    SPAN,
    results.fields(
        files=results.items(
            results.fields(first=results.BYTES, last=results.BYTES, size_bytes=results.COUNT)
        ),
        hides_reserved=results.FLAG,
    ),
    is_read=True,
    apart=_SPAN_APART,
)
COUNT_CHANGES: Final = Verb(
    "count_changes",
    READ,
    _WINDOW,
    results.fields(changes=results.COUNT, is_exact=results.FLAG),
    errors=_AT_A_TIME,
    is_read=True,
)
VERSIONS: Final[Verb[Any]] = Verb(
    "versions",
    READ,
    {
        **_WINDOW,
        "revisions": word(("all", "latest")),
        "order": word(("key", "time")),
        "ranges": FLAG,
        **SPAN,
    },
    errors=_AT_A_TIME,
    is_read=True,
    from_files=True,
    apart=_SPAN_APART,
)
JOIN: Final[Verb[Any]] = Verb(
    "join",
    READ,
    {
        "max_age": seconds(),
        "null_if_gone": FLAG,
        "first": count(),
        "direction": word(("backward", "forward", "nearest")),
        "exclude_exact": FLAG,
        "newest": integer(0, TIMESTAMP_MAX),
        "on_future": word(("error", "newest")),
    },
    rows=LABELS_SCHEMA,
    errors=_AT_A_TIME,
    is_read=True,
    from_files=True,
)

# -- writes ----------------------------------------------------------------------------------------

_DURABILITY: Final = {"durability": word(DURABILITIES)}
_PUT: Final = {**_KEY, "value": VALUE.required, "expires": EXPIRY}
_CONDITION: Final = {"expected": VALUE.or_null, "unchanged_since": TIME}
_ALWAYS: Final = results.one("timestamp", results.TIMESTAMP)
_PERHAPS: Final = results.one("timestamp", results.or_null(results.TIMESTAMP))


class SentWrite(NamedTuple):
    """An operation of a batch."""

    op: int
    key: bytes
    end: bytes | None
    value: bytes | None
    expires: Expires | None


_WRITE_OPS: Final = {op.name.lower(): op for op in WriteOp}
_REQUIRED_FIELDS: Final = {"key": KEY, "end": BOUND, "value": VALUE}
_OPERATION_FIELDS: Final = {"key": KEY, "end": BOUND.or_null, "value": VALUE, "expires": EXPIRY}
_MAY_HAVE: Final = {
    WriteOp.PUT: {"key", "value", "expires"},
    WriteOp.DELETE: {"key"},
    WriteOp.DELETE_RANGE: {"key", "end"},
    WriteOp.READ: {"key"},
    WriteOp.READ_RANGE: {"key", "end"},
}


def _operation_schema(op: WriteOp, *required: str, **optional: Parameter) -> Schema:
    """The schema of an operation as JSON."""
    named = {"op": {"const": op.name.lower()}}
    kinds = {**{name: _REQUIRED_FIELDS[name] for name in required}, **optional}
    return {
        "type": "object",
        "properties": {**named, **{name: kind.json_schema for name, kind in kinds.items()}},
        "required": ["op", *required],
        "additionalProperties": False,
    }


def _operation(item: Any, name: str) -> SentWrite:
    """An operation as JSON. Raises `UsageError` for one that the schema excludes."""
    if type(item) is not dict or not item.keys() <= {"op", *_OPERATION_FIELDS}:
        raise UsageError(name, 'pass {"op": ..., "key": ..., "end": ..., "value": ...}')
    word = item.get("op")
    op = _WRITE_OPS.get(word) if isinstance(word, str) else None
    if op is None:
        raise UsageError(f"{name}: op {word!r}", f"pass one of {', '.join(_WRITE_OPS)}")
    if "key" not in item or not item.keys() - {"op"} <= _MAY_HAVE[op]:
        named = ", ".join(sorted(_MAY_HAVE[op]))
        raise UsageError(f"{name} is a {word} with other fields", f"pass some of {named}")
    found = {
        each: _OPERATION_FIELDS[each].read(value, f"{name}.{each}")
        for each, value in item.items()
        if each != "op"
    }
    return SentWrite(op, found["key"], found.get("end"), found.get("value"), found.get("expires"))


_OPERATION: Final = object_of(
    {
        "oneOf": [
            _operation_schema(WriteOp.PUT, "key", "value", expires=EXPIRY),
            _operation_schema(WriteOp.DELETE, "key"),
            _operation_schema(WriteOp.DELETE_RANGE, "key", "end"),
            _operation_schema(WriteOp.READ, "key"),
            _operation_schema(WriteOp.READ_RANGE, "key", end=BOUND.or_null),
        ]
    },
    _operation,
)

PUT: Final = Verb(
    "put", WRITE, {**_PUT, **_DURABILITY}, _ALWAYS, once=True, is_short=True, key_method="PUT"
)
DELETE: Final = Verb(
    "delete", WRITE, {**_KEY, **_DURABILITY}, _ALWAYS, once=True, is_short=True, key_method="DELETE"
)
DELETE_RANGE: Final = Verb(
    "delete_range",
    WRITE,
    {**SPAN, "idempotent": FLAG, **_DURABILITY},
    _PERHAPS,
    once=True,
    one_of=("end", "prefix"),
    apart=_SPAN_APART,
)
BATCH: Final = Verb(
    "batch",
    WRITE,
    {
        "ops": list_of(_OPERATION).or_rows,
        "read_at": TIME,
        "definitions": json_text("kvstore-digests", "the digests of definitions, by table"),
        "rows": FLAG,
        **_DURABILITY,
    },
    _PERHAPS,
    WRITES_SCHEMA,
    errors=(*_AT_A_TIME, ConflictError, NotFoundError),
    once=True,
    is_short=True,
)
PUT_IF: Final = Verb(
    "put_if",
    WRITE,
    {**_PUT, **_CONDITION, **_DURABILITY},
    _ALWAYS,
    errors=(*_AT_A_TIME, PreconditionError),
    once=True,
    is_short=True,
    one_of=tuple(_CONDITION),
)
DELETE_IF: Final = Verb(
    "delete_if",
    WRITE,
    {**_KEY, **_CONDITION, **_DURABILITY},
    _ALWAYS,
    errors=(*_AT_A_TIME, PreconditionError),
    once=True,
    is_short=True,
    one_of=tuple(_CONDITION),
)
POP: Final = Verb(
    "pop",
    WRITE,
    {**_KEY, **_DURABILITY},
    results.one("value", results.or_null(results.BYTES), found=results.FLAG),
    once=True,
    is_short=True,
)
PERSIST: Final = Verb("persist", WRITE, {**_KEY, **_DURABILITY}, _PERHAPS, once=True, is_short=True)
INCREMENT: Final = Verb(
    "increment",
    WRITE,
    {**_KEY, "by": integer(-COUNTER_MAX - 1, COUNTER_MAX), "expires": EXPIRY, **_DURABILITY},
    results.one("sum", results.INTEGER),
    errors=(NotACounterError,),
    once=True,
    is_short=True,
)
REVERT_RANGE: Final = Verb(
    "revert_range",
    WRITE,
    {**SPAN, "to": TIME.required.but("pass the time of the state to restore")},
    _PERHAPS,
    errors=_AT_A_TIME,
    apart=_SPAN_APART,
)
SYNC: Final = Verb("sync", WRITE, {}, results.one("upper", results.TIMESTAMP), is_repeatable=True)

# -- changesets of callers -------------------------------------------------------------------------

OPEN_CHANGESET: Final = Verb(
    "open_changeset",
    WRITE,
    {"outer": NAME},
    results.fields(name=results.TEXT, domain=results.INTEGER, serial=results.INTEGER),
    errors=(UnknownChangesetError,),
    blocks=True,
)
END_CHANGESET: Final = Verb(
    "end_changeset",
    WRITE,
    {"name": NAME.required},
    results.one("events", results.COUNT),
    errors=(UnknownChangesetError,),
    blocks=True,
)

# -- tables ----------------------------------------------------------------------------------------

_TABLE: Final = {"table": text(1, TABLE_NAME_BYTES_MAX, pattern=r"[^\x00]*").required}
_COLUMNS: Final = {"columns": list_of(TEXT)}
_ROWS: Final = {
    **_TABLE,
    "start": BOUND,
    "end": BOUND,
    "as_of": TIME,
    **_COLUMNS,
    "reverse": FLAG,
    "limit": count(),
}
_ALTER: Final = {
    **_TABLE,
    "definition": json_text(DEFINITION_FORMAT, "the definition of the table").required,
}
_INDEX: Final = {"index": TEXT.required.but("pass a name: no index is meant without one")}
_DEFINED: Final = results.one("definition", results.ANY_OBJECT)
_OF_A_TABLE: Final = (*_AT_A_TIME, NotFoundError, TableAlteredError)

_PASSED: Final = {"filter": VALUE.but("pass an expression as Arrow serializes it")}

TABLE_SCAN: Final[Verb[Any]] = Verb(
    "table_scan", READ, {**_ROWS, **_PASSED}, errors=_OF_A_TABLE, is_read=True
)
TABLE_COUNT: Final = Verb(
    "table_count",
    READ,
    {**_TABLE, "start": BOUND, "end": BOUND, "as_of": TIME, **_PASSED},
    results.one("count", results.COUNT),
    errors=_OF_A_TABLE,
    is_read=True,
)
TABLE_FIND: Final[Verb[Any]] = Verb(
    "table_find", READ, {**_ROWS, **_INDEX}, errors=_OF_A_TABLE, is_read=True
)
TABLE_CHANGES: Final[Verb[Any]] = Verb(
    "table_changes",
    READ,
    {**_TABLE, **_WINDOW, "images": word(("pre+post", "post", "pre")), **_COLUMNS},
    errors=_OF_A_TABLE,
    is_read=True,
)
TABLE_JOIN: Final[Verb[Any]] = Verb(
    "table_join",
    READ,
    {
        **_TABLE,
        "question": json_text("kvstore-question", "the question of a join").required,
        "max_age": age(),
        "first": count(),
    },
    rows=ANY_COLUMNS,
    errors=_OF_A_TABLE,
    is_read=True,
)
MAKE_TABLE: Final = Verb(
    "make_table", WRITE, {**_ALTER, "has_indexes": FLAG}, _DEFINED, errors=(TableAlteredError,)
)
ALTER_TABLE: Final = Verb(
    "alter_table", ADMIN, _ALTER, _DEFINED, errors=(NotFoundError, TableAlteredError)
)
DROP_TABLE: Final = Verb("drop_table", ADMIN, _TABLE, _ALWAYS, errors=(NotFoundError,))
CLEAR_TABLE: Final = Verb(
    "clear_table",
    ADMIN,
    {**_TABLE, "start": BOUND, "end": BOUND, **_PASSED, "compact": FLAG},
    _ALWAYS,
    errors=(*_OF_A_TABLE, HistoryHeldError),
    is_work=True,
)
REVERT_TABLE: Final = Verb(
    "revert_table",
    WRITE,
    {
        **_TABLE,
        "start": BOUND,
        "end": BOUND,
        "to": TIME.required.but("pass the time of the state to restore"),
        **_PASSED,
    },
    _PERHAPS,
    errors=(*_OF_A_TABLE, ConflictError, NotUniqueError),
)
BUILD_INDEX: Final = Verb(
    "build_index", ADMIN, {**_TABLE, **_INDEX}, _PERHAPS, errors=(NotFoundError,), is_work=True
)

# -- feeds -----------------------------------------------------------------------------------------

_FEED_NAME: Final = text(
    1, pattern=r"[^/\x00-\x1f\x7f-\x9f]*", hint="pass a printable name without a slash"
)
_FEED: Final = {
    "name": _FEED_NAME.required,
    "worker": count(0, STREAMS_MAX - 1),
    "workers": count(1, STREAMS_MAX),
    **SPAN,
    "images": word(IMAGES),
    "expand": word(EXPAND),
    "batch_rows": count(1),
    "batch_bytes": count(1),
}
_FEED_NEEDS: Final = (("worker", "workers"),)
_PLACE: Final = {
    "token": TEXT.required,
    "timestamp": TIME.required.but("pass the position of the last batch"),
    "taken": count(),
    "state_from": KEY,
}
_POSITION: Final[dict[str, Result[Any]]] = {
    "timestamp": results.TIMESTAMP,
    "taken": results.COUNT,
    "state_from": results.or_null(results.BYTES),
}
_OF_A_FEED: Final = (*_AT_A_TIME, FencedError, NotFoundError)

POSITION: Final = results.fields(**_POSITION)
"""The position of a feed, in the metadata of a batch."""

OPEN_FEED: Final = Verb(
    "open_feed",
    WRITE,
    {**_FEED, "since": time_or(*STARTS), "taken": count(), "state_from": KEY, "max_age": age()},
    results.fields(token=results.TEXT, **_POSITION),
    errors=_OF_A_FEED,
    apart=_SPAN_APART,
    needs=_FEED_NEEDS,
)
FETCH: Final[Verb[Any]] = Verb(
    "fetch",
    WRITE,
    {**_FEED, **_PLACE, "wait": seconds()},
    errors=_OF_A_FEED,
    is_read=True,
    blocks=True,
    apart=_SPAN_APART,
    needs=_FEED_NEEDS,
)
ACK: Final = Verb(
    "ack",
    WRITE,
    {**_FEED, **_PLACE},
    results.one("acked", results.TIMESTAMP),
    errors=_OF_A_FEED,
    is_repeatable=True,
    apart=_SPAN_APART,
    needs=_FEED_NEEDS,
)
DROP_FEED: Final = Verb(
    "drop_feed", WRITE, {"name": _FEED_NAME.required}, results.fields(), errors=(NotFoundError,)
)

# -- commits, their epochs and their streams -------------------------------------------------------

_GENERATION: Final = results.fields(
    opened_at=results.TIMESTAMP,
    closed_at=results.or_null(results.TIMESTAMP),
    streams=results.items(results.TEXT),
)

EVENTS: Final[Verb[Any]] = Verb(
    "events", READ, _CHANGES, errors=_AT_A_TIME, is_read=True, from_files=True, apart=_SPAN_APART
)
WAIT_BEYOND: Final = Verb(
    "wait_beyond",
    READ,
    {
        "upper": count(0, TIMESTAMP_MAX).required.but("pass the timestamp of a commit"),
        "wait": seconds(),
    },
    results.one("upper", results.TIMESTAMP),
    is_read=True,
    blocks=True,
)
EPOCHS: Final[Verb[Any]] = Verb("epochs", READ, {"since": TIME}, errors=_AT_A_TIME, is_read=True)
GENERATIONS: Final = Verb(
    "generations", READ, {}, results.one("generations", results.items(_GENERATION)), is_read=True
)
RESHARD: Final = Verb("reshard", ADMIN, {"streams": count(1, STREAMS_MAX).required}, _GENERATION)
FORCE_QUIESCENCE: Final = Verb(
    "force_quiescence", ADMIN, {"after": age(), "timeout": seconds()}, _ALWAYS, is_work=True
)

# -- claims on history -----------------------------------------------------------------------------

_HOLD: Final = {"name": NAME.required.but("pass the name of a hold")}
_OWNED: Final = {**_HOLD, "token": TEXT.required}
_HELD: Final = results.fields(
    name=results.TEXT,
    timestamp=results.NANOSECONDS,
    token=results.TEXT,
    max_age_ns=results.or_null(results.COUNT),
    lost=results.FLAG,
    kind=results.TEXT,
    address=results.TEXT,
    owner=results.TEXT,
    created_at=results.or_null(results.COUNT),
    moved_at=results.or_null(results.COUNT),
    reached=results.or_null(results.COUNT),
    state_from=results.or_null(results.TEXT),
)
_OF_A_HOLD: Final = (NotFoundError, FencedError, *_AT_A_TIME)

HOLDS: Final = Verb("holds", ADMIN, {}, results.one("holds", results.items(_HELD)))
HOLD: Final = Verb(
    "hold",
    ADMIN,
    {**_HOLD, "at": TIME, "max_age": age(), "durable": FLAG, "kind": NAME, "address": TEXT},
    results.fields(token=results.TEXT, is_new=results.FLAG),
    errors=_AT_A_TIME,
)
HELD: Final = Verb("held", ADMIN, _OWNED, _HELD, errors=_OF_A_HOLD)
MOVE_HOLD: Final = Verb(
    "move_hold",
    ADMIN,
    {**_OWNED, "to": TIME.required, "durable": FLAG, "reached": TIME},
    results.fields(),
    errors=_OF_A_HOLD,
)
RELEASE_HOLD: Final = Verb("release_hold", ADMIN, _OWNED, results.fields(), errors=_OF_A_HOLD)
DROP_HOLD: Final = Verb("drop_hold", ADMIN, _HOLD, _HELD, errors=(NotFoundError,))

# -- imports ---------------------------------------------------------------------------------------

_BROUGHT: Final = text(
    pattern=r"[0-9a-f]{16}-[0-9a-f]+",
    hint="pass the name of a directory in ingest/: the id of its import, a hyphen and hex digits",
)
_IMPORT: Final = {
    "import_id": text(
        16, 16, pattern="0*[1-9a-fA-F][0-9a-fA-F]*", hint="pass 16 hex digits, not all 0"
    ).required
}

IMPORTS: Final = Verb(
    "imports", ADMIN, {}, results.one("imports", results.items(results.ANY_OBJECT))
)
KNOWN_IMPORT: Final = Verb(
    "known_import", ADMIN, _IMPORT, results.one("import", results.or_null(results.ANY_OBJECT))
)
ADD_IMPORT: Final = Verb(
    "add_import",
    ADMIN,
    {"directory": _BROUGHT.required, "none_since": TIME, "origin": TEXT, "report": TEXT},
    _ALWAYS,
    errors=(
        *(ImportRefusedError, KeyConflictError, NotUniqueError, TableAlteredError),
        ConflictError,
    ),
    is_work=True,
)
ABORT_IMPORT: Final = Verb(
    "abort_import", ADMIN, _IMPORT, results.one("aborted", results.FLAG), is_work=True
)
REVERT_IMPORT: Final = Verb(
    "revert_import", ADMIN, _IMPORT, _ALWAYS, errors=(NotFoundError, HistoryGoneError)
)

# -- work of the owner -----------------------------------------------------------------------------

_TASK_NAME: Final = text(1, TASK_NAME_BYTES_MAX)
_TASK: Final = results.fields(
    id=results.TEXT,
    version=results.COUNT,
    queue=results.TEXT,
    available_at=results.COUNT,
    created_at=results.COUNT,
    changed_at=results.COUNT,
)

GC: Final = Verb(
    "gc",
    ADMIN,
    {"before": TIME, "keep": age(), "compact": FLAG},
    results.ANY_OBJECT,
    errors=_AT_A_TIME,
    is_work=True,
)
CHECKPOINT: Final = Verb(
    "checkpoint",
    ADMIN,
    {"path": text(1, pattern="/[^\\x00]*", hint="pass an absolute path").required},
    _ALWAYS,
    is_work=True,
)
VERIFY: Final = Verb("verify", ADMIN, {}, results.ANY_OBJECT, is_work=True)
CLEAR_RANGE: Final = Verb(
    "clear_range",
    ADMIN,
    {
        "start": BOUND,
        "end": BOUND.required.but("pass the least key that is to be kept"),
        "compact": FLAG,
    },
    _ALWAYS,
    is_work=True,
)
SUBMIT_TASK: Final = Verb(
    "submit_task",
    ADMIN,
    {
        "queue": _TASK_NAME.required,
        "value": VALUE,
        "available_at": count(0, TIMESTAMP_MAX),
        "id": _TASK_NAME,
    },
    results.one("task", _TASK),
    errors=(DependencyError,),
)

# --------------------------------------------------------------------------------------------------

VERBS: Final[Mapping[str, Verb[Any]]] = {
    each.name: each for each in list(globals().values()) if isinstance(each, Verb)
}
"""All verbs of a store, by name."""
