"""Stores over crafted bytes: their families are written past all checks, then everything is read.

    stored   := {family: {key: value}}        what an engine holds, taken from a real store
    outcome  := the answer, or the error, of each way to read

A store over the same bytes must give the same outcomes. A store over rotten bytes must give the
right answers or errors of the tree in `kvstore.errors`. An error of any other kind is a defect:
`outcomes` lets it pass through to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, Final, TypeAlias, get_args

import pyarrow as pa

from kvstore.base.clock import ManualClock
from kvstore.base.span import Span
from kvstore.changes.windows import Order, Revisions
from kvstore.engine.api import CHANGES, DATA, META, RANGES, Engine, pairs
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.errors import KVStoreError
from kvstore.feeds.replica import SmallExport
from kvstore.opening import assemble
from kvstore.store import Store

Stored: TypeAlias = "dict[str, dict[bytes, bytes]]"
Outcomes: TypeAlias = "dict[str, object]"

FAMILIES: Final = (DATA, RANGES, CHANGES, META)


def stored_in(engine: Engine) -> Stored:
    """All entries in the families of an engine."""
    return {family: dict(pairs(engine.cursor(family))) for family in FAMILIES}


def write_over(engine: Engine, stored: Mapping[str, Mapping[bytes, bytes | None]]) -> None:
    """Put these entries into an engine as they are; None deletes one."""
    batch = engine.batch()
    for family, entries in stored.items():
        for key, value in entries.items():
            if value is None:
                batch.delete(key, engine.families[family])
            else:
                batch.put(key, value, engine.families[family])
    engine.write(batch)


@contextmanager
def crafted_store(stored: Mapping[str, Mapping[bytes, bytes]]) -> Iterator[Store]:
    """A store in memory that holds these entries. Raises what opening it raises."""
    engine = MemoryEngine(None)
    write_over(engine, stored)
    store = assemble(Store, None, engine, durability="async", clock=ManualClock(1))
    try:
        yield store
    finally:
        # Not `close`, which writes: the crafted state may not allow it, and nothing is kept.
        engine.close()


def reads(store: Store, keys: list[bytes]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every way to read a store that needs no disk, by name."""
    since, upper = max(store.whole_since, store.indexed_since), store.upper
    middle = (since + upper - 1) // 2
    yield "get", lambda: [store.get(key) for key in keys]
    yield "get as of", lambda: [store.get(key, middle) for key in keys]
    yield "get_many", lambda: store.get_many(keys)
    yield "get_many at times", lambda: store.get_many(keys, [middle] * len(keys))
    yield "join", lambda: store.join(pa.table({"id": keys}), at=None).read_all().to_pylist()
    yield "floor_many", lambda: store.floor_many([key + b"~" for key in keys])
    yield "scan", lambda: list(store.scan())
    yield "scan reverse", lambda: list(store.scan(reverse=True))
    yield "scan as of", lambda: list(store.scan(as_of=middle))
    yield "scan_batches", lambda: store.scan_batches().read_all().to_pylist()
    yield "history", lambda: [store.history(key) for key in keys]
    for order, revisions in product(get_args(Order), get_args(Revisions)):
        changes = partial(store.changes, since, order=order, revisions=revisions)
        yield f"changes by {order}, {revisions}", partial(_listed, changes)
    yield "changes of a span", lambda: list(store.changes(since, start=b"b", end=b"n"))
    yield "changes from 0", lambda: list(store.changes(0, revisions="latest"))
    yield "changes_batches", lambda: _rows(store.changes_batches(since))
    yield "changes_batches pre+post", lambda: _rows(store.changes_batches(since, images="pre+post"))
    for expand in ("none", "imports", "all"):
        events = partial(store.events, since, expand=expand, images="pre+post")
        yield f"events, {expand}", partial(_listed, events)
    yield "events without images", lambda: list(store.events(since))
    yield "versions", lambda: list(store.replication.versions(since=since, upto=upper - 1))
    yield "export", lambda: _exported(store, since=since, upto=upper - 1)
    yield "export of all", lambda: _exported(store, since=None, upto=upper - 1)
    yield "epochs", lambda: len(list(store.epochs()))
    yield (
        "quiescent points",
        lambda: [list(p.changes()) for p in store.feeds.quiescent_points(since)],
    )
    yield "generations", store.generations
    yield "imports", store.imports.all
    yield "holds", lambda: [(hold.name, hold.timestamp) for hold in store.holds.all()]
    yield "range_deletes", lambda: store.replication.range_deletes(since, upper - 1, Span())
    yield "splits", lambda: store.layout.splits(4)
    yield "stats", lambda: sorted(store.stats())


def outcomes(store: Store, keys: list[bytes]) -> Outcomes:
    """The outcome of each way to read, by name. Raises errors that are not in our tree."""
    return {name: outcome(read) for name, read in reads(store, keys)}


def outcome(call: Callable[[], object]) -> object:
    """The answer of a call, or its error if that is in our tree."""
    try:
        return call()
    except KVStoreError as error:
        return error


def upkeep(store: Store) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that read everything and then write, by name. Each is made once, in this order."""
    since = store.since
    middle = (since + store.upper - 1) // 2

    def conflict() -> None:
        with store.transaction() as transaction:
            list(transaction.scan())
            transaction.get(b"a")
            store.put(b"zz", b"beside")
            transaction.put(b"zzz", b"v")

    yield "transaction", conflict
    yield "put_if", lambda: store.put_if(b"zz", b"v", expected=None)
    yield "revert_range", lambda: store.revert_range(b"", None, middle)
    yield "clear_range", lambda: store.clear_range(b"q", b"r")
    for record in store.imports.all():
        yield "revert_import", partial(store.revert_import, record.import_id)
    for hold in store.holds.all():
        yield "release", store.hold(hold.name).release
    yield "gc half", lambda: store.gc(before=middle)
    yield "gc", lambda: store.gc(before=store.upper - 1)
    yield "sync", store.sync


def _listed(call: Callable[[], Iterable[object]]) -> list[object]:
    return list(call())


def _rows(reader: Any) -> list[Any]:
    table = reader.read_all()
    table.validate(full=True)
    rows: list[Any] = table.to_pylist()
    return rows


def _exported(store: Store, **window: Any) -> object:
    found = store.replication.export(**window)
    if isinstance(found, SmallExport):
        return found.changes
    columns = [
        (part.keys.to_pylist(), part.timestamps.tolist(), part.is_value.tolist(), part.values)
        for part in found.columns
    ]
    return columns, found.tombstones
