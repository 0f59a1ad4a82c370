"""Commands for upkeep: verify, gc, checkpoint, holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.claims import HoldRecord
from kvstore.cli.exits import NOT_FOUND
from kvstore.cli.options import (
    JsonOption,
    StoreArgument,
    iso,
    open_to_write,
    to_duration,
    to_time,
)
from kvstore.cli.output import (
    counting,
    note,
    print_figures,
    print_json,
    print_line,
    print_table,
    working,
)
from kvstore.errors import UsageError
from kvstore.opening import open_read_only
from kvstore.timestamp import NS_PER_SECOND

holds_app = typer.Typer(
    help="List the holds that keep history in a store, or drop an abandoned one.",
    no_args_is_help=True,
    add_completion=False,
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(holds_app, name="holds")
    for command in (verify, gc, checkpoint):
        app.command()(command)


def verify(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Read the whole store and list all damage. Exits with 1 if there is any.

    Exits with 5 if damage keeps the store from opening.

    \b
    Examples:
      kvstore verify flights.db
      kvstore verify flights.db --json | jq '.problems[]'
    """
    with working(f"reading {store}", quiet=as_json) as progress, open_read_only(store) as opened:
        report = opened.verify(progress=counting(progress, "versions and changes"))
    looked_at = {
        "keys": report.keys,
        "versions": report.versions,
        "range_tombstones": report.range_tombstones,
        "change_entries": report.change_entries,
        "seconds": round(report.seconds, 3),
    }
    if as_json:
        problems = [{"where": p.where, "problem": p.problem} for p in report.problems]
        print_json(
            {"ok": report.ok, **looked_at, "complete": report.complete, "problems": problems}
        )
    else:
        for problem in report.problems:
            print_line(str(problem))
        if not report.complete:
            print_line("the list is not complete: there is more damage")
        print_figures({"ok": report.ok, **looked_at}, as_json=False)
    if not report.ok:
        raise typer.Exit(NOT_FOUND)


def gc(
    store: StoreArgument,
    keep: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Keep history this long: 90s, 12h, 30d, 4w."),
    ] = None,
    before: Annotated[
        str | None, typer.Option(metavar="TIME", help="Give up history before this time.")
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Rewrite files to give the space back now.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Give up old history and free its space. Holds of backups and feeds keep history.

    Names each hold that keeps more history than asked for, and how to release it.

    \b
    Examples:
      kvstore gc flights.db --keep 30d
      kvstore gc flights.db --before 2013-01-01T00:00Z --compact
    """
    if (keep is None) == (before is None):
        raise UsageError("gc takes either --keep or --before", "pass one of them")
    age = None if keep is None else to_duration(keep)
    with working(f"collecting {store}", quiet=as_json) as progress, open_to_write(store) as opened:
        removed = counting(progress, "versions removed")
        report = opened.gc(to_time(before), age, compact=compact, progress=removed)
        now = opened.now()
    print_figures(
        {
            "since": iso(report.since),
            "previous": iso(report.previous),
            "versions": report.versions,
            "range_tombstones": report.range_tombstones,
            "change_entries": report.change_entries,
            "imports": report.imports,
            "imports_settled": report.settled,
            "index_entries_tidied": report.tidied,
            "lost_holds": [hold.name for hold in report.lost_holds],
            "held_back": report.held_back,
            "held_by": [claim.describe(now) for claim in report.held_by],
            "seconds": round(report.seconds, 3),
        },
        as_json=as_json,
    )
    for claim in report.held_by:
        note(f"history is kept by {claim.describe(now)}; {claim.remedy}{_dropping(store, claim)}")


def checkpoint(
    store: StoreArgument,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="The place of the copy; must not exist.", show_default=False
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Copy a store as of now, and print the newest time of the copy.

    The copy shares files with the store by hard links. On the same file system that takes
    milliseconds at any size. A service may have the store open.

    \b
    Examples:
      kvstore checkpoint flights.db copy.db
    """
    with working(f"copying {store}", quiet=as_json), open_to_write(store) as opened:
        newest = opened.checkpoint(path)
    print_figures({"timestamp": iso(newest)}, as_json=as_json)


def _dropping(store: Path, claim: HoldRecord) -> str:
    return "" if claim.is_pin else f" (kvstore holds drop {store} {claim.name!r})"


@holds_app.command(name="list")
def list_holds(store: StoreArgument, as_json: JsonOption = False) -> None:
    """List the holds of a store: the purpose and place of each, and the time of its last move.

    \b
    Examples:
      kvstore holds list flights.db
      kvstore holds list flights.db --json | jq 'select(.kind == "backup")'
    """
    with open_read_only(store) as opened:
        found = [_hold_fields(record) for record in opened.holds.all()]
    if as_json:
        for fields in found:
            print_json(fields)
        return
    columns = ["name", "kind", "address", "timestamp", "owner", "moved_at", "max_age_seconds"]
    print_table(columns, [[_shown(fields[name]) for name in columns] for fields in found])


@holds_app.command(name="drop")
def drop_hold(
    store: StoreArgument,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The hold's name.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Drop a hold whose owner is gone for good. The next gc removes the history that it kept.

    The command prints the consequences for an owner that comes back after all.

    \b
    Examples:
      kvstore holds drop flights.db backup-1f6a0e6fd3b4
    """
    with open_to_write(store) as opened:
        dropped = opened.drop_hold(name)
    fields = _hold_fields(dropped)
    if as_json:
        print_json(fields)
    else:
        print_figures({key: _shown(value) for key, value in fields.items()}, as_json=False)
    note(f"dropped; {dropped.cost_of_dropping}")


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


def _shown(fact: object) -> str:
    return "-" if fact in (None, "") else str(fact)
