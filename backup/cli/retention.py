"""`kvstore backup`: expire, label. They say which instants stay."""

from __future__ import annotations

from typing import Annotated

import typer

from backup.cli.options import CollectionArgument, KeyFileOption, complete_label, open_existing
from kvstore.cli.options import JsonOption, iso, to_duration
from kvstore.cli.output import counting, print_figures, working
from kvstore.errors import UsageError

KeepOption = Annotated[
    str | None,
    typer.Option(metavar="AGE", help="Keep this long: 12h, 30d, 4w.", show_default=False),
]
BeforeOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Give up instants before this time, or before the instant of this label.",
        show_default=False,
        autocompletion=complete_label,
    ),
]
KeepWithinOption = Annotated[
    str | None,
    typer.Option(
        metavar="AGE", help="Keep every instant this long, and thin older ones.", show_default=False
    ),
]


def _count(what: str) -> object:
    return typer.Option(min=0, metavar="N", help=f"With --keep-within: keep the last N {what}.")


HourlyOption = Annotated[int, _count("whole hours (UTC)")]
DailyOption = Annotated[int, _count("midnights (UTC)")]
WeeklyOption = Annotated[int, _count("midnights before a Monday (UTC)")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (expire, label):
        app.command()(command)


def expire(
    collection: CollectionArgument,
    keep: KeepOption = None,
    before: BeforeOption = None,
    keep_within: KeepWithinOption = None,
    hourly: HourlyOption = 0,
    daily: DailyOption = 0,
    weekly: WeeklyOption = 0,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give up old instants and free their space; prints the instant from which all stay.

    Labelled instants stay. With --keep-within the states at some older
    instants stay too: `show` lists them.

    \b
    Examples:
      kvstore backup expire /backups/flights --keep 90d
      kvstore backup expire /backups/flights --keep-within 7d --hourly 24 --daily 30
    """
    age, within = (None if text is None else to_duration(text) for text in (keep, keep_within))
    with working(f"expiring {collection}", quiet=as_json) as progress:
        since = open_existing(collection, key_file).expire(
            before,
            keep=age,
            keep_within=within,
            hourly=hourly,
            daily=daily,
            weekly=weekly,
            progress=counting(progress, "rows"),
        )
    print_figures({"since": iso(since)}, as_json=as_json)


def label(
    collection: CollectionArgument,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The label.", show_default=False, autocompletion=complete_label
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The instant; else the newest.", show_default=False),
    ] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Take the label away.")] = False,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Name an instant: --as-of takes the name, and no expiry gives the instant up.

    Prints the instant.

    \b
    Examples:
      kvstore backup label /backups/flights before-migration
      kvstore backup label /backups/flights before-migration --drop
    """
    if drop and at is not None:
        raise UsageError("--drop takes no --at", "leave one of them out")
    opened = open_existing(collection, key_file)
    instant = opened.unlabel(name) if drop else opened.label(name, at)
    print_figures({"label": name, "timestamp": iso(instant)}, as_json=as_json)
