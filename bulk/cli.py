"""`kvstore import` adds rows, `export` writes them, `seed` makes a store of rows with own times."""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import pyarrow as pa
import typer

from kvstore.base.arguments import word
from kvstore.base.clock import Clock
from kvstore.base.paths import is_url
from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp, to_timestamp
from kvstore.bulk.bucket import has_manifest
from kvstore.bulk.delimited import QUOTINGS
from kvstore.bulk.exports import export_rows, live_rows, packed, write_rows
from kvstore.bulk.gate import Force, Gate
from kvstore.bulk.ingest import OnConflict, ingest
from kvstore.bulk.loading import RowsApplied, apply_rows, import_rows, sync_rows
from kvstore.bulk.manifest import Manifest
from kvstore.bulk.progress import Reading
from kvstore.bulk.row_files import (
    NESTED,
    FileReads,
    decoded,
    decoded_files,
    file_events,
    first_row,
    format_of,
    has_format,
)
from kvstore.bulk.seed import SeedColumns, SeedRows, seed
from kvstore.bulk.sort import DUPLICATES
from kvstore.bulk.staging import expire_stagings, staged_manifest, staging_place
from kvstore.cli.options import (
    AddressArgument,
    Encoding,
    Encodings,
    EndOption,
    JsonOption,
    KeyEncodingOption,
    PrefixOption,
    StartOption,
    StoreArgument,
    ValueEncodingOption,
    open_or_create_for_rows,
    open_to_read,
    to_span,
    to_text,
)
from kvstore.cli.output import counting, print_figures, working
from kvstore.cli.times import iso
from kvstore.errors import UsageError, storage_errors
from kvstore.storage.address import fetch_object, parse_address

ON_CONFLICT: Final[tuple[OnConflict, ...]] = ("overwrite", "error")

FilesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE...",
        help="Files, also by URL: .parquet, .csv, .tsv, .jsonl, .arrow, .feather; text also "
        "with .gz or .zst. - is stdin.",
        show_default=False,
    ),
]
SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="One staging directory or its URL, or files or their URLs: .parquet, .csv, .tsv, "
        ".jsonl, .arrow, .feather; text also with .gz or .zst. - is stdin.",
        show_default=False,
    ),
]
KeyOption = Annotated[str, typer.Option(metavar="COLUMN", help="The column that has the keys.")]
ValueOption = Annotated[str, typer.Option(metavar="COLUMN", help="The column that has the values.")]
ExpiresOption = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column that has the times at which keys expire. Default: expires, if a file has "
        "such a column.",
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
STDIN: Final = "-"
SinceOption = Annotated[
    str, typer.Option(metavar="TIME", help="The time from which the rows are complete.")
]
OnConflictOption = Annotated[
    str, typer.Option(help="overwrite, or error: refuse a row for a live key.")
]
CheckOption = Annotated[
    Path | None,
    typer.Option(
        "--check",
        metavar="FILE",
        help="Checks that the load must pass: JSON, or TOML.",
        show_default=False,
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Add a load that does not pass, with a --reason."),
]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why.", show_default=False)
]


def gate_of(
    check: Path | None, reason: str | None, *, force: bool
) -> tuple[Gate | None, Force | None]:
    """The gate that the options of a command name, and who forces a load through it."""
    if force and reason is None:
        raise UsageError("--force without a reason", "pass --reason TEXT: it stands with the load")
    if (force or reason is not None) and check is None:
        raise UsageError("--force and --reason go with a gate", "pass --check FILE")
    gate = None if check is None else Gate.of_file(check)
    return gate, Force(reason or "") if force else None


DuplicatesOption = Annotated[
    str, typer.Option(help="A key that comes twice: error, or last: the last row counts.")
]
FileEncodingOption = Annotated[
    Encoding, typer.Option("--encoding", "-e", help="The notation of keys and values in the files.")
]
SyncOption = Annotated[
    bool, typer.Option("--sync", help="Make a span equal to the files; write only differences.")
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="The format of - : jsonl, csv, tsv, parquet, arrow, or csv.gz and the like.",
        show_default=False,
    ),
]
QuotingOption = Annotated[
    str,
    typer.Option(
        help="Quotes of CSV and TSV: standard (RFC 4180), or none: a quote is a letter as others."
    ),
]
DelimiterOption = Annotated[
    str | None,
    typer.Option(
        metavar="CHARACTER",
        help="What stands between the fields of CSV, such as ';' or '|'; tab is a tab. Default: "
        "as the name of the file tells.",
        show_default=False,
    ),
]
NoHeaderOption = Annotated[
    bool, typer.Option("--no-header", help="The first row of CSV has values, and no names.")
]
NamesOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help="The columns of CSV without a header: a,b,c.", show_default=False
    ),
]
NestedOption = Annotated[
    str,
    typer.Option(
        help="Fields of JSON lines that are no texts, and columns of texts: error; text, which "
        "takes their JSON; or columns, which calls fields of an object outer.inner."
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")]
MoveOption = Annotated[
    bool, typer.Option("--move", help="Remove the staged files after adding them.")
]
StagingOption = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="An empty place for the files of the import. Default: beside the store's files, or "
        "below the first place of the server.",
        show_default=False,
    ),
]
CreateOption = Annotated[bool, typer.Option("--create", help="Create a store that does not exist.")]

app = typer.Typer(add_completion=False)
seed_app = typer.Typer(add_completion=False)
stagings_app = typer.Typer(add_completion=False)


_IMPORT_HELP: Final = """\
Load many rows at once. All rows become visible at one time, which is printed.

Rows are sorted first, in about 1 GB of memory; larger inputs are sorted on the
store's disk. Importing a staging directory twice adds it once. The files of a staging
in a bucket are fetched to the store's disk first; a command that was stopped fetches
the rest when it runs again. A file in a bucket is fetched to the directory for
temporary files (TMPDIR).

With --sync a span (--prefix, or --start and --end; by default all keys) has exactly the
rows of the files afterwards: new and other values are put, missing keys deleted, and
nothing is written where nothing differs. With --op each row is a put or a delete. Both
write ordinary commits, of 16 MiB at most.

Beside a process that has the store open, that process checks and adds the rows. By a URL the
server adds them from below a place of its --imports-from, and the token needs the right
admin; --sync and --op send ordinary writes.

\b
Examples:
  kvstore import flights.db staged/
  kvstore import flights.db s3://bucket/staging/run-42
  kvstore import flights.db 2013-*.parquet --key flight --value row
  kvstore import flights.db s3://bucket/2013.parquet --key flight --value row
  kvstore import new.db rows.csv --create --on-conflict error
  zcat rows.jsonl.gz | kvstore import new.db - --format jsonl --create
  kvstore import codes.db codes.csv --expires until
  kvstore import codes.db codes.csv --delimiter ';' --no-header
  kvstore import events.db events.jsonl --key id --value body --nested text
  kvstore import codes.db codes.csv.zst --sync --prefix code/
  kvstore import https://city:7447 rows.csv --staging s3://bucket/staging/run-42
"""


@app.command(name="import", help=_IMPORT_HELP)
def import_(
    store: AddressArgument,
    sources: SourcesArgument,
    key: KeyOption = "key",
    value: ValueOption = "value",
    expires: ExpiresOption = None,
    op: OpOption = None,
    sync: SyncOption = False,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    on_conflict: OnConflictOption = "overwrite",
    duplicates: DuplicatesOption = "error",
    format_: FormatOption = None,
    quoting: QuotingOption = "standard",
    delimiter: DelimiterOption = None,
    no_header: NoHeaderOption = False,
    names: NamesOption = None,
    nested: NestedOption = "error",
    encoding: FileEncodingOption = Encoding.TEXT,
    key_encoding: KeyEncodingOption = None,
    value_encoding: ValueEncodingOption = None,
    move: MoveOption = False,
    staging: StagingOption = None,
    check: CheckOption = None,
    force: ForceOption = False,
    reason: ReasonOption = None,
    create: CreateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take the options, and import by the way that they name."""
    gate, forced = gate_of(check, reason, force=force)
    if gate is not None and (sync or op is not None):
        raise UsageError("--check looks at an import", "leave out --sync and --op")
    conflict = word(*ON_CONFLICT).check("on_conflict", on_conflict)
    twice = word(*DUPLICATES).check("duplicates", duplicates)
    asked = [name for name in (key, value, expires, op) if name is not None]
    reads = file_reads(quoting, delimiter, names, nested, no_header=no_header, usual_names=asked)
    notation = Encodings.of(encoding, key_encoding, value_encoding)
    span = to_span(notation.key, start=start, end=end, prefix=prefix)
    staged = len(sources) == 1 and _is_staging(sources[0])
    columns = {"key": key, "value": value, "expires": expires, "op": op}
    if staged:
        _require_plain(columns, notation, sync=sync)
    if staging is not None and (staged or sync or op is not None):
        raise UsageError(
            "--staging is for files that are loaded", "leave it out: nothing is staged here"
        )
    _require_agreeing(columns, conflict, span, sync=sync)
    with ExitStack() as stack:
        progress = stack.enter_context(working(f"importing into {store}", quiet=as_json))
        files = [] if staged else stack.enter_context(local_files(sources, progress, format_))
        reads.require_fitting(files)
        opened = stack.enter_context(open_or_create_for_rows(store, "rocksdb", create=create))
        if staged:
            manifest = staged_manifest(sources[0])
            how: dict[str, Any] = {"progress": progress, "check": gate, "force": forced}
            stamp = ingest(opened, sources[0], conflict, move, **how)
            _tell(manifest, stamp, as_json)
            return
        has_expiries = expires is None and op is None and not sync
        reading = Reading(files)
        reads = reads._replace(reading=reading)
        if op is not None:  # the rows are written in several commits: a bad one is found before
            for _ in decoded_files(files, columns, notation, reads, has_expiries=False):
                pass
        decoded = decoded_files(files, columns, notation, reads, has_expiries=has_expiries)
        rows = reading.over(decoded, counting(progress, "rows read"))
        if sync:
            _tell_applied(sync_rows(opened, rows, span, twice), as_json)
        elif op is not None:
            _tell_applied(apply_rows(opened, rows), as_json)
        else:
            place = None if staging is None else staging_place(staging)
            more: dict[str, Any] = {"staging": place, "gate": gate, "force": forced}
            _tell(*import_rows(opened, rows, conflict, twice, **more), as_json)


def file_reads(
    quoting: str,
    delimiter: str | None,
    names: str | None,
    nested: str,
    *,
    no_header: bool,
    usual_names: Sequence[str],
) -> FileReads:
    """How the options of a command have files read. Without a header and without `--names` the
    columns have the `usual_names`. Raises `UsageError`."""
    named = None if names is None else [name.strip() for name in names.split(",")]
    return FileReads(
        quoting=word(*QUOTINGS).check("quoting", quoting),
        delimiter="\t" if delimiter in ("tab", "\\t") else delimiter,
        names=list(usual_names) if named is None and no_header else named,
        nested=word(*NESTED).check("nested", nested),
    )


def _require_plain(columns: dict[str, str | None], notation: Encodings, *, sync: bool) -> None:
    """Refuse the options that describe files, for a staging."""
    if columns["expires"] is not None or columns["op"] is not None or sync:
        raise UsageError("--expires, --op and --sync describe files", "a staging is added as it is")
    if notation != (Encoding.TEXT, Encoding.TEXT):
        raise UsageError("--encoding of a staging", "its rows are bytes")


def _require_agreeing(
    columns: dict[str, str | None], conflict: OnConflict, span: Span, *, sync: bool
) -> None:
    """Refuse options that contradict each other."""
    has_op = columns["op"] is not None
    if not sync and span != Span():
        raise UsageError("a span goes with --sync", "pass --sync, or no span")
    if (sync or has_op) and (columns["expires"] is not None or conflict == "error"):
        raise UsageError(
            "--sync and --op go without --expires and --on-conflict error", "leave one out"
        )
    if sync and has_op:
        raise UsageError("--sync decides itself between put and delete", "leave --op out")


def _is_staging(source: str) -> bool:
    """Whether a source is an import that was built elsewhere, and not a file of rows. A staging may
    have the name of a file: Spark writes directories that are called `run.parquet`."""
    if not is_url(source):
        return Path(source).is_dir()
    address = parse_address(source)
    if address.is_file:
        return Path(address.path).is_dir() or not has_format(Path(address.path))
    return not has_format(Path(address.path)) or has_manifest(source)


@contextmanager
def local_files(
    sources: list[str], progress: Callable[[str], None], format_: str | None = None
) -> Iterator[list[Path]]:
    """The files to read. Stdin, and what object stores have, become files of a temporary directory
    for the time of the block: rows are read twice, for the names of their columns first."""
    paths = [Path(parse_address(each).path if is_url(each) else each) for each in sources]
    has_stdin = STDIN in sources
    for source, path in zip(sources, paths, strict=True):
        if source != STDIN:
            format_of(path)
    if not has_stdin:
        if format_ is not None:
            raise UsageError("--format is for stdin", "files have it in their names")
    elif format_ is None:
        raise UsageError("stdin has no name that tells its format", "pass --format jsonl")
    elif sys.stdin is None:
        raise UsageError("stdin is closed", "pipe the rows, or name a file")
    with TemporaryDirectory(prefix="kvstore-import-") as directory:
        files: list[Path] = []
        copies: dict[str, str] = {}
        for number, (source, path) in enumerate(zip(sources, paths, strict=True)):
            if source != STDIN and (not is_url(source) or parse_address(source).is_file):
                files.append(path)
                continue
            named = f"stdin.{(format_ or '').lstrip('.')}" if source == STDIN else path.name
            copy = Path(directory) / f"{number}{''.join(Path(named).suffixes[-2:])}"
            format_of(copy)
            with storage_errors(str(copy)), copy.open("wb") as file:
                if source == STDIN:
                    shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
                else:
                    fetch_object(source, file, counting(progress, f"bytes of {source}"))
            files.append(copy)
            copies[str(copy)] = "stdin" if source == STDIN else source
        try:
            yield files
        except UsageError as error:
            copy_named = next((copy for copy in copies if copy in error.what), None)
            if copy_named is None:
                raise
            what = error.what.replace(copy_named, copies[copy_named])
            raise UsageError(what, error.remedy) from error


def export_keys(
    store: str,
    path: Path,
    as_of: str | None,
    span: Span,
    notation: Encodings,
    *,
    format_: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write keys and values to a file, or to stdout where `path` is `-`."""
    write = None if notation == (Encoding.TEXT, Encoding.TEXT) else _in_notation(notation)
    if str(path) == STDIN:
        name = Path(f"stdout.{(format_ or 'jsonl').lstrip('.')}")
        kind = format_of(name)
        with (
            open_to_read(store) as opened,
            opened.snapshot(as_of) as snapshot,
            packed(sys.stdout.buffer, name) as sink,
        ):
            write_rows(sink, kind, live_rows(opened, snapshot, span), write, lambda rows: None)
        return
    if format_ is not None:
        raise UsageError("--format is for stdout", "files have it in their names")
    with (
        working(f"writing {path}", quiet=as_json) as progress,
        open_to_read(store) as opened,
        opened.snapshot(as_of) as snapshot,
    ):
        total = opened.stats()["data_entries"] if span == Span() else None
        show = counting(progress, "rows", total, is_about=True)
        report = export_rows(
            opened, snapshot, path, span, write, overwrite=overwrite, progress=show
        )
    fields = {"as_of": iso(report.as_of), "rows": report.rows, "bytes": report.bytes}
    print_figures(fields, as_json=as_json)


def _in_notation(notation: Encodings) -> Callable[[bytes, str], str]:
    return lambda raw, name: to_text(raw, notation.key if name == "key" else notation.value)


@stagings_app.command(name="expire-stagings")
def expire_stagings_(
    root: Annotated[
        str,
        typer.Argument(metavar="URL", help="The URL above the stagings.", show_default=False),
    ],
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Remove stagings of this age and older: 7d, 12h.")
    ] = "7d",
    as_json: JsonOption = False,
) -> None:
    """Remove the imports below a URL that were begun long ago, sealed or not.

    A store that has added an import does not need its staging any more.

    \b
    Examples:
      kvstore expire-stagings s3://bucket/staging --older-than 7d
    """
    with working(f"looking through {root}", quiet=as_json):
        removed = expire_stagings(root, older_than=older_than)
    print_figures(
        {"stagings": len(removed), "bytes": sum(each.size_bytes for each in removed)},
        as_json=as_json,
    )


@seed_app.command(name="seed")
def seed_(
    store: StoreArgument,
    sources: FilesArgument,
    key: KeyOption = "key",
    value: ValueOption = "value",
    at: AtOption = "ts",
    op: OpOption = None,
    since: SinceOption = "0",
    duplicates: DuplicatesOption = "error",
    format_: FormatOption = None,
    quoting: QuotingOption = "standard",
    delimiter: DelimiterOption = None,
    no_header: NoHeaderOption = False,
    names: NamesOption = None,
    nested: NestedOption = "error",
    encoding: FileEncodingOption = Encoding.TEXT,
    key_encoding: KeyEncodingOption = None,
    value_encoding: ValueEncodingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a new store of old events. Each row is a version at its own time.

    Times have a zone, or are nanoseconds. STORE must not exist: history is never
    rewritten. The newest time is printed. A backup makes a collection of the store.
    Without a header and without --names, columns are key, value, time and operation.

    \b
    Examples:
      kvstore seed fleet.db events.parquet --key id --value state --at seen
      kvstore seed fleet.db 2026-*.csv --op op --since 2026-01-01T00:00:00Z
      kvstore seed fleet.db old.csv --delimiter '|' --names id,seen,state --key id --value state \
        --at seen
    """
    twice = word(*DUPLICATES).check("duplicates", duplicates)
    usual = [key, value, at, *([] if op is None else [op])]
    reads = file_reads(quoting, delimiter, names, nested, no_header=no_header, usual_names=usual)
    notation = Encodings.of(encoding, key_encoding, value_encoding)
    rows = 0
    columns = SeedColumns(key, value, at, op)

    def events(files: list[Path], reads: FileReads) -> Iterator[pa.RecordBatch]:
        """The rows of the files, which are checked here, where file and row are known."""
        nonlocal rows
        clock = Clock()
        least = int(to_timestamp(since, name="since", now=clock.wall_ns))
        for source in files:
            first = first_row(source, reads)
            checks = SeedRows(columns, since=least, upto=clock.wall_ns(), first=first)
            found = file_events([source], key=key, value=value, at=at, op=op, reads=reads)
            for batch in decoded(found, notation, str(source), first=first):
                try:
                    deque(checks.checked([batch]), maxlen=0)
                except UsageError as error:
                    raise error.at(f"{source}: ") from error
                yield batch
                rows += batch.num_rows

    with (
        working(f"seeding {store}", quiet=as_json) as progress,
        local_files(sources, progress, format_) as files,
    ):
        reads.require_fitting(files)
        reading = Reading(files)
        found = events(files, reads._replace(reading=reading))
        newest = seed(
            store,
            reading.over(found, counting(progress, "rows read")),
            key=key,
            value=value,
            at=at,
            op=op,
            since=since,
            duplicates=twice,
        )
    print_figures({"newest": iso(newest), "rows": rows}, as_json=as_json)


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


def _tell_applied(done: RowsApplied, as_json: bool) -> None:
    stamp = None if done.timestamp is None else iso(done.timestamp)
    print_figures({**done._asdict(), "timestamp": stamp}, as_json=as_json)
