"""The verbs of upkeep, and long work of the owner: its progress as a stream of rows, then its
outcome.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from kvstore.base.meters import WorkCount
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.codec.json import read_object
from kvstore.errors import (
    CorruptionError,
    DependencyError,
    FencedError,
    HistoryGoneError,
    KeyConflictError,
    KVStoreError,
    NotFoundError,
    NotYetWrittenError,
    RetryableError,
    UsageError,
)
from kvstore.limits import CONTROL_PROGRESS_S, TASK_NAME_BYTES_MAX
from kvstore.remote import results
from kvstore.remote.arrivals import NoneCame
from kvstore.remote.parameters import (
    BOUND,
    FLAG,
    KEY,
    NAME,
    TEXT,
    TIME,
    VALUE,
    Parameter,
    Schema,
    count,
    json_text,
    list_of,
    seconds,
    text,
)
from kvstore.remote.protocol import failure_fields
from kvstore.remote.results import ANY_OBJECT, COUNT, TIMESTAMP, fields, items, or_null
from kvstore.remote.server.access import ADMIN
from kvstore.remote.server.invocation import Answer, Invocation, Verb, described
from kvstore.store import Store
from kvstore.timeline.holds import USER, to_fields
from kvstore.timeline.import_records import ImportRecord, import_fields, read_import
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


def told(work: Work) -> pa.RecordBatchReader:
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
# A verb of long work answers with rows of progress: see `kvstore.remote.server.verbs.upkeep`.

TASK_FIELDS: Final = ("id", "version", "queue", "available_at", "created_at", "changed_at")

# -- claims on history -----------------------------------------------------------------------


def holds(call: Invocation) -> Answer:
    """All holds of the store."""
    found = call.store.holds.all()
    return {"holds": [{"name": record.name, **to_fields(record)} for record in found]}


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


def held(call: Invocation) -> Answer:
    """The record of a hold that the caller owns."""
    record = call.store.holds.require_owned(call["name"], call["token"])
    return {"name": record.name, **to_fields(record)}


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


def release_hold(call: Invocation) -> Answer:
    """Give up a hold that the caller owns."""
    call.store.holds.release(call["name"], call["token"])
    return {}


def drop_hold(call: Invocation) -> Answer:
    """Remove a hold, whoever owns it."""
    record = call.store.holds.drop(call["name"])
    return {"name": record.name, **to_fields(record)}


# -- imports ---------------------------------------------------------------------------------


def imports(call: Invocation) -> Answer:
    """The records of all imports that have rows of their own, or are being added."""
    found = call.store.imports.all()
    return {
        "imports": [
            {"import_id": f"{record.import_id:016x}", **import_fields(record)} for record in found
        ]
    }


def known_import(call: Invocation) -> Answer:
    """The record of an import, as long as the store knows it."""
    found = call.store.imports.get(_import_id(call))
    return {"import": None if found is None else import_fields(found)}


def prepare_import(call: Invocation) -> Answer:
    """Write down that an import is about to be added."""
    keys = None
    if call.has("keys"):
        keys = set(call.items("keys"))
    call.store.imports.prepare(_record(call), keys)
    return {}


def add_import(call: Invocation) -> Answer:
    """Take the files of an import from a directory in the store's `ingest/`, and make its rows
    visible at one time. With `none_since`, only if no live key came in its way after that time."""
    store, record = call.store, _record(call)
    if store.path is None:
        raise UsageError("files of an import for a store in memory", "ingest it in its process")
    files = [store.path / INGEST_DIRECTORY / name for name in call["files"]]
    at = call.time("none_since")
    since = None if at is None else int(store.to_time(at, name="none_since"))
    return told(lambda tell: {"timestamp": int(_add(store, record, files, since))})


def _add(store: Store, record: ImportRecord, files: list[Path], since: int | None) -> Timestamp:
    imports = store.imports
    with imports.alone(record.import_id, adding=True):
        known = imports.find(record)
        if known is not None and known.added is not None:
            return known.added
        if known is None:
            raise UsageError(f"import {record.import_id} was aborted meanwhile", "ingest it again")
        if not imports.is_linked(record):
            imports.flush()
            imports.link(files)
        check = None
        if since is not None:
            # Below `since` the changes are not whole: then all live keys are looked at.
            check = NoneCame(store, record, since if since >= store.whole_since else 0)
        return imports.add(record.import_id, check=check)


def abort_import(call: Invocation) -> Answer:
    """Forget an import that was not added."""
    import_id = _import_id(call)
    return told(lambda tell: {"aborted": call.store.imports.abort(import_id)})


def revert_import(call: Invocation) -> Answer:
    """Undo an import from now on."""
    return {"timestamp": int(call.store.revert_import(_import_id(call)))}


# -- work of the owner -----------------------------------------------------------------------


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

    return told(work)


def checkpoint(call: Invocation) -> Answer:
    """Make a copy of the store, which shares its files by links."""
    path = Path(call["path"])
    return told(lambda tell: {"timestamp": int(call.store.checkpoint(path))})


def clear_range(call: Invocation) -> Answer:
    """Destroy the history of a span."""
    start, end = call.value("start") or b"", call["end"]
    compact = call.flag("compact")
    return told(
        lambda tell: {"timestamp": int(call.store.clear_range(start, end, compact=compact))}
    )


def verify(call: Invocation) -> Answer:
    """Walk the whole store, and list the problems that are found."""

    def work(tell: Callable[[int], None]) -> Mapping[str, Any]:
        report = call.store.verify(progress=tell)
        counts = {name: getattr(report, name) for name in VERIFY_COUNTS}
        return {**counts, "problems": [[each.where, each.problem] for each in report.problems]}

    return told(work)


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

_FILE: Final = text(
    pattern=r"[A-Za-z0-9_-]+/part-[A-Za-z0-9_.-]+\.sst",
    hint="pass <directory>/<file> of an import in ingest/",
)
_IMPORT_ID: Final = text(
    1, 16, pattern="0*[1-9a-fA-F][0-9a-fA-F]*", hint="pass 16 hex digits, not all 0"
)
_IMPORT: Final = {"import_id": _IMPORT_ID.required}
_RECORD: Final = {
    **_IMPORT,
    "record": json_text("kvstore-import", "the record of an import").required,
}
_HOLD: Final = {"name": NAME.required.but("pass the name of a hold")}
_OWNED: Final = {**_HOLD, "token": TEXT.required}
_TASK_NAME: Final = text(1, TASK_NAME_BYTES_MAX)
_HELD: Final = fields(
    name=results.TEXT,
    timestamp=TIMESTAMP,
    token=results.TEXT,
    max_age_ns=or_null(COUNT),
    lost=results.FLAG,
    kind=results.TEXT,
    address=results.TEXT,
    owner=results.TEXT,
    created_at=or_null(COUNT),
    moved_at=or_null(COUNT),
    reached=or_null(COUNT),
    state_from=or_null(results.TEXT),
)
_TASK: Final = fields(
    id=results.TEXT,
    version=COUNT,
    queue=results.TEXT,
    available_at=COUNT,
    created_at=COUNT,
    changed_at=COUNT,
)
_TIMES: Final = (HistoryGoneError, NotYetWrittenError)
_OF_HOLD: Final = (NotFoundError, FencedError, *_TIMES)


def _upkeep(
    run: Callable[[Invocation], Answer],
    parameters: Mapping[str, Parameter],
    result: Schema | None = None,
    errors: tuple[type[KVStoreError], ...] = (),
) -> Verb:
    """A verb of upkeep. One without a `result` tells its progress."""
    return Verb(run.__name__, ADMIN, run, described(run), parameters, result=result, errors=errors)


UPKEEP: Final = [
    _upkeep(holds, {}, fields(holds=items(_HELD))),
    _upkeep(
        hold,
        {
            **_HOLD,
            "at": TIME,
            "max_age": seconds(),
            "durable": FLAG,
            "kind": NAME,
            "address": TEXT,
        },
        fields(token=results.TEXT, is_new=results.FLAG),
        _TIMES,
    ),
    _upkeep(held, _OWNED, _HELD, _OF_HOLD),
    _upkeep(
        move_hold,
        {**_OWNED, "to": TIME.required, "durable": FLAG, "reached": TIME},
        fields(),
        _OF_HOLD,
    ),
    _upkeep(release_hold, _OWNED, fields(), _OF_HOLD),
    _upkeep(drop_hold, _HOLD, _HELD, (NotFoundError,)),
    _upkeep(imports, {}, fields(imports=items(ANY_OBJECT))),
    _upkeep(known_import, _IMPORT, fields(**{"import": or_null(ANY_OBJECT)})),
    _upkeep(prepare_import, {**_RECORD, "keys": list_of(KEY)}, fields(), (KeyConflictError,)),
    _upkeep(add_import, {**_RECORD, "files": list_of(_FILE).required, "none_since": TIME}),
    _upkeep(abort_import, _IMPORT),
    _upkeep(revert_import, _IMPORT, fields(timestamp=TIMESTAMP), (NotFoundError, HistoryGoneError)),
    _upkeep(gc, {"before": TIME, "keep": seconds(), "compact": FLAG}, errors=_TIMES),
    _upkeep(
        checkpoint,
        {"path": text(1, pattern="/[^\\x00]*", hint="pass an absolute path").required},
    ),
    _upkeep(verify, {}),
    _upkeep(
        clear_range,
        {
            "start": BOUND,
            "end": BOUND.required.but("pass the least key that is to be kept"),
            "compact": FLAG,
        },
    ),
    _upkeep(
        submit_task,
        {
            "queue": _TASK_NAME.required,
            "value": VALUE,
            "available_at": count(0, TIMESTAMP_MAX),
            "id": _TASK_NAME,
        },
        fields(task=_TASK),
        (DependencyError,),
    ),
]


# -- inside ----------------------------------------------------------------------------------


def _claim(record: Any) -> Mapping[str, Any]:
    return {"name": record.name, **to_fields(record)}


def _import_id(call: Invocation) -> int:
    """The id of an import, 16 hex digits: JSON readers round numbers above 2**53."""
    return int(call["import_id"], 16)


def _record(call: Invocation) -> ImportRecord:
    try:
        stored = read_object(call["record"].encode(), where="the request")
        return read_import(_import_id(call), stored)
    except CorruptionError as error:
        raise UsageError(f"record: {error.problem}", "pass the record of an import") from error
