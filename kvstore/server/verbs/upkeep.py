"""The verbs of upkeep, which only the owner of a store can do for a script beside it.

Claims on history, the records of imports, and the work that only the owner can do. Each is the
method of `Store`, or of one of its parts, with that name.

A verb of long work answers with rows of progress: see `kvstore.server.verbs.progress`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.arrivals import NoneCame
from kvstore.claims import USER, to_fields
from kvstore.codec.json import read_object
from kvstore.errors import CorruptionError, UsageError
from kvstore.imports import INGEST_DIRECTORY, ImportRecord, import_fields, read_import
from kvstore.protocol import from_json
from kvstore.server.access import ADMIN
from kvstore.server.invocation import Invocation
from kvstore.server.verbs.progress import told
from kvstore.server.verbs.verb import Answer, Verb, described
from kvstore.store import Store
from kvstore.timestamp import Timestamp

TASK_FIELDS: Final = ("id", "version", "queue", "available_at", "created_at", "changed_at")

# -- claims on history -----------------------------------------------------------------------


def holds(call: Invocation) -> Answer:
    """All holds of the store."""
    found = call.store.holds.all()
    return {"holds": [{"name": record.name, **to_fields(record)} for record in found]}


def hold(call: Invocation) -> Answer:
    """Take a hold for a new owner, and fence the one before."""
    taken = call.store.holds.take(
        _name(call),
        call.time("at"),
        call.age("max_age"),
        durable=call.flag("durable"),
        kind=call.text("kind") or USER,
        address=call.text("address") or "",
    )
    return {"token": taken.token, "is_new": taken.is_new}


def held(call: Invocation) -> Answer:
    """The record of a hold that the caller owns."""
    record = call.store.holds.require_owned(_name(call), call.text("token") or "")
    return {"name": record.name, **to_fields(record)}


def move_hold(call: Invocation) -> Answer:
    """Move a hold that the caller owns."""
    to = call.time("to")
    if to is None:
        raise UsageError("argument 'to' is missing", "pass a time")
    call.store.holds.move(
        _name(call),
        call.text("token") or "",
        to,
        durable=call.flag("durable"),
        reached=call.time("reached"),
    )
    return {}


def release_hold(call: Invocation) -> Answer:
    """Give up a hold that the caller owns."""
    call.store.holds.release(_name(call), call.text("token") or "")
    return {}


def drop_hold(call: Invocation) -> Answer:
    """Remove a hold, whoever owns it."""
    record = call.store.holds.drop(_name(call))
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
        keys = {from_json(key, name="keys") for key in call.items("keys")}
    call.store.imports.prepare(_record(call), keys)
    return {}


def add_import(call: Invocation) -> Answer:
    """Take the files of an import from a directory in the store's `ingest/`, and make its rows
    visible at one time. With `none_since`, only if no live key came in its way after that time."""
    store, record = call.store, _record(call)
    files = [_brought(store.path, name) for name in call.items("files")]
    since = call.count("none_since")
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
    before, keep, compact = call.time("before"), call.age("keep"), call.flag("compact")
    store = call.store

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
    path = Path(call.text("path") or "")
    if not path.is_absolute():
        raise UsageError(f"path {str(path)!r}", "pass an absolute path")
    return told(lambda tell: {"timestamp": int(call.store.checkpoint(path))})


def clear_range(call: Invocation) -> Answer:
    """Destroy the history of a span."""
    span, compact = call.span(), call.flag("compact")
    if span.end is None:
        raise UsageError("argument 'end' is missing", "pass the least key that is to be kept")
    end = span.end
    return told(
        lambda tell: {"timestamp": int(call.store.clear_range(span.start, end, compact=compact))}
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
        call.text("queue") or "",
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
_INGESTED: Final = re.compile(r"[\w-]+/part-[\w.-]+\.sst")
_RECORD: Final = {"import_id": "text", "record": "text"}
_OWNED: Final = {"name": "text", "token": "text"}
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

UPKEEP: Final = [
    Verb(run.__name__, ADMIN, run, described(run), parameters)
    for run, parameters in (
        (holds, {}),
        (
            hold,
            {
                "name": "text",
                "at": "time",
                "max_age": "seconds",
                "durable": "flag",
                "kind": "text",
                "address": "text",
            },
        ),
        (held, _OWNED),
        (move_hold, {**_OWNED, "to": "time", "durable": "flag", "reached": "time"}),
        (release_hold, _OWNED),
        (drop_hold, {"name": "text"}),
        (imports, {}),
        (known_import, {"import_id": "text"}),
        (prepare_import, {**_RECORD, "keys": "list of bytes"}),
        (add_import, {**_RECORD, "files": "list of text", "none_since": "time"}),
        (abort_import, {"import_id": "text"}),
        (revert_import, {"import_id": "text"}),
        (gc, {"before": "time", "keep": "seconds", "compact": "flag"}),
        (checkpoint, {"path": "text"}),
        (verify, {}),
        (clear_range, {"start": "bytes", "end": "bytes", "compact": "flag"}),
        (
            submit_task,
            {"queue": "text", "value": "bytes", "available_at": "time", "id": "text"},
        ),
    )
]


# -- inside ----------------------------------------------------------------------------------


def _name(call: Invocation) -> str:
    name = call.text("name")
    if not name:
        raise UsageError("argument 'name' is missing", "pass the name of a hold")
    return name


def _claim(record: Any) -> Mapping[str, Any]:
    return {"name": record.name, **to_fields(record)}


def _import_id(call: Invocation) -> int:
    """The id of an import, 16 hex digits: JSON readers round numbers above 2**53."""
    text = call.text("import_id") or ""
    try:
        return int(text, 16)
    except ValueError:
        raise UsageError(f"import_id={text!r}", "pass 16 hex digits") from None


def _record(call: Invocation) -> ImportRecord:
    text = call.text("record") or ""
    try:
        return read_import(_import_id(call), read_object(text.encode(), where="the request"))
    except CorruptionError as error:
        raise UsageError(f"record: {error.problem}", "pass the record of an import") from error


def _brought(store: Path | None, name: Any) -> Path:
    """The path of a file of an import. Raises `UsageError` unless it lies in the store's
    `ingest/`."""
    if store is None or type(name) is not str or not _INGESTED.fullmatch(name):
        raise UsageError(f"file {name!r} of an import", "pass <directory>/<file> in ingest/")
    return store / INGEST_DIRECTORY / name
