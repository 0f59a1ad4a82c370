"""Commands for upkeep: verify, gc."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.exits import NOT_FOUND
from kvstore.cli.options import (
    JsonOption,
    StoreArgument,
    iso,
    open_to_read,
    open_to_write,
    to_duration,
    to_time,
)
from kvstore.cli.output import counting, print_figures, print_json, print_line, working


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (verify, gc):
        app.command()(command)


def verify(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Read the whole store and list all that is damaged. Exits with 1 if anything is.

    A store so damaged that it cannot be opened exits with 5.

    \b
    Examples:
      kvstore verify flights.db
      kvstore verify flights.db --json | jq '.problems[]'
    """
    with working(f"reading {store}", quiet=as_json) as progress, open_to_read(store) as opened:
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
            print_line("there is more: what is listed is not all")
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
        bool, typer.Option("--compact", help="Give the space back now, by rewriting files.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Give up old history and remove what it held. Holds (backups, feeds) keep what they need.

    \b
    Examples:
      kvstore gc flights.db --keep 30d
      kvstore gc flights.db --before 2013-01-01T00:00Z --compact
    """
    age = None if keep is None else to_duration(keep)
    with working(f"collecting {store}", quiet=as_json) as progress, open_to_write(store) as opened:
        removed = counting(progress, "versions removed")
        report = opened.gc(to_time(before), age, compact=compact, progress=removed)
    print_figures(
        {
            "since": iso(report.since),
            "previous": iso(report.previous),
            "versions": report.versions,
            "range_tombstones": report.range_tombstones,
            "change_entries": report.change_entries,
            "imports": report.imports,
            "lost_holds": [hold.name for hold in report.lost_holds],
            "held_back": report.held_back,
            "seconds": round(report.seconds, 3),
        },
        as_json=as_json,
    )
