"""The verbs that write: each is the method of `Store` with its name, and `batch` is also the commit
of a transaction, whose reads come with its writes."""

from __future__ import annotations

from typing import Any, Final

from kvstore.commit import Durability
from kvstore.commit.durability import DURABILITIES
from kvstore.errors import UsageError
from kvstore.protocol import WRITES_SCHEMA, WriteOp, from_json
from kvstore.server.access import WRITE
from kvstore.server.invocation import Invocation
from kvstore.server.verbs.verb import Answer, Verb, described
from kvstore.span import Span

_OPS: Final = {op.name.lower(): op for op in WriteOp}


def put(call: Invocation) -> Answer:
    """Set a key."""
    value = call.value()
    if value is None:
        raise UsageError("argument 'value' is missing", "pass the value, or call delete")
    return _at(call.store.put(call.key(), value, durability=durability(call)))


def delete(call: Invocation) -> Answer:
    """Delete a key, which may be absent. Its history stays."""
    return _at(call.store.delete(call.key(), durability=durability(call)))


def delete_range(call: Invocation) -> Answer:
    """Delete all keys from `start` to below `end`; with `idempotent` only if one is alive."""
    span = call.span()
    if span.end is None:
        raise UsageError("argument 'end' is missing", "pass the least key that is to be kept")
    return _at(
        call.store.delete_range(
            span.start, span.end, call.flag("idempotent"), durability=durability(call)
        )
    )


def batch(call: Invocation) -> Answer:
    """Writes that take effect together."""
    with call.store.batch(durability=durability(call)) as writes:
        for op, key, end, value in operations(call):
            if value is not None:
                writes.put(call.access.require_key(key), value)
            elif op == WriteOp.DELETE:
                writes.delete(call.access.require_key(key))
            elif end is not None:
                span = call.access.span(Span(key, end))
                writes.delete_range(span.start, end)
    return _at(writes.timestamp)


def put_if(call: Invocation) -> Answer:
    """Set a key on a condition: its value is `expected` (null: it is absent), or it was not written
    after `unchanged_since`."""
    value = call.value()
    if value is None:
        raise UsageError("argument 'value' is missing", "pass the value, or call delete_if")
    condition = _condition(call)
    return _at(call.store.put_if(call.key(), value, durability=durability(call), **condition))


def delete_if(call: Invocation) -> Answer:
    """Delete a key on a condition, which is that of `put_if`."""
    return _at(call.store.delete_if(call.key(), durability=durability(call), **_condition(call)))


def sync(call: Invocation) -> Answer:
    """Complete the time until now and make all changes in it durable."""
    return {"upper": int(call.store.sync())}


def durability(call: Invocation) -> Durability | None:
    """The argument `durability`."""
    found: Durability | None = call.words("durability", DURABILITIES, "") or None
    return found


def operations(call: Invocation) -> list[tuple[int, bytes, bytes | None, bytes | None]]:
    """The operations of a batch: code, key, end, value. Raises `UsageError` for a wrong row."""
    if call.table is not None:
        names = [field.name for field in WRITES_SCHEMA]
        found = list(zip(*(call.column(name) for name in names), strict=True))
    else:
        found = [_operation(item, n) for n, item in enumerate(call.items("ops"))]
    for number, (op, _, end, value) in enumerate(found):
        if op not in _CODES or (op == WriteOp.PUT) is not (value is not None):
            raise UsageError(f"operation {number}", "a put has a value, and no other one has")
        if (end is not None) > (op in _RANGES) or (op == WriteOp.DELETE_RANGE and end is None):
            raise UsageError(f"operation {number}", "a range has an end, and no other one has")
    return found


WRITES: Final = [
    Verb(name, right, run, described(run), {**parameters, "durability": "text"}, rows, once=once)
    for name, right, run, parameters, rows, once in (
        ("put", WRITE, put, {"key": "bytes", "value": "bytes"}, None, True),
        ("delete", WRITE, delete, {"key": "bytes"}, None, True),
        (
            "delete_range",
            WRITE,
            delete_range,
            {"start": "bytes", "end": "bytes", "idempotent": "flag"},
            None,
            True,
        ),
        ("batch", WRITE, batch, {"ops": "list of operations"}, WRITES_SCHEMA, True),
        (
            "put_if",
            WRITE,
            put_if,
            {"key": "bytes", "value": "bytes", "expected": "bytes", "unchanged_since": "time"},
            None,
            True,
        ),
        (
            "delete_if",
            WRITE,
            delete_if,
            {"key": "bytes", "expected": "bytes", "unchanged_since": "time"},
            None,
            True,
        ),
        ("sync", WRITE, sync, {}, None, False),
    )
]

_CODES: Final = frozenset(int(op) for op in WriteOp)
_RANGES: Final = (WriteOp.DELETE_RANGE, WriteOp.READ_RANGE)


def _condition(call: Invocation) -> dict[str, Any]:
    found: dict[str, Any] = {"unchanged_since": call.time("unchanged_since")}
    if call.has("expected"):
        found["expected"] = call.value("expected")
    return found


def _operation(item: Any, number: int) -> tuple[int, bytes, bytes | None, bytes | None]:
    if type(item) is not dict or not item.keys() <= {"op", "key", "end", "value"}:
        raise UsageError(f"ops[{number}]", 'pass {"op": ..., "key": ..., "end": ..., "value": ...}')
    op = _OPS.get(item.get("op", ""))
    if op is None:
        raise UsageError(f"ops[{number}]: op {item.get('op')!r}", f"pass one of {', '.join(_OPS)}")

    def read(name: str) -> bytes | None:
        found = item.get(name)
        return None if found is None else from_json(found, name=f"ops[{number}].{name}")

    return op, read("key") or b"", read("end"), read("value")


def _at(timestamp: int | None) -> Answer:
    return {"timestamp": None if timestamp is None else int(timestamp)}
