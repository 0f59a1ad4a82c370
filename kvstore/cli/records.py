"""The commands that list and end records beside the data: holds, imports, tasks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any, Final

import typer

from kvstore.base.span import Span
from kvstore.base.timestamp import NS_PER_SECOND, Timestamp
from kvstore.cli.options import (
    LISTED_MAX,
    JsonOption,
    ListLimitOption,
    StoreArgument,
    names_of,
    reach,
)
from kvstore.cli.output import (
    note,
    print_figures,
    print_json,
    print_line,
    print_list,
    print_table,
)
from kvstore.cli.times import iso
from kvstore.errors import KVStoreError, NotAStoreError, NotFoundError, UsageError
from kvstore.limits import HOLD_LOOK_S
from kvstore.opening import engine_at, open_read_only
from kvstore.store import TASKS_DIRECTORY, Store
from kvstore.tasks import DEAD_SUFFIX, Task, read_tasks
from kvstore.timeline.holds import BACKUP, HoldRecord
from kvstore.timeline.import_records import ImportRecord
from kvstore.timeline.reserved import FIRST_ROW

# --------------------------------------------------------------------------------------------------
# The command group `kvstore holds`: list, drop.

holds_app = typer.Typer(
    help="List the holds that keep history in a store, or drop an abandoned one.",
    no_args_is_help=True,
    add_completion=False,
)


@holds_app.command(name="list")
def list_holds(
    store: StoreArgument, limit: ListLimitOption = LISTED_MAX, as_json: JsonOption = False
) -> None:
    """List the holds of a store: the purpose and place of each, and the time of its last move.

    Names each hold whose collection of backups is gone, with the command that drops it.

    \b
    Examples:
      kvstore holds list flights.db
      kvstore holds list flights.db --json | jq 'select(.kind == "backup")'
    """
    with open_read_only(store) as opened:
        found = [_hold_fields(record) for record in opened.holds.all()]
    for fields in found:
        fields["gone"] = fields["kind"] == BACKUP and _is_gone(str(fields["address"]))
    columns = ["name", "kind", "address", "timestamp", "owner", "moved_at", "max_age_seconds"]
    print_list(found, columns, limit, as_json=as_json)
    for fields in found:
        if fields["gone"]:
            note(
                f"hold {fields['name']} keeps history for backups that are gone: nothing is at "
                f"{fields['address']}; look whether its disk is mounted, or drop the hold: "
                f"kvstore holds drop {store} {fields['name']}"
            )


@holds_app.command(name="drop")
def drop_hold(
    store: StoreArgument,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The hold's name.",
            show_default=False,
            autocompletion=names_of(lambda store: [each.name for each in store.holds.all()]),
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Drop a hold whose owner is gone for good. The next gc removes the history that it kept.

    The command prints the consequences for an owner that comes back after all.

    \b
    Examples:
      kvstore holds drop flights.db backup-1f6a0e6fd3b4
    """
    with reach(store) as opened:
        dropped = opened.drop_hold(name)
    print_figures(_hold_fields(dropped), as_json=as_json)
    note(f"dropped; {dropped.cost_of_dropping}")


def _is_gone(address: str) -> bool | None:
    from kvstore.storage.address import is_gone  # holds of backups alone need storage

    return is_gone(address, seconds=HOLD_LOOK_S)


def _hold_fields(record: HoldRecord) -> dict[str, object]:
    age_ns = record.max_age_ns
    return {
        "name": record.name,
        "kind": record.kind,
        "address": record.address,
        "timestamp": iso(record.timestamp),
        "owner": record.owner,
        "created_at": None if record.created_at is None else iso(record.created_at),
        "moved_at": None if record.moved_at is None else iso(record.moved_at),
        "max_age_seconds": None if age_ns is None else age_ns / NS_PER_SECOND,
        "lost": record.lost,
    }


# --------------------------------------------------------------------------------------------------
# The command group `kvstore imports`: list, show, revert.

_HEX_ID: Final = re.compile(r"[0-9A-Fa-f]{16}|0[xX][0-9A-Fa-f]{1,16}")
_DECIMAL_ID: Final = re.compile(r"[0-9]{1,20}")

imports_app = typer.Typer(
    help="List the imports of a store, show one, or revert one.",
    no_args_is_help=True,
    add_completion=False,
)


def import_ids(store: Store) -> Iterator[str]:
    """The ids of the imports that can be reverted."""
    return (f"{each.import_id:016x}" for each in store.imports.all())


@imports_app.command(name="list")
def list_imports(
    store: StoreArgument, limit: ListLimitOption = LISTED_MAX, as_json: JsonOption = False
) -> None:
    """List the imports that a store knows, newest first, with their times, rows and bytes.

    A small import becomes plain versions when `gc` settles it, and is listed no longer.

    \b
    Examples:
      kvstore imports list flights.db
      kvstore imports list flights.db --json | jq 'select(.state == "added")'
    """
    with open_read_only(store) as opened:
        known = sorted(opened.imports.all(), key=_time, reverse=True)
        listed = known[: limit + 1]
        spans = _spans_of_tables(opened, listed)
        found = [_fields(opened, record, spans) for record in listed]
    names = ["id", "state", "added", "reverted", "table", "rows", "rows_and_entries", "bytes"]
    found += [{}] * (len(known) - len(found))  # they are counted, and not shown
    print_list(found, ["import_id", *names], limit, as_json=as_json)


ImportArgument = Annotated[
    str,
    typer.Argument(
        metavar="IMPORT",
        help="The 16 hex digits that `kvstore import` printed, or a job's decimal id.",
        show_default=False,
        autocompletion=names_of(import_ids),
    ),
]


@imports_app.command(name="show")
def show_import(
    store: StoreArgument,
    import_id: ImportArgument,
    as_json: JsonOption = False,
) -> None:
    """Show an import: its times, where its rows came from, and the checks that it has passed.

    \b
    Examples:
      kvstore imports show flights.db 5e0c1d2f3a4b5c6d
    """
    number = to_import_id(import_id)
    with open_read_only(store) as opened:
        record = opened.imports.get(number)
        fields = {}
        if record is not None:
            fields = _fields(opened, record, _spans_of_tables(opened, [record]))
    if record is None:
        raise NotFoundError(
            f"there is no import {number:016x} (decimal: {number})", "see `kvstore imports list`"
        )
    report: dict[str, Any] = json.loads(record.report) if record.report else {}
    facts = {**fields, "origin": record.origin or None, "report": report or None}
    if as_json:
        print_json(facts)
        return
    print_figures({name: each for name, each in facts.items() if name != "report"}, as_json=False)
    checks = [
        [
            *(each["check"], str(each["figure"]), each["bound"], each["baseline"] or ""),
            "yes" if each["passed"] else "no",
        ]
        for each in report.get("checks", [])
    ]
    if checks:
        print_table(["check", "figure", "bound", "baseline", "passed"], checks)
    if "forced" in report:
        print_line(f"forced by {report['forced']['by']}: {report['forced']['reason']}")


@imports_app.command(name="revert")
def revert_import(
    store: StoreArgument,
    import_id: ImportArgument,
    as_json: JsonOption = False,
) -> None:
    """Undo an import from now on. Its history stays. A repeated command prints the first timestamp.

    \b
    Examples:
      kvstore imports revert flights.db 5e0c1d2f3a4b5c6d
    """
    number = to_import_id(import_id)
    with reach(store) as opened:
        print_figures({"timestamp": iso(opened.revert_import(number))}, as_json=as_json)


def to_import_id(text: str) -> int:
    """Parse the id of an import: all 16 hex digits, hex digits behind `0x`, or a decimal number of
    another length. Raises `UsageError`: a guess could revert another import."""
    if _HEX_ID.fullmatch(text):
        return int(text, 16)
    if _DECIMAL_ID.fullmatch(text):
        return int(text)
    raise UsageError(
        f"{text[:40]!r} is no id of an import",
        "pass the 16 hex digits of `kvstore imports list`, or the decimal id of the job",
    )


def _time(record: ImportRecord) -> Timestamp:
    return record.added or record.prepared or Timestamp(0)


def _spans_of_tables(store: Store, records: Iterable[ImportRecord]) -> dict[str, Span]:
    """The rows of each table, without the entries of its indexes; none where `records` have plain
    keys alone, so that a store without tables reads no definition."""
    found: dict[str, Span] = {}
    if not any(span.start >= FIRST_ROW for record in records for span in record.spans):
        return found
    for name in store.tables():
        with suppress(KVStoreError):  # a definition that cannot be read hides no import
            found[name] = Span.of_prefix(store.table(name).codec().key.prefix)
    return found


def _fields(store: Store, record: ImportRecord, tables: dict[str, Span]) -> dict[str, object]:
    """The facts of an import. The rows of a table are counted where the store has the keys of the
    import at hand, as of small ones; `rows_and_entries` is always known."""
    table, rows = _table_of(record, tables), record.rows
    counted: int | None = rows
    if table is not None:
        keys = store.imports.keys_of(record)
        counted = None if keys is None else sum(key in tables[table] for key in keys)
    return {
        "import_id": f"{record.import_id:016x}",
        "id": str(record.import_id),  # as text: JSON readers round numbers above 2**53
        "state": record.state,
        "added": None if record.added is None else iso(record.added),
        "reverted": None if record.reverted is None else iso(record.reverted),
        "table": table,
        "rows": counted,
        "rows_and_entries": rows,
        "bytes": record.size_bytes,
    }


def _table_of(record: ImportRecord, tables: dict[str, Span]) -> str | None:
    """The table of an import; None if it has plain keys, or the store has its table no more."""
    for name, rows in tables.items():
        if any(span.start in rows for span in record.spans):  # a span starts with a key
            return name
    return None


# --------------------------------------------------------------------------------------------------
# The command that lists the tasks of a store: waiting, claimed and given up.


def tasks(
    store: StoreArgument, limit: ListLimitOption = LISTED_MAX, as_json: JsonOption = False
) -> None:
    """List the tasks of a store with their progress. The store may be in use.

    \b
    Examples:
      kvstore tasks flights.db
      kvstore tasks flights.db --json | jq 'select(.state == "dead")'
    """
    if engine_at(store) is None:
        raise NotAStoreError(str(store), "no store is there", "check the path")
    now = time.time_ns()
    found = [_task_fields(task, now) for task in read_tasks(store / TASKS_DIRECTORY)]
    columns = ["queue", "task", "state", "available", "attempt", "progress", "error"]
    print_list(found, columns, limit, as_json=as_json)


def _task_fields(task: Task, now: int) -> dict[str, object]:
    return {
        "queue": task.queue,
        "task": task.id,
        "state": _state(task, now),
        "available": iso(task.available_at),
        "attempt": task.attempt,
        "claimant": task.claimant,
        "progress": task.progress.decode("utf-8", "backslashreplace"),
        "error": task.error,
        "value": task.value.decode("utf-8", "backslashreplace"),
    }


def _state(task: Task, now: int) -> str:
    """`dead`, `waiting`, `held` by a claimant, or `later`: for another attempt, or the first."""
    if task.queue.endswith(DEAD_SUFFIX):
        return "dead"
    if task.available_at <= now:
        return "waiting"
    return "held" if task.claimant else "later"
