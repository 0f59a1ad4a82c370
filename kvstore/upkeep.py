"""Upkeep of a store as tasks: garbage collection and compaction that continue after a crash.

    queue     arguments                          resumes by
    gc        before or keep_s, compact          the store's own record of how far GC came
    compact   start, end (hex)                   the key up to which files were rewritten
    index     table, index                       a record beside the entries

    store.tasks                                   the queue, in the store's directory
    submit_gc(store, keep=timedelta(days=7))      durable on return
    with Worker(store.tasks, handlers(store)).running():
        ...

Invariants
1. A task that is done twice, or by two threads at once, has the effect of one: GC gives up history
   below a time, and compaction rewrites files as they are.
2. `keep` counts from the time at which the task is done, not from its submission.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from kvstore.base.arguments import AGE
from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX, AgeLike, TimeLike, to_timestamp
from kvstore.codec.json import JsonObject
from kvstore.errors import UsageError
from kvstore.limits import COMPACT_PIECES
from kvstore.store import Store
from kvstore.tasks import Arguments, Handler, TaskProgress, age_of, handler, submit

GC_QUEUE: Final = "gc"
COMPACT_QUEUE: Final = "compact"
INDEX_QUEUE: Final = "index"


def handlers(store: Store, *, every_s: float | None = None) -> Mapping[str, Handler]:
    """The handlers of the tasks that this module submits. They tell progress every `every_s`."""
    return {
        GC_QUEUE: handler(partial(_gc, store), every_s=every_s),
        INDEX_QUEUE: handler(partial(_index, store), every_s=every_s),
        COMPACT_QUEUE: handler(partial(_compact, store), every_s=every_s),
    }


def submit_gc(
    store: Store,
    *,
    before: TimeLike | None = None,
    keep: AgeLike | None = None,
    compact: bool = False,
    task_id: str | None = None,
    report_to: str | None = None,
) -> str:
    """Ask for `store.gc`; returns the task's id. The report has the counts of `GcReport`."""
    if (before is None) == (keep is None):
        raise UsageError("gc takes either before or keep", "pass one of them")
    arguments: dict[str, Any] = {"compact": compact}
    if before is not None:
        arguments["before"] = int(to_timestamp(before, name="before", now=store.now))
    if (age := AGE.or_none.check("keep", keep)) is not None:
        arguments["keep_s"] = age.total_seconds()
    return submit(store.tasks, GC_QUEUE, arguments, task_id=task_id, report_to=report_to)


def submit_compact(
    store: Store,
    start: bytes | None = None,
    end: bytes | None = None,
    *,
    prefix: bytes | None = None,
    task_id: str | None = None,
    report_to: str | None = None,
) -> str:
    """Ask for `store.upkeep.compact` of a span, piece by piece; returns the task's id."""
    span = Span.of(start, end, prefix)
    arguments = {"start": span.start.hex(), "end": None if span.end is None else span.end.hex()}
    return submit(store.tasks, COMPACT_QUEUE, arguments, task_id=task_id, report_to=report_to)


def submit_index(
    store: Store,
    table: str,
    index: str,
    *,
    task_id: str | None = None,
    report_to: str | None = None,
) -> str:
    """Ask for `Table.build_index`; returns the task's id."""
    store.table(table).codec().definition.index(index)
    arguments = {"table": table, "index": index}
    return submit(store.tasks, INDEX_QUEUE, arguments, task_id=task_id, report_to=report_to)


def _index(store: Store, arguments: JsonObject, progress: TaskProgress) -> Arguments:
    rows = 0

    def told(count: int) -> None:
        nonlocal rows
        rows = count
        progress.tell(rows=count)

    store.table(arguments.text("table")).build_index(arguments.text("index"), progress=told)
    return {"rows": rows}


def _gc(store: Store, arguments: JsonObject, progress: TaskProgress) -> Arguments:
    progress.tell(since=int(store.since))
    report = store.gc(
        before=arguments.optional_integer("before", most=TIMESTAMP_MAX),
        keep=age_of(arguments, "keep_s"),
        compact=arguments.field("compact", bool),
    )
    return {
        "since": int(report.since),
        "versions": report.versions,
        "range_tombstones": report.range_tombstones,
        "change_entries": report.change_entries,
        "imports_settled": report.settled,
        "held_back": report.held_back,
        "held_by": [claim.describe(store.now()) for claim in report.held_by],
    }


def _compact(store: Store, arguments: JsonObject, progress: TaskProgress) -> Arguments:
    end = None if arguments.get("end") is None else arguments.hexed("end")
    begun = progress.before if "upto" in progress.before else None
    start = arguments.hexed("start") if begun is None else begun.hexed("upto")
    try:
        rest = Span(start, end)
    except UsageError as error:
        raise arguments.damaged(error.what) from error
    pieces = store.layout.splits(COMPACT_PIECES, rest, with_tables=True)
    for number, piece in enumerate(pieces, 1):
        progress.tell(upto=piece.start.hex(), piece=number, pieces=len(pieces))
        store.upkeep.compact(piece)
    if not arguments.hexed("start") and end is None:
        store.upkeep.compact_index()
    return {"pieces": len(pieces)}
