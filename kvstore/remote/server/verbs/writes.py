"""The verbs that write, and the verbs that begin and end the changesets of callers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.codec.json import read_object
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    KVStoreError,
    StorageError,
    UsageError,
)
from kvstore.limits import BATCH_BYTES_MAX
from kvstore.mvcc import WriteSet
from kvstore.mvcc.arrow import items_of
from kvstore.remote import verbs
from kvstore.remote.protocol import WRITES_SCHEMA, WriteOp, to_json
from kvstore.remote.server.invocation import Answer, Invocation, RunVerb, serves
from kvstore.remote.server.verbs.tables import SentChange, SentRows
from kvstore.remote.verbs import SentWrite, Verb
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import Expires, received_expiry
from kvstore.timeline.reserved import FIRST_ROW
from kvstore.transaction import UNCHECKED, ReadSet, Transaction

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

_CODES: Final = frozenset(int(op) for op in WriteOp)
_RANGES: Final = (WriteOp.DELETE_RANGE, WriteOp.READ_RANGE)

_CODE_RULE: Final = f"pass one of {', '.join(map(str, sorted(_CODES)))}"
_VALUE_RULE: Final = "pass a value with each put, and with no other operation"
_EXPIRY_RULE: Final = "pass a due time with puts alone"
_END_RULE: Final = "pass an end with each range, and with no other operation"


def _committed(_: Invocation, at: Timestamp) -> Answer:
    return _at(at)


def _popped(call: Invocation, at: Timestamp) -> Answer:
    value = call.store.requests.popped(call.key(), at)
    return {"found": value is not None, "value": to_json(value)}


def _summed(call: Invocation, at: Timestamp) -> Answer:
    return {"sum": call.store.requests.summed(call.key(), at)}


def done_once(
    declared: Verb[Any], *, again: Callable[[Invocation, Timestamp], Answer] = _committed
) -> Callable[[RunVerb], RunVerb]:
    """The decorator of the work of a verb that does a request once. `again` makes the first answer
    anew."""

    def decorated(run: RunVerb) -> RunVerb:
        @serves(declared)
        @wraps(run)
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

    return decorated


@done_once(verbs.PUT)
def put(call: Invocation) -> Answer:
    """Set a key. `expires` is the time at which it is deleted: `+1h` counts from now."""
    return _commit(call, _put(call))


@done_once(verbs.DELETE)
def delete(call: Invocation) -> Answer:
    """Delete a key, which may be absent. Its history stays."""
    writes = call.store.requests.write_set()
    writes.delete(call.key())
    return _commit(call, writes)


@done_once(verbs.DELETE_RANGE)
def delete_range(call: Invocation) -> Answer:
    """Delete all keys from `start` to below `end`, or with `prefix`; with `idempotent` only if one
    is alive."""
    span, writes = call.span(), call.store.requests.write_set()
    if span.end is None:  # of a prefix above which no key lies
        span = Span.to_delete(None, None, span.start)
    writes.delete_range(span.start, span.end)
    if not call.flag("idempotent"):
        return _commit(call, writes)
    span = call.store.requests.narrow(span)
    return _at(call.store.requests.delete_live_range(writes, span, call.token, durability(call)))


@done_once(verbs.BATCH)
def batch(call: Invocation) -> Answer:
    """Writes that take effect together. With `read_at` they belong to a transaction, and happen
    only if nothing that it read, the operations `read` and `read_range`, was written since. Rows of
    tables come with `definitions`, a JSON object of the SHA-256 of each table's definition, or in
    a transaction with `rows`."""
    read_at, definitions = call.time("read_at"), _definitions(call)
    puts = _puts(call)
    if puts is not None and read_at is None:
        keys, values = puts
        if not definitions or max(keys) < FIRST_ROW:
            return _put_plain(call, keys, values)
        if min(keys) >= FIRST_ROW:
            call.access.require_whole("a write to a table")
            rows_sent = SentChange(dict(zip(keys, values, strict=True)), {}, [])
            sent = SentRows(call.store)
            how = (rows_sent, definitions, call.token, durability(call))
            return _at(sent.commit(_nothing, *how))
    found = operations(call)
    reads, requests = ReadSet(), call.store.requests
    has_rows = definitions or (read_at is not None and call.flag("rows"))
    rows = {each.key: each.value for each in found if _is_row(each)} if has_rows else {}
    spans = [Span(each.key, each.end) for each in found if has_rows and _is_row_range(each)]
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
            elif op == WriteOp.DELETE_RANGE and not (has_rows and key >= FIRST_ROW):
                span = call.access.span(Span(key, end))
                assert span.end is not None, "`operations` looked"
                writes.delete_range(span.start, span.end)

    if rows or spans:
        call.access.require_whole("a write to a table")
        sent, made = SentRows(call.store), SentChange(rows, dues, spans)
        if read_at is None:
            return _at(sent.commit(write, made, definitions, call.token, durability(call)))
        at = call.store.to_time(read_at, name="read_at")
        return _at(sent.commit_reads(write, made, reads, at, call.token, durability(call)))
    writes = requests.write_set("the batch", BATCH_BYTES_MAX)
    write(writes)
    if not writes:
        return _at(None)
    if read_at is None:
        return _commit(call, writes)
    at = call.store.to_time(read_at, name="read_at")
    return _at(requests.commit_reads(writes, reads, at, call.token, durability(call)))


def _nothing(_: object) -> None:
    """Write nothing besides rows."""


def _puts(call: Invocation) -> tuple[list[bytes], list[bytes]] | None:
    """The keys and values of a batch of puts that do not expire, which has rows; None of any other
    one. Costs 0.1 us a row; `operations` takes 1 us."""
    table = call.table
    if table is None or not table.num_rows:
        return None
    for name in table.column_names:
        column = table.column(name)
        if name == "op":
            if not all((chunk.to_numpy() == WriteOp.PUT).all() for chunk in column.chunks):
                return None
        elif column.null_count != (0 if name in ("key", "value") else len(column)):
            return None
    if "value" not in table.column_names:
        return None
    return items_of(table.column("key")), items_of(table.column("value"))


def _put_plain(call: Invocation, keys: list[bytes], values: list[bytes]) -> Answer:
    writes = call.store.requests.write_set("the batch", BATCH_BYTES_MAX)
    put = writes.put
    for key, value in zip(call.access.require_keys(keys), values, strict=True):
        put(key, value)
    return _commit(call, writes)


@done_once(verbs.PUT_IF)
def put_if(call: Invocation) -> Answer:
    """Set a key on a condition: its value is `expected` (null: it is absent), or it was not written
    after `unchanged_since`. `expires` is as in `put`."""
    return _commit_if(call, _put(call))


@done_once(verbs.DELETE_IF)
def delete_if(call: Invocation) -> Answer:
    """Delete a key on a condition, as in `put_if`."""
    writes = call.store.requests.write_set()
    writes.delete(call.key())
    return _commit_if(call, writes)


@done_once(verbs.POP, again=_popped)
def pop(call: Invocation) -> Answer:
    """Delete a key, and return the value that it had."""
    value = call.store.requests.pop(call.key(), call.token, durability(call))
    return {"found": value is not None, "value": to_json(value)}


@done_once(verbs.INCREMENT, again=_summed)
def increment(call: Invocation) -> Answer:
    """Add `by` to a counter, which is an integer in decimal text, and return the sum. `expires` is
    as in `put`."""
    given, how = call.count("by"), (call.token, durability(call), call.expiry())
    by = 1 if given is None else given
    return {"sum": call.store.requests.increment(call.key(), by, *how)}


@done_once(verbs.PERSIST)
def persist(call: Invocation) -> Answer:
    """Cancel the expiry of a key. The timestamp is null if the key does not expire."""
    return _at(call.store.requests.persist(call.key(), call.token, durability(call)))


@serves(verbs.REVERT_RANGE)
def revert_range(call: Invocation) -> Answer:
    """Restore the state of a span at the time `to` by new versions. The timestamp is null if no key
    differs."""
    span = call.span()
    return _at(call.store.revert_range(span.start, span.end, call["to"]))


@serves(verbs.SYNC)
def sync(call: Invocation) -> Answer:
    """Complete the time until now and make all changes in it durable."""
    return {"upper": int(call.store.sync())}


def durability(call: Invocation) -> Durability | None:
    """The durability of the commit: the argument. Where the server waits for the disk itself, it is
    `async`, and `call.awaits_disk` notes whether the caller must wait."""
    found: Durability | None = call.word("durability", "") or None
    if call.awaits_disk is None:
        return found
    call.awaits_disk = (found or call.store.requests.durability) != "async"
    return "async"


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


def _done_at(call: Invocation) -> Timestamp | None:
    requests = call.store.requests
    if call.token is None or not requests.is_done(call.token):
        return None
    return requests.done_at(call.token, durability(call))


def _is_row(each: SentWrite) -> bool:
    return each.op in (WriteOp.PUT, WriteOp.DELETE) and each.key >= FIRST_ROW


def _is_row_range(each: SentWrite) -> bool:
    return each.op == WriteOp.DELETE_RANGE and each.key >= FIRST_ROW


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


@serves(verbs.OPEN_CHANGESET)
def open_changeset(call: Invocation) -> Answer:
    """Open a changeset, inside the changeset named `outer` if it is given. A write with the
    header `Kvstore-Changeset: <name>` belongs to it."""
    name, opened = call.changesets.open(call.text("outer"))
    assert opened.id is not None, "it was entered"
    domain, serial = opened.id
    return {"name": name, "domain": domain, "serial": serial}


@serves(verbs.END_CHANGESET)
def end_changeset(call: Invocation) -> Answer:
    """End a changeset. Returns the number of its changes."""
    return {"events": call.changesets.end(call["name"]).events}
