"""`kvstore import` adds rows at one time. `kvstore seed` makes a store of rows with own times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final

import pyarrow as pa
import typer

from bulk.files import file_events, file_rows, format_of
from bulk.ingest import OnConflict, ingest
from bulk.loading import import_rows
from bulk.manifest import Manifest
from bulk.seed import seed
from bulk.sort import Duplicates
from bulk.stagings import expire_stagings, staged_manifest
from kvstore.arguments import is_url
from kvstore.cli.options import (
    Encoding,
    JsonOption,
    StoreArgument,
    iso,
    one_of,
    to_bytes,
    to_duration,
    to_time,
)
from kvstore.cli.output import print_figures, working
from kvstore.cli.stores import open_or_create
from kvstore.errors import UsageError
from kvstore.timestamp import Timestamp

ON_CONFLICT: Final[tuple[OnConflict, ...]] = ("overwrite", "error")
DUPLICATES: Final[tuple[Duplicates, ...]] = ("error", "last")

EventsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="SOURCE", help="Files: .parquet, .csv, .arrow, .feather.", show_default=False
    ),
]
SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="One staging directory or URL, or files: .parquet, .csv, .arrow, .feather.",
        show_default=False,
    ),
]
KeyOption = Annotated[str, typer.Option(metavar="COLUMN", help="The column that has the keys.")]
ValueOption = Annotated[str, typer.Option(metavar="COLUMN", help="The column that has the values.")]
ExpiresOption = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column that has the times at which keys expire. Default: no key expires.",
        show_default=False,
    ),
]
AtOption = Annotated[str, typer.Option(metavar="COLUMN", help="The column that has the times.")]
OpOption = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column that has put or delete. Default: each row is a put.",
        show_default=False,
    ),
]
SinceOption = Annotated[
    str, typer.Option(metavar="TIME", help="The time from which the rows are complete.")
]
OnConflictOption = Annotated[
    str, typer.Option(help="overwrite, or error: refuse a row for a live key.")
]
DuplicatesOption = Annotated[
    str, typer.Option(help="A key that comes twice: error, or last: the last row counts.")
]
FileEncodingOption = Annotated[
    Encoding, typer.Option("--encoding", "-e", help="The encoding of keys and values in the files.")
]
MoveOption = Annotated[
    bool, typer.Option("--move", help="Remove the staged files after adding them.")
]
CreateOption = Annotated[bool, typer.Option("--create", help="Create a store that does not exist.")]

app = typer.Typer(add_completion=False)
seed_app = typer.Typer(add_completion=False)
stagings_app = typer.Typer(add_completion=False)


@app.command(name="import")
def import_(
    store: StoreArgument,
    sources: SourcesArgument,
    key: KeyOption = "key",
    value: ValueOption = "value",
    expires: ExpiresOption = None,
    on_conflict: OnConflictOption = "overwrite",
    duplicates: DuplicatesOption = "error",
    encoding: FileEncodingOption = Encoding.TEXT,
    move: MoveOption = False,
    create: CreateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Load many rows at once. All rows become visible at one time, which is printed.

    Rows are sorted first, in about 1 GB of memory; larger inputs are sorted on the
    store's disk. Importing a staging directory twice adds it once. Files of a URL are
    fetched first; a command that was stopped fetches the rest when it runs again.

    \b
    Examples:
      kvstore import flights.db staged/
      kvstore import flights.db s3://bucket/staging/run-42
      kvstore import flights.db 2013-*.parquet --key flight --value row
      kvstore import new.db rows.csv --create --on-conflict error
      kvstore import new.db rows.csv --create -e hex
      kvstore import codes.db codes.csv --expires until
    """
    conflict = one_of("--on-conflict", on_conflict, ON_CONFLICT)
    twice = one_of("--duplicates", duplicates, DUPLICATES)
    staged = len(sources) == 1 and (is_url(sources[0]) or Path(sources[0]).is_dir())
    if staged and expires is not None:
        raise UsageError("--expires with a staging directory", "its rows have their times")
    if staged and encoding is not Encoding.TEXT:
        raise UsageError(f"--encoding {encoding.value} of a staging", "its rows are bytes")
    files = [] if staged else [Path(source) for source in sources]
    for file in files:
        format_of(file)
    with open_or_create(store, "rocksdb", create=create) as opened:
        if staged:
            with working(f"importing {sources[0]}") as progress:
                manifest = staged_manifest(sources[0])
                stamp = ingest(opened, sources[0], conflict, move, progress=progress)
        else:
            with working(f"importing into {store}") as progress:
                rows = _decoded(file_rows(files, key=key, value=value, expires=expires), encoding)
                counted = told_rows(rows, progress)
                manifest, stamp = import_rows(opened, counted, conflict, twice)
    _tell(manifest, stamp, as_json)


@stagings_app.command(name="expire-stagings")
def expire_stagings_(
    root: Annotated[
        str,
        typer.Argument(metavar="URL", help="The URL above the stagings.", show_default=False),
    ],
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="The age from which on a staging goes: 7d, 12h.")
    ] = "7d",
    as_json: JsonOption = False,
) -> None:
    """Remove the imports below a URL that were begun long ago, sealed or not.

    A store that has added an import does not need its staging any more.

    \b
    Examples:
      kvstore expire-stagings s3://bucket/staging --older-than 7d
    """
    age = to_duration(older_than)
    with working(f"looking through {root}"):
        removed = expire_stagings(root, older_than=age)
    print_figures(
        {"stagings": len(removed), "bytes": sum(each.size_bytes for each in removed)},
        as_json=as_json,
    )


@seed_app.command(name="seed")
def seed_(
    store: StoreArgument,
    sources: EventsArgument,
    key: KeyOption = "key",
    value: ValueOption = "value",
    at: AtOption = "ts",
    op: OpOption = None,
    since: SinceOption = "0",
    duplicates: DuplicatesOption = "error",
    encoding: FileEncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Make a new store of old events. Each row is a version at its own time.

    Times have a zone, or are nanoseconds. STORE must not exist: history is never
    rewritten. The newest time is printed. A backup makes a collection of the store.

    \b
    Examples:
      kvstore seed fleet.db events.parquet --key id --value state --at seen
      kvstore seed fleet.db 2026-*.csv --op op --since 2026-01-01T00:00:00Z
    """
    twice = one_of("--duplicates", duplicates, DUPLICATES)
    for source in sources:
        format_of(source)
    rows = 0

    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in batches:
            yield batch
            rows += batch.num_rows

    with working(f"seeding {store}") as progress:
        events = file_events(sources, key=key, value=value, at=at, op=op)
        newest = seed(
            store,
            counted(told_rows(_decoded(events, encoding), progress)),
            key=key,
            value=value,
            at=at,
            op=op,
            since=to_time(since) or 0,
            duplicates=twice,
        )
    print_figures({"newest": iso(newest), "rows": rows}, as_json=as_json)


def _decoded(rows: Iterator[pa.RecordBatch], encoding: Encoding) -> Iterator[pa.RecordBatch]:
    """Decode hex or base64 in the first two columns, keys and values. Text stays as it is, and so
    do nulls, which are refused later."""
    if encoding is Encoding.TEXT:
        yield from rows
        return
    for batch in rows:
        columns = [
            pa.array(
                (x and to_bytes(x.decode("latin-1"), encoding) for x in column.to_pylist()),
                pa.binary(),
            )
            for column in batch.columns[:2]
        ]
        yield pa.RecordBatch.from_arrays([*columns, *batch.columns[2:]], schema=batch.schema)


def told_rows(
    rows: Iterator[pa.RecordBatch], progress: Callable[[str], None]
) -> Iterator[pa.RecordBatch]:
    """The rows. The count of rows so far is shown to the user."""
    total = 0
    for batch in rows:
        yield batch
        total += batch.num_rows
        progress(f"{total:,} rows read")


def _tell(manifest: Manifest, stamp: Timestamp, as_json: bool) -> None:
    print_figures(
        {
            "timestamp": iso(stamp),
            "import_id": f"{manifest.import_id:016x}",
            "rows": manifest.rows,
            "bytes": manifest.size_bytes,
            "parts": len(manifest.parts),
        },
        as_json=as_json,
    )
