"""The verbs that write, and the verbs that begin and end the changesets of callers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.codec.json import read_object
from kvstore.errors import (
    AccessDeniedError,
    ConflictError,
    CorruptionError,
    HistoryGoneError,
    KVStoreError,
    NotACounterError,
    NotFoundError,
    NotYetWrittenError,
    PreconditionError,
    StorageError,
    UsageError,
)
from kvstore.limits import BATCH_BYTES_MAX
from kvstore.mvcc import WriteSet
from kvstore.remote import results
from kvstore.remote.parameters import (
    BOUND,
    EXPIRY,
    FLAG,
    KEY,
    NAME,
    SPAN,
    TIME,
    VALUE,
    Parameter,
    Schema,
    integer,
    json_text,
    list_of,
    object_of,
    word,
)
from kvstore.remote.protocol import WRITES_SCHEMA, WriteOp, to_json
from kvstore.remote.results import BYTES, COUNT, INTEGER, TEXT, TIMESTAMP, fields, or_null
from kvstore.remote.served_rows import SentRows
from kvstore.remote.server.access import WRITE
from kvstore.remote.server.invocation import (
    SPAN_APART,
    Answer,
    Invocation,
    LentChangesets,
    UnknownChangesetError,
    Verb,
    described,
)
from kvstore.timeline.durability import DURABILITIES, Durability
from kvstore.timeline.expiries import Expires, received_expiry
from kvstore.timeline.reserve import FIRST_ROW
from kvstore.transaction import COUNTER_MAX, UNCHECKED, ReadSet, Transaction

# --------------------------------------------------------------------------------------------------
# The verbs that write: each is the method of `Store` with its name. `batch` also commits a
# transaction, whose reads come with its writes.
#
# A request with a token is done once: see `kvstore.requests`.
#
# Invariants
# 1. A request that was done gets its first answer, also where the verb would refuse it by now: its
#    history is gone, its table was altered, its key holds something else. A caller that is refused
#    may therefore write again.
# 2. A caller that has no access to a key gets no answer of a request that concerned the key.

_WRITE_OPS: Final = {op.name.lower(): op for op in WriteOp}
_CODES: Final = frozenset(int(op) for op in WriteOp)
_RANGES: Final = (WriteOp.DELETE_RANGE, WriteOp.READ_RANGE)

_CODE_RULE: Final = f"pass one of {', '.join(map(str, sorted(_CODES)))}"
_VALUE_RULE: Final = "pass a value with each put, and with no other operation"
_EXPIRY_RULE: Final = "pass a due time with puts alone"
_END_RULE: Final = "pass an end with each range, and with no other operation"


def put(call: Invocation) -> Answer:
    """Set a key. `expires` is the time at which it is deleted: `+1h` counts from now."""
    return _commit(call, _put(call))


def delete(call: Invocation) -> Answer:
    """Delete a key, which may be absent. Its history stays."""
    writes = call.store.requests.write_set()
    writes.delete(call.key())
    return _commit(call, writes)


def delete_range(call: Invocation) -> Answer:
    """Delete all keys from `start` to below `end`; with `idempotent` only if one is alive."""
    span, writes = call.span(), call.store.requests.write_set()
    if span.end is None:
        raise UsageError("a range without an end", "pass `end`: the least key that is to be kept")
    writes.delete_range(span.start, span.end)
    if not call.flag("idempotent"):
        return _commit(call, writes)
    span = call.store.requests.narrow(span)
    return _at(call.store.requests.delete_live_range(writes, span, call.token, durability(call)))


def batch(call: Invocation) -> Answer:
    """Writes that take effect together. With `read_at` they belong to a transaction, and happen
    only if nothing that it read, the operations `read` and `read_range`, was written since. Rows of
    tables come with `definitions`, a JSON object of the SHA-256 of each table's definition, or in
    a transaction with `rows`."""
    found, read_at = operations(call), call.time("read_at")
    definitions = _definitions(call)
    reads, requests = ReadSet(), call.store.requests
    has_rows = definitions or (read_at is not None and call.flag("rows"))
    rows = {each.key: each.value for each in found if _is_row(each)} if has_rows else {}
    due_at, dues = _Dues(call), {}
    for op, key, end, _, expires in found:
        if key in rows and op == WriteOp.PUT:
            dues[key] = due_at[expires]
        elif op == WriteOp.READ:
            reads.add_key(call.access.require_key(key))
        elif op == WriteOp.READ_RANGE:
            reads.add_span(requests.narrow(call.access.span(Span(key, end))))

    def write(writes: WriteSet | Transaction) -> None:
        for op, key, end, value, expires in found:
            if value is not None and key not in rows:
                _put_in(writes, call.access.require_key(key), value, due_at[expires])
            elif op == WriteOp.DELETE and key not in rows:
                writes.delete(call.access.require_key(key))
            elif op == WriteOp.DELETE_RANGE:
                span = call.access.span(Span(key, end))
                assert span.end is not None, "`operations` looked"
                writes.delete_range(span.start, span.end)

    if rows:
        call.access.require_whole("a write to a table")
        sent = SentRows(call.store)
        if read_at is None:
            return _at(sent.commit(write, rows, dues, definitions, call.token, durability(call)))
        at = call.store.to_time(read_at, name="read_at")
        return _at(sent.commit_reads(write, rows, dues, reads, at, call.token, durability(call)))
    writes = requests.write_set("the batch", BATCH_BYTES_MAX)
    write(writes)
    if not writes:
        return _at(None)
    if read_at is None:
        return _commit(call, writes)
    at = call.store.to_time(read_at, name="read_at")
    return _at(requests.commit_reads(writes, reads, at, call.token, durability(call)))


def put_if(call: Invocation) -> Answer:
    """Set a key on a condition: its value is `expected` (null: it is absent), or it was not written
    after `unchanged_since`. `expires` is as in `put`."""
    return _commit_if(call, _put(call))


def delete_if(call: Invocation) -> Answer:
    """Delete a key on a condition, as in `put_if`."""
    writes = call.store.requests.write_set()
    writes.delete(call.key())
    return _commit_if(call, writes)


def pop(call: Invocation) -> Answer:
    """Delete a key, and return the value that it had."""
    value = call.store.requests.pop(call.key(), call.token, durability(call))
    return {"found": value is not None, "value": to_json(value)}


def increment(call: Invocation) -> Answer:
    """Add `by` to a counter, which is an integer in decimal text, and return the sum. `expires` is
    as in `put`."""
    given, how = call.count("by"), (call.token, durability(call), call.expiry())
    by = 1 if given is None else given
    return {"sum": call.store.requests.increment(call.key(), by, *how)}


def _committed(_: Invocation, at: Timestamp) -> Answer:
    return _at(at)


def _popped(call: Invocation, at: Timestamp) -> Answer:
    value = call.store.requests.popped(call.key(), at)
    return {"found": value is not None, "value": to_json(value)}


def _summed(call: Invocation, at: Timestamp) -> Answer:
    return {"sum": call.store.requests.summed(call.key(), at)}


def persist(call: Invocation) -> Answer:
    """Cancel the expiry of a key. The timestamp is null if the key does not expire."""
    return _at(call.store.requests.persist(call.key(), call.token, durability(call)))


def revert_range(call: Invocation) -> Answer:
    """Restore the state of a span at the time `to` by new versions. The timestamp is null if no key
    differs."""
    span = call.span()
    return _at(call.store.revert_range(span.start, span.end, call["to"]))


def sync(call: Invocation) -> Answer:
    """Complete the time until now and make all changes in it durable."""
    return {"upper": int(call.store.sync())}


def durability(call: Invocation) -> Durability | None:
    """The durability of the commit: the argument, unless the server waits for the disk itself."""
    found: Durability | None = call.word("durability", "") or None
    if call.waits is None:
        return found
    call.waits = (found or call.store.requests.durability) != "async"
    return "async"


class SentWrite(NamedTuple):
    """A row of a batch, as a client sends it."""

    op: int
    key: bytes
    end: bytes | None
    value: bytes | None
    expires: Expires | None


def _sent(op: WriteOp, *required: str, **optional: Parameter) -> Schema:
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
    """An operation as JSON. Raises `UsageError` for one that `OPERATION` excludes."""
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


_REQUIRED_FIELDS: Final = {"key": KEY, "end": BOUND, "value": VALUE}
_OPERATION_FIELDS: Final = {"key": KEY, "end": BOUND.or_null, "value": VALUE, "expires": EXPIRY}
_MAY_HAVE: Final = {
    WriteOp.PUT: {"key", "value", "expires"},
    WriteOp.DELETE: {"key"},
    WriteOp.DELETE_RANGE: {"key", "end"},
    WriteOp.READ: {"key"},
    WriteOp.READ_RANGE: {"key", "end"},
}
OPERATION: Final = object_of(
    {
        "oneOf": [
            _sent(WriteOp.PUT, "key", "value", expires=EXPIRY),
            _sent(WriteOp.DELETE, "key"),
            _sent(WriteOp.DELETE_RANGE, "key", "end"),
            _sent(WriteOp.READ, "key"),
            _sent(WriteOp.READ_RANGE, "key", end=BOUND.or_null),
        ]
    },
    _operation,
)
"""An operation of a batch, as JSON."""


def operations(call: Invocation) -> list[SentWrite]:
    """The operations of a batch. Raises `UsageError` for a wrong row."""
    if call.table is not None:
        names = [field.name for field in WRITES_SCHEMA]
        rows = map(SentWrite, *(call.column(name) for name in names))
        found = [
            row._replace(expires=received_expiry(row.expires)) if type(row.expires) is int else row
            for row in rows
        ]
    else:
        found = call.items("ops")
    for number, (op, _, end, value, expires) in enumerate(found):
        if op not in _CODES:
            raise UsageError(f"operation {number} has the code {op}", _CODE_RULE)
        if (op == WriteOp.PUT) is not (value is not None):
            raise UsageError(f"operation {number} is no put with a value", _VALUE_RULE)
        if expires is not None and op != WriteOp.PUT:
            raise UsageError(f"operation {number} expires, and is no put", _EXPIRY_RULE)
        if (end is not None) > (op in _RANGES) or (op == WriteOp.DELETE_RANGE and end is None):
            raise UsageError(f"operation {number} is no range with an end", _END_RULE)
    return found


def _once(
    run: Callable[[Invocation], Answer], again: Callable[[Invocation, Timestamp], Answer]
) -> Callable[[Invocation], Answer]:
    """The work of a verb that does a request once. `again` makes the first answer anew."""

    def once(call: Invocation) -> Answer:
        try:
            return run(call)
        except (AccessDeniedError, StorageError):
            raise
        except KVStoreError:
            at = _done_at(call)
            if at is None:
                raise
            return again(call, at)

    return once


def _done_at(call: Invocation) -> Timestamp | None:
    requests = call.store.requests
    if call.token is None or not requests.is_done(call.token):
        return None
    return requests.done_at(call.token, durability(call))


_KEY: Final = {"key": KEY.required}
_PUT: Final = {**_KEY, "value": VALUE.required, "expires": EXPIRY}
_CONDITION: Final = {"expected": VALUE.or_null, "unchanged_since": TIME}
_ALWAYS: Final = fields(timestamp=TIMESTAMP)
_PERHAPS: Final = fields(timestamp=or_null(TIMESTAMP))
_TIMES: Final = (HistoryGoneError, NotYetWrittenError)


def _writing(
    run: Callable[[Invocation], Answer],
    parameters: Mapping[str, Parameter],
    result: Schema,
    again: Callable[[Invocation, Timestamp], Answer] = _committed,
    **more: Any,
) -> Verb:
    """A verb whose request is done once."""
    return Verb(
        run.__name__,
        WRITE,
        _once(run, again),
        described(run),
        {**parameters, "durability": word(DURABILITIES)},
        once=True,
        is_short=run is not delete_range,
        result=result,
        **more,
    )


WRITES: Final = [
    _writing(put, _PUT, _ALWAYS),
    _writing(delete, _KEY, _ALWAYS),
    _writing(
        delete_range,
        {**SPAN, "idempotent": FLAG},
        _PERHAPS,
        one_of=("end", "prefix"),
        apart=SPAN_APART,
    ),
    _writing(
        batch,
        {
            "ops": list_of(OPERATION).or_rows,
            "read_at": TIME,
            "definitions": json_text("kvstore-digests", "the digests of definitions, by table"),
            "rows": FLAG,
        },
        _PERHAPS,
        rows=WRITES_SCHEMA,
        errors=(*_TIMES, ConflictError, NotFoundError),
    ),
    _writing(
        put_if,
        {**_PUT, **_CONDITION},
        _ALWAYS,
        one_of=tuple(_CONDITION),
        errors=(*_TIMES, PreconditionError),
    ),
    _writing(
        delete_if,
        {**_KEY, **_CONDITION},
        _ALWAYS,
        one_of=tuple(_CONDITION),
        errors=(*_TIMES, PreconditionError),
    ),
    _writing(pop, _KEY, fields(found=results.FLAG, value=or_null(BYTES)), _popped),
    _writing(persist, _KEY, _PERHAPS),
    _writing(
        increment,
        {**_KEY, "by": integer(-COUNTER_MAX - 1, COUNTER_MAX), "expires": EXPIRY},
        fields(sum=results.INTEGER),
        _summed,
        errors=(NotACounterError,),
    ),
    Verb(
        revert_range.__name__,
        WRITE,
        revert_range,
        described(revert_range),
        {**SPAN, "to": TIME.required.but("pass the time of the state to restore")},
        result=_PERHAPS,
        errors=_TIMES,
        apart=SPAN_APART,
    ),
    Verb(sync.__name__, WRITE, sync, described(sync), {}, result=fields(upper=TIMESTAMP)),
]


def _is_row(each: SentWrite) -> bool:
    return each.op in (WriteOp.PUT, WriteOp.DELETE) and each.key >= FIRST_ROW


class _Dues(dict["Expires | None", "int | None"]):
    """The due time of each expiry of a call: the same for all puts that have the same expiry."""

    def __init__(self, call: Invocation) -> None:
        super().__init__({None: None})
        self._call = call

    def __missing__(self, expires: Expires) -> int:
        due = self[expires] = self._call.store.requests.due(expires, self._call.token)
        return due


def _put_in(writes: WriteSet | Transaction, key: bytes, value: bytes, due: int | None) -> None:
    if due is None:
        writes.put(key, value)
    elif isinstance(writes, Transaction):
        writes.put(key, value, expires=due)
    else:
        writes.put_expiring(key, value, due)


def _definitions(call: Invocation) -> dict[str, str]:
    text = call.text("definitions")
    if text is None:
        return {}
    try:
        found = read_object(text.encode(), where="definitions")
        return {name: found.text(name) for name in found}
    except CorruptionError as error:
        raise UsageError(f"definitions: {error.problem}", "pass a JSON object of texts") from error


def _commit(call: Invocation, writes: WriteSet) -> Answer:
    return _at(call.store.requests.commit(writes, call.token, durability(call)))


def _commit_if(call: Invocation, writes: WriteSet) -> Answer:
    given = call.time("unchanged_since")
    since = None if given is None else call.store.to_time(given, name="unchanged_since")
    timestamp = call.store.requests.write_if(
        writes,
        call.key(),
        call.token,
        durability(call),
        expected=call.value("expected") if call.has("expected") else UNCHECKED,
        unchanged_since=since,
    )
    return _at(timestamp)


def _put(call: Invocation) -> WriteSet:
    writes, expires = call.store.requests.write_set(), call.expiry()
    if expires is None:
        writes.put(call.key(), call["value"])
    else:
        due = call.store.requests.due(expires, call.token)
        writes.put_expiring(call.key(), call["value"], due)
    return writes


def _at(timestamp: int | None) -> Answer:
    return {"timestamp": None if timestamp is None else int(timestamp)}


# --------------------------------------------------------------------------------------------------
# The verbs that begin and end the changesets of callers.


def changeset_verbs(changesets: LentChangesets) -> list[Verb]:
    """The verbs, over the changesets of one server."""

    def open_changeset(call: Invocation) -> Answer:
        """Open a changeset, inside the changeset named `outer` if it is given. A write with the
        header `Kvstore-Changeset: <name>` belongs to it."""
        name, opened = changesets.open(call.text("outer"))
        assert opened.id is not None, "it was entered"
        domain, serial = opened.id
        return {"name": name, "domain": domain, "serial": serial}

    def end_changeset(call: Invocation) -> Answer:
        """End a changeset. Returns the number of its changes."""
        return {"events": changesets.end(call["name"]).events}

    return [
        Verb(
            open_changeset.__name__,
            WRITE,
            open_changeset,
            described(open_changeset),
            {"outer": NAME},
            waits=True,
            result=fields(name=TEXT, domain=INTEGER, serial=INTEGER),
            errors=(UnknownChangesetError,),
        ),
        Verb(
            end_changeset.__name__,
            WRITE,
            end_changeset,
            described(end_changeset),
            {"name": NAME.required},
            waits=True,
            result=fields(events=COUNT),
            errors=(UnknownChangesetError,),
        ),
    ]
