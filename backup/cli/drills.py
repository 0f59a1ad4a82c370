"""`kvstore backup drill`: a restore for real, which proves that the backups can be had back."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from backup.cli.figures import disproved
from backup.cli.options import CollectionArgument, KeyFileOption, complete_label, open_existing
from backup.drilling import DRILL_DEPTHS, DrillReport
from kvstore.cli.options import JsonOption, iso, one_of
from kvstore.cli.output import (
    counting,
    print_figures,
    size_text,
    working,
)
from kvstore.errors import CorruptionError
from kvstore.opening import open_read_only

AtOption = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="The instant to restore, its label, or `random`.",
        autocompletion=complete_label,
    ),
]
DepthOption = Annotated[
    str,
    typer.Option(
        help="open: the restored store opens and verifies. contents: it also equals the store."
    ),
]
SourceOption = Annotated[
    Path | None,
    typer.Option(help="With --depth contents: the store to compare with.", show_default=False),
]
ScratchOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIRECTORY",
        help="Restore the store here, and remove it. Default: the directory of temporary files.",
        show_default=False,
    ),
]


def drill(
    collection: CollectionArgument,
    at: AtOption = "random",
    depth: DepthOption = "open",
    store: SourceOption = None,
    scratch: ScratchOption = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore an instant into scratch space, open and verify it, and record the outcome.

    Exits with 0 only if the instant was proved, and with 1 if it cannot be had back. A
    random instant each time covers the history. `show` tells the age of the newest proof.

    \b
    Examples:
      kvstore backup drill s3://bucket/flights
      kvstore backup drill /backups/flights --depth contents --store flights.db
      kvstore backup drill /backups/flights --at 2013-06-01T00:00Z --scratch /mnt/scratch
    """
    wanted = one_of("--depth", depth, DRILL_DEPTHS)
    with ExitStack() as stack:
        progress = stack.enter_context(working(f"restoring {collection}", quiet=as_json))
        opened = None if store is None else stack.enter_context(open_read_only(store))
        rows = counting(progress, "rows")
        try:
            source = open_existing(collection, key_file)
            report = source.drill(at, wanted, opened, scratch=scratch, progress=rows)
        except CorruptionError as error:
            raise disproved(error, as_json=as_json) from error
    print_figures(_figures(report, as_json=as_json), as_json=as_json)


def _figures(report: DrillReport, *, as_json: bool) -> dict[str, Any]:
    fields = {**report._asdict(), "at": iso(report.at), "drilled_at": iso(report.drilled_at)}
    if not as_json:
        fields["bytes"] = size_text(report.bytes)
    return {"ok": True, **fields}
