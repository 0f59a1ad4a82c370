"""The verbs of upkeep, and long work of the owner: its progress as a stream of rows, then its
outcome.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from kvstore.base.meters import WorkCount
from kvstore.errors import (
    KVStoreError,
    RetryableError,
    UsageError,
)
from kvstore.limits import CONTROL_PROGRESS_S
from kvstore.remote import verbs
from kvstore.remote.protocol import failure_fields
from kvstore.remote.server.added import ADDED_WORK, added
from kvstore.remote.server.invocation import Answer, Invocation, serves
from kvstore.timeline.holds import USER, to_fields
from kvstore.timeline.import_records import import_fields
from kvstore.timeline.imports import INGEST_DIRECTORY

# --------------------------------------------------------------------------------------------------
# Long work of the owner of a store: its progress as a stream of rows, then its outcome.
#
# A verb of long work answers with rows of `done`, the progress so far, with its `total` if that is
# known, and a last row with the `result` or the `error`, as JSON. A caller that goes away ends the
# work at its next step.

PROGRESS_SCHEMA: Final = pa.schema(
    [
        ("done", pa.int64()),
        ("total", pa.int64()),
        ("is_about", pa.bool_()),
        ("result", pa.string()),
        ("error", pa.string()),
    ]
)

Work = Callable[[Callable[[int], None]], Mapping[str, Any]]
"""Long work: is given a function that tells progress, and returns its result as JSON."""


def progress_rows(work: Work) -> pa.RecordBatchReader:
    """Do long work in a thread, and stream its progress, then its outcome."""
    return pa.RecordBatchReader.from_batches(PROGRESS_SCHEMA, _Progress(work).rows())


class _Progress:
    """Long work in a thread of its own: the latest progress, and the outcome."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._done: int = WorkCount(0)
        self._outcome: Mapping[str, Any] | BaseException | None = None
        self._is_gone = False

    def rows(self) -> Iterator[pa.RecordBatch]:
        """A row for each progress that the caller has time to take, and the last one for the
        outcome. The end of the rows ends the work: `_tell` raises then."""
        thread = threading.Thread(target=self._run, name="kvstore-control-work", daemon=True)
        thread.start()
        told = 0
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_news(told), CONTROL_PROGRESS_S)
                    done, outcome = self._done, self._outcome
                if done != told or outcome is None:  # also says that the work goes ahead
                    yield _row(done)
                    told = done
                if outcome is not None:
                    yield _ended(done, outcome)
                    return
        finally:
            self._is_gone = True
            thread.join()

    def _has_news(self, told: int) -> Callable[[], bool]:
        return lambda: self._done != told or self._outcome is not None

    def _tell(self, done: int) -> None:
        if self._is_gone:
            raise RetryableError("the caller of this work went away", "call it again")
        with self._changed:
            self._done = done
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            outcome: Mapping[str, Any] | BaseException = self._work(self._tell)
        except BaseException as error:  # noqa: BLE001  # raised where the rows are read
            outcome = error
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()


def _ended(done: int, outcome: Mapping[str, Any] | BaseException) -> pa.RecordBatch:
    if isinstance(outcome, KVStoreError):
        return _row(done, error=json.dumps(failure_fields(outcome)))
    if isinstance(outcome, BaseException):
        raise outcome
    return _row(done, result=json.dumps(outcome))


def _row(done: int, **ending: str) -> pa.RecordBatch:
    count = done if isinstance(done, WorkCount) else WorkCount(done)
    fields = {"done": int(count), "total": count.total, "is_about": count.is_about}
    return pa.RecordBatch.from_pylist([{**fields, **ending}], schema=PROGRESS_SCHEMA)


# --------------------------------------------------------------------------------------------------
# The verbs of upkeep, which only the owner of a store can do for a script beside it.
#
# Claims on history, the records of imports, and the work that only the owner can do. Each is the
# method of `Store`, or of one of its parts, with that name.
#
# A verb of long work answers with rows of progress.

TASK_FIELDS: Final = ("id", "version", "queue", "available_at", "created_at", "changed_at")

# -- claims on history -----------------------------------------------------------------------


@serves(verbs.HOLDS)
def holds(call: Invocation) -> Answer:
    """All holds of the store."""
    found = call.store.holds.all()
    return {"holds": [{"name": record.name, **to_fields(record)} for record in found]}


@serves(verbs.HOLD)
def hold(call: Invocation) -> Answer:
    """Take a hold for a new owner, and fence the one before."""
    taken = call.store.holds.take(
        call["name"],
        call.time("at"),
        call.age("max_age"),
        durable=call.flag("durable"),
        kind=call.text("kind") or USER,
        address=call.text("address") or "",
    )
    return {"token": taken.token, "is_new": taken.is_new}


@serves(verbs.HELD)
def held(call: Invocation) -> Answer:
    """The record of a hold that the caller owns."""
    record = call.store.holds.require_owned(call["name"], call["token"])
    return {"name": record.name, **to_fields(record)}


@serves(verbs.MOVE_HOLD)
def move_hold(call: Invocation) -> Answer:
    """Move a hold that the caller owns."""
    call.store.holds.move(
        call["name"],
        call["token"],
        call["to"],
        durable=call.flag("durable"),
        reached=call.time("reached"),
    )
    return {}


@serves(verbs.RELEASE_HOLD)
def release_hold(call: Invocation) -> Answer:
    """Give up a hold that the caller owns."""
    call.store.holds.release(call["name"], call["token"])
    return {}


@serves(verbs.DROP_HOLD)
def drop_hold(call: Invocation) -> Answer:
    """Remove a hold, whoever owns it."""
    record = call.store.holds.drop(call["name"])
    return {"name": record.name, **to_fields(record)}


# -- imports ---------------------------------------------------------------------------------


@serves(verbs.IMPORTS)
def imports(call: Invocation) -> Answer:
    """The records of all imports that have rows of their own, or are being added."""
    found = call.store.imports.all()
    return {
        "imports": [
            {"import_id": f"{record.import_id:016x}", **import_fields(record)} for record in found
        ]
    }


@serves(verbs.KNOWN_IMPORT)
def known_import(call: Invocation) -> Answer:
    """The record of an import, as long as the store knows it."""
    found = call.store.imports.get(_import_id(call))
    return {"import": None if found is None else import_fields(found)}


@serves(verbs.ADD_IMPORT)
def add_import(call: Invocation) -> Answer:
    """Add the sealed import that a process of this machine has brought to a directory in the
    store's `ingest/`. It is checked as if it were added here: its files, the definitions of its
    tables, their unique indexes. With `none_since`, it is added only if no live key came in its way
    after that time."""
    store = call.store
    if store.path is None:
        raise UsageError("files of an import for a store in memory", "ingest it in its process")
    at, origin = call.time("none_since"), call.text("origin") or ""
    since = None if at is None else int(store.to_time(at, name="none_since"))
    directory = store.path / INGEST_DIRECTORY / call["directory"]
    told = {"origin": origin, "report": call.text("report") or ""}
    add = partial(added(ADDED_WORK, "import"), store, directory, none_since=since, **told)

    def work(tell: Callable[[int], None]) -> Mapping[str, Any]:
        steps = count(1)
        return {"timestamp": int(add(tell=lambda _: tell(next(steps))))}

    return progress_rows(work)


@serves(verbs.ABORT_IMPORT)
def abort_import(call: Invocation) -> Answer:
    """Forget an import that was not added."""
    import_id = _import_id(call)
    return progress_rows(lambda tell: {"aborted": call.store.imports.abort(import_id)})


@serves(verbs.REVERT_IMPORT)
def revert_import(call: Invocation) -> Answer:
    """Undo an import from now on."""
    return {"timestamp": int(call.store.revert_import(_import_id(call)))}


# -- work of the owner -----------------------------------------------------------------------


@serves(verbs.GC)
def gc(call: Invocation) -> Answer:
    """Give up history below `before`, or older than `keep` seconds."""
    store, before = call.store, call.time("before")
    keep, compact = call.age("keep"), call.flag("compact")
    if before is not None:
        before = store.to_time(before, name="before")  # here, because errors of the work come late

    def work(tell: Callable[[int], None]) -> Mapping[str, Any]:
        report = store.gc(before, keep, compact=compact, progress=tell)
        return {
            **{name: getattr(report, name) for name in _GC_COUNTS},
            "lost_holds": [_claim(record) for record in report.lost_holds],
            "held_by": [_claim(record) for record in report.held_by],
        }

    return progress_rows(work)


@serves(verbs.CHECKPOINT)
def checkpoint(call: Invocation) -> Answer:
    """Make a copy of the store, which shares its files by links."""
    path = Path(call["path"])
    return progress_rows(lambda tell: {"timestamp": int(call.store.checkpoint(path))})


@serves(verbs.CLEAR_RANGE)
def clear_range(call: Invocation) -> Answer:
    """Destroy the history of a span."""
    start, end = call.value("start") or b"", call["end"]
    compact = call.flag("compact")
    return progress_rows(
        lambda tell: {"timestamp": int(call.store.clear_range(start, end, compact=compact))}
    )


@serves(verbs.VERIFY)
def verify(call: Invocation) -> Answer:
    """Walk the whole store, and list the problems that are found."""

    def work(tell: Callable[[int], None]) -> Mapping[str, Any]:
        report = call.store.verify(progress=tell)
        counts = {name: getattr(report, name) for name in VERIFY_COUNTS}
        return {**counts, "problems": [[each.where, each.problem] for each in report.problems]}

    return progress_rows(work)


@serves(verbs.SUBMIT_TASK)
def submit_task(call: Invocation) -> Answer:
    """Add a task to the queue of the store."""
    value = call.value()
    task = call.store.tasks.insert(
        call["queue"],
        b"" if value is None else value,
        available_at=call.count("available_at"),
        id=call.text("id"),
    )
    return {"task": {name: getattr(task, name) for name in TASK_FIELDS}}


VERIFY_COUNTS: Final = (
    "complete",
    "keys",
    "versions",
    "range_tombstones",
    "change_entries",
    "seconds",
)
_GC_COUNTS: Final = (
    "since",
    "previous",
    "versions",
    "range_tombstones",
    "change_entries",
    "imports",
    "settled",
    "tidied",
    "seconds",
)


# -- inside ----------------------------------------------------------------------------------


def _claim(record: Any) -> Mapping[str, Any]:
    return {"name": record.name, **to_fields(record)}


def _import_id(call: Invocation) -> int:
    """The id of an import, 16 hex digits: JSON readers round numbers above 2**53."""
    return int(call["import_id"], 16)
