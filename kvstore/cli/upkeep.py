"""Commands for upkeep: verify, gc, checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.main import NOT_FOUND
from kvstore.cli.options import JsonOption, StoreArgument, reach
from kvstore.cli.output import (
    counting,
    note,
    print_figures,
    print_json,
    print_line,
    working,
)
from kvstore.cli.times import iso
from kvstore.errors import UsageError
from kvstore.opening import open_read_only
from kvstore.timeline.holds import HoldRecord


def verify(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Read the whole store and list all damage. Exits with 1 if there is any.

    Exits with 5 if damage keeps the store from opening.

    \b
    Examples:
      kvstore verify flights.db
      kvstore verify flights.db --json | jq '.problems[]'
    """
    with working(f"reading {store}", quiet=as_json) as progress, open_read_only(store) as opened:
        figures = opened.stats()
        entries = figures["data_entries"] + figures["changes_entries"]  # the engine's estimate
        checked = counting(progress, "versions and changes", entries, is_about=True)
        report = opened.verify(progress=checked)
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
    with working(f"collecting {store}", quiet=as_json) as progress, reach(store) as opened:
        removed = counting(progress, "versions removed")
        report = opened.gc(before, keep, compact=compact, progress=removed)
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
            metavar="PATH",
            help="The place of the copy, outside the store; must not exist.",
            show_default=False,
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
    with working(f"copying {store}", quiet=as_json), reach(store) as opened:
        newest = opened.checkpoint(path)
    print_figures({"timestamp": iso(newest)}, as_json=as_json)


def _dropping(store: Path, claim: HoldRecord) -> str:
    return "" if claim.is_pin else f"; `kvstore holds drop {store} {claim.name!r}` drops it"
