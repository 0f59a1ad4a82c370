"""`kvstore backup restore`: a collection becomes a store, or rows of a live one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from backup.cli.options import CollectionArgument, InstantOption, KeyFileOption, open_collection
from backup.restoring import Restored
from kvstore.cli.options import (
    Encoding,
    EncodingOption,
    EndOption,
    JsonOption,
    PrefixOption,
    StartOption,
    iso,
    to_span,
)
from kvstore.cli.output import counting, print_figures, working
from kvstore.cli.stores import open_to_write
from kvstore.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(restore)


PathArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="The place of the new store; must not exist.", show_default=False
    ),
]
StateOnlyOption = Annotated[
    bool,
    typer.Option("--state-only", help="Without history: only the rows that were alive then."),
]
IntoOption = Annotated[
    bool, typer.Option("--into", help="PATH is a live store: import into it, at one time.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue a restore that was killed or has failed.")
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Processes that work.", show_default=False)
]


def restore(
    collection: CollectionArgument,
    path: PathArgument,
    as_of: InstantOption = None,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    state_only: StateOnlyOption = False,
    into: IntoOption = False,
    resume: ResumeOption = False,
    workers: WorkersOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore a store, whole or in part, as of any instant that the collection covers.

    Prints the newest instant of the store, the time from which it is readable,
    and its rows. With --resume nothing that was fetched is fetched again.

    \b
    Examples:
      kvstore backup restore /backups/flights restored.db
      kvstore backup restore s3://bucket/flights restored.db --resume --workers 4
      kvstore backup restore /backups/flights june.db --as-of 2013-06-01T00:00Z
      kvstore backup restore /backups/flights flights.db --into --prefix AA
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    source = open_collection(collection, key_file)
    if into and (resume or workers is not None):
        raise UsageError("--into takes no --resume and no --workers", "leave them out")
    with working(f"restoring {path}", quiet=as_json) as progress:
        rows = counting(progress, "rows")
        how: dict[str, Any] = {"start": span.start, "end": span.end, "progress": rows}
        figures: dict[str, Any]
        if into:
            with open_to_write(path) as opened:
                figures = {"timestamp": iso(source.restore_into(opened, as_of, **how))}
        else:
            how |= {"history": not state_only, "resume": resume, "workers": workers}
            figures = _figures(source.restore(path, as_of, **how))
    print_figures(figures, as_json=as_json)


def _figures(done: Restored) -> dict[str, Any]:
    return {"timestamp": iso(done), "since": iso(done.since), "rows": done.rows}
