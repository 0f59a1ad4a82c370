"""`kvstore table`: typed rows from the shell; `kvstore export`: a table or keys as files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from kvstore.base.arguments import word
from kvstore.base.paths import is_url
from kvstore.base.timestamp import Timestamp
from kvstore.bulk import rows_cli
from kvstore.bulk.cli import (
    ON_CONFLICT,
    STDIN,
    CheckOption,
    CreateOption,
    DelimiterOption,
    DuplicatesOption,
    ForceOption,
    FormatOption,
    NamesOption,
    NestedOption,
    NoHeaderOption,
    OnConflictOption,
    OverwriteOption,
    QuotingOption,
    ReasonOption,
    StagingOption,
    export_keys,
    file_reads,
    gate_of,
    local_files,
)
from kvstore.bulk.exports import packed
from kvstore.bulk.loading import TimedRows, import_files
from kvstore.bulk.manifest import Manifest
from kvstore.bulk.outside import ExportReport, export_table, write_table
from kvstore.bulk.progress import Reading
from kvstore.bulk.row_files import format_of, has_format
from kvstore.bulk.rows_cli import ColumnsOption, NameArgument, names_of, write_told
from kvstore.bulk.schemas import schema_of
from kvstore.bulk.sort import DUPLICATES
from kvstore.cli.options import (
    AddressArgument,
    AsOfOption,
    Encoding,
    EncodingOption,
    Encodings,
    EndOption,
    JsonOption,
    KeyEncodingOption,
    PrefixOption,
    StartOption,
    ValueEncodingOption,
    open_for_rows,
    open_or_create_for_rows,
    open_to_read,
    to_span,
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
from kvstore.cli.times import iso
from kvstore.codec.tuples import desc
from kvstore.errors import NotUniqueError, UsageError
from kvstore.tables import Table, unique
from kvstore.tables.definition import Definition
from kvstore.tables.words import to_type, to_value

# --------------------------------------------------------------------------------------------------
# Arguments of the commands of tables, and a definition as these commands print it.


def facts_of(table: Table) -> dict[str, Any]:
    """The definition of a table, for JSON."""
    definition = table.codec().definition
    return {
        "table": table.name,
        "columns": [
            {"name": column.name, "type": str(column.type), "nullable": column.is_nullable}
            for column in definition.columns
        ],
        "key": _columns_of(definition, definition.key),
        "event_time": table.event_time,
        "expires": table.expires,
        "valid_to": table.valid_to,
        "indexes": [
            {
                "name": index.name,
                "columns": _columns_of(definition, index.parts),
                "unique": index.is_unique,
                "whole": index.is_whole,
            }
            for index in definition.indexes
        ],
    }


def _columns_of(definition: Definition, parts: Any) -> list[str]:
    """The columns of a key or an index; a falling one begins with `-`."""
    names = definition.parts_named(parts)
    return [
        f"-{name}" if part.is_falling else name for name, part in zip(names, parts, strict=True)
    ]


# --------------------------------------------------------------------------------------------------
# Commands that change tables, and `kvstore export`.

AddOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME:TYPE[=VALUE]", help="Add a column. VALUE: what older rows have."),
]
DropOption = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Drop a column.")]
WidenOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME:TYPE", help="Give a column a wider type.")
]
AddIndexOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=COLUMNS", help="Add an index: a,-b sorts b in descending order."),
]
UniqueIndexOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=COLUMNS", help="Add an index that no two rows may share."),
]
DropIndexOption = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Drop an index.")]

ExpiresOption = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="The column that has the times at which rows expire. It is no column of the table.",
        show_default=False,
    ),
]


def register(app: typer.Typer, export_app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(create)
    app.command(name="import")(import_)
    app.command()(alter)
    app.command()(build)
    app.command()(drop)
    export_app.command(name="export")(export)


def create(
    store: AddressArgument,
    name: NameArgument,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[FILE] [COLUMN:TYPE]...",
            help="A file, or its URL, whose columns the table gets; columns with their types, also "
            "in the place of those of the file.",
            show_default=False,
        ),
    ],
    key: Annotated[
        list[str],
        typer.Option(
            "--key",
            "-k",
            metavar="COLUMNS",
            help="The columns of the key; a,-b puts the greatest b first.",
            show_default=False,
        ),
    ],
    index: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]COLUMNS",
            help="An index. Without a name it is called by_ and its columns.",
            show_default=False,
        ),
    ] = None,
    unique_index: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]COLUMNS",
            help="An index that no two rows may share.",
            show_default=False,
        ),
    ] = None,
    event_time: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The column that is put last in the key, newest first.",
            show_default=False,
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The column of the times at which rows are deleted.",
            show_default=False,
        ),
    ] = None,
    valid_to: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The column of the event times until which rows are valid.",
            show_default=False,
        ),
    ] = None,
    columns: ColumnsOption = None,
    make_store: CreateOption = False,
    quoting: QuotingOption = "standard",
    delimiter: DelimiterOption = None,
    no_header: NoHeaderOption = False,
    names: NamesOption = None,
    nested: NestedOption = "error",
    as_json: JsonOption = False,
) -> None:
    """Make a table: with the columns of a file, with columns that are named, or with both.

    A table that is there already stays as it is if it has these columns, and is refused otherwise.
    Types are int64, double, string, bool, date32, timestamp[us, tz=UTC], decimal128(9, 2), binary
    and others of Arrow, also list<double>, fixed_size_list<float>[768], map<string, int64> and
    struct<a: int64, b: string>. Text has no types: a column of CSV gets the first of bool, int64,
    double, date32, timestamp and string that holds each of its values. The rows of the file come by
    `kvstore table import`.

    \b
    Examples:
      kvstore table create city.db users name:string id:int64 --key id --index name
      kvstore table create city.db trips 2026-01.parquet --key vendor,trip_id --create
      kvstore table create city.db stops rows.csv zip:string --key id --columns id,zip,fare
      kvstore table create city.db codes user:string 'until:timestamp[us, tz=UTC]' --key user \
        --expires until
    """
    files = [word for word in words if _is_file(word)]
    given = [
        pa.field(column, to_type(kind))
        for column, kind in (_typed(word) for word in words if word not in files)
    ]
    if len(files) > 1:
        raise UsageError(f"{len(files)} files", "name one: its columns are those of the table")
    if not files and columns is not None:
        raise UsageError("--columns are columns of a file", "name a file")
    if files and no_header and names is None:
        raise UsageError("a file without a header names no columns", "pass --names a,b,c")
    reads = file_reads(quoting, delimiter, names, nested, no_header=no_header, usual_names=())
    schema = pa.schema(given)
    if files:
        with (
            working(f"reading {files[0]}", quiet=as_json) as progress,
            local_files(files, progress) as paths,
        ):
            reads.require_fitting(paths)
            schema = schema_of(paths[0], reads, names_of(columns), given)
    indexes: dict[str, Any] = dict(map(_named_index, index or []))
    indexes.update((each, unique(*parts)) for each, parts in map(_named_index, unique_index or []))
    if len(indexes) < len(index or []) + len(unique_index or []):
        raise UsageError("two indexes have one name", "name each: NAME=COLUMNS")
    parts = [part for text in key for part in _parts(text)]
    with open_or_create_for_rows(store, "rocksdb", create=make_store) as opened:
        made = opened.table(name, schema, parts, indexes, event_time, expires, valid_to)
        facts = facts_of(made)
    _show(facts, as_json=as_json)


def _is_file(word: str) -> bool:
    """Whether a word names a file, and no column: `rows.csv`, `s3://bucket/rows.csv`."""
    return is_url(word) or (":" not in word and has_format(Path(word)))


def drop(store: AddressArgument, name: NameArgument, as_json: JsonOption = False) -> None:
    """Drop a table with its rows, and print the timestamp. Reads as of an earlier time have it.

    History stays, and with it the bytes: `kvstore table clear` destroys them first.

    \b
    Examples:
      kvstore table drop city.db trips
    """
    with open_for_rows(store) as opened:
        stamp = opened.table(name).drop()
        write_told(opened, {"timestamp": stamp}, as_json=as_json)


def import_(
    store: AddressArgument,
    name: NameArgument,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Files, also by URL: .parquet, .csv, .tsv, .jsonl, .arrow, .feather; text also "
            "with .gz or .zst. - is stdin.",
            show_default=False,
        ),
    ],
    expires: ExpiresOption = None,
    on_conflict: OnConflictOption = "overwrite",
    duplicates: DuplicatesOption = "error",
    format_: FormatOption = None,
    quoting: QuotingOption = "standard",
    delimiter: DelimiterOption = None,
    no_header: NoHeaderOption = False,
    names: NamesOption = None,
    nested: NestedOption = "error",
    staging: StagingOption = None,
    check: CheckOption = None,
    force: ForceOption = False,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load many rows at once, with their index entries. All become visible at one time.

    The files have the columns of the table, in any order. A column that they lack is null, or has
    its default. A value that a column cannot hold exactly is refused, by file, column and row.
    Without a header and without --names, columns stand in the order of the table. Beside a process
    that has the store open, that process checks and adds the rows. By a URL the server adds them
    from below a place of its `--imports-from`, and the token needs the right admin.

    \b
    Examples:
      kvstore table import city.db trips 2026-*.parquet
      kvstore table import city.db trips rows.csv --duplicates last
      kvstore table import city.db sessions rows.csv --expires until
      kvstore table import city.db trips old.csv --delimiter '|' --no-header
      kvstore table scan old.db trips --json | kvstore table import new.db trips - --format jsonl
      kvstore table import https://city:7447 trips rows.csv --staging s3://bucket/staging/run-42
    """
    conflict = word(*ON_CONFLICT).check("on_conflict", on_conflict)
    twice = word(*DUPLICATES).check("duplicates", duplicates)
    how = (quoting, delimiter, names, nested)
    gate, forced = gate_of(check, reason, force=force)
    with (
        working(f"importing into {store}", quiet=as_json) as progress,
        local_files(sources, progress, format_) as files,
        open_for_rows(store) as opened,
    ):
        table = opened.table(name)
        reads = file_reads(*how, no_header=no_header, usual_names=table.schema.names)
        reads.require_fitting(files)
        read, reading = 0, Reading(files)

        def counted(rows: Iterator[TimedRows]) -> Iterator[TimedRows]:
            nonlocal read
            for each in reading.over(rows, counting(progress, "rows read")):
                yield each
                read += each.num_rows

        reads = reads._replace(reading=reading)
        manifest, stamp = import_files(
            table,
            files,
            conflict,
            twice,
            expires=expires,
            progress=counted,
            reads=reads,
            staging=staging,
            gate=gate,
            force=forced,
        )
    print_figures(_imported(manifest, stamp, read), as_json=as_json)


def _imported(manifest: Manifest, stamp: Timestamp, read: int) -> dict[str, Any]:
    return {
        "timestamp": iso(stamp),
        "import_id": f"{manifest.import_id:016x}",
        "rows": read,
        "rows_and_entries": manifest.rows,
        "bytes": manifest.size_bytes,
    }


def alter(
    store: AddressArgument,
    name: NameArgument,
    add: AddOption = None,
    drop: DropOption = None,
    widen: WidenOption = None,
    add_index: AddIndexOption = None,
    unique_index: UniqueIndexOption = None,
    drop_index: DropIndexOption = None,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="The column of the times at which new rows are deleted."
        ),
    ] = None,
    no_expires: Annotated[
        bool, typer.Option("--no-expires", help="No column tells so any more.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Change the columns and indexes of a table from now on. Stored rows stay as they are.

    Most options may be repeated. The entries of a new index are made before the command ends. Each
    unique index for which two rows have the same values is dropped again, and all other changes
    stay. Rows that are there expire as they were to when they were written.

    \b
    Examples:
      kvstore table alter city.db trips --add tip:double --add tax:int64=0
      kvstore table alter city.db trips --widen fare:double --drop note
      kvstore table alter city.db trips --add-index by_zone=zone,-pickup
      kvstore table alter city.db users --unique-index by_mail=mail
      kvstore table alter city.db trips --drop-index by_zone
    """
    if no_expires and expires is not None:
        raise UsageError("--no-expires and --expires at once", "leave one out")
    indexes: dict[str, Any] = dict(_index(text) for text in add_index or [])
    for each, parts in map(_index, unique_index or []):
        indexes[each] = unique(*parts)
    with open_for_rows(store) as opened:
        table = opened.table(name)
        table.alter(
            add=dict(map(_added, add or [])) or None,
            drop=drop or None,
            widen={each: to_type(kind) for each, kind in map(_typed, widen or [])} or None,
            add_index=indexes or None,
            drop_index=drop_index or None,
            expires=False if no_expires else expires,
        )
        _build_all(table, indexes)
        facts = facts_of(table)
    if as_json:
        print_json(facts)
    else:
        print_line(f"altered; the columns are {', '.join(c['name'] for c in facts['columns'])}")


def build(
    store: AddressArgument,
    name: NameArgument,
    index: Annotated[
        str, typer.Argument(metavar="INDEX", help="The index's name.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Make the entries of an index that an interrupted `alter` left unfinished.

    \b
    Examples:
      kvstore table build city.db trips by_zone
    """
    with open_for_rows(store) as opened:
        rows = _build(opened.table(name), index, quiet=as_json)
    if as_json:
        print_json({"index": index, "rows": rows})


def export(
    store: AddressArgument,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[TABLE] FILE",
            help="A table, to export its rows; then the file. - is stdout.",
            show_default=False,
        ),
    ],
    as_of: AsOfOption = None,
    columns: ColumnsOption = None,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    format_: FormatOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_encoding: KeyEncodingOption = None,
    value_encoding: ValueEncodingOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write keys and values to a file that `kvstore import` reads, or the rows of a table.

    The name of the file tells the format: .jsonl, .csv, .tsv, .parquet, .arrow; text also with
    .gz or .zst. Keys and values that are not text need --encoding hex or base64 in CSV and TSV.
    A table keeps its values in each format, and `kvstore table import` reads them; only CSV and TSV
    have nulls of text columns as empty texts, and refuse bytes that are no UTF-8.

    \b
    Examples:
      kvstore export flights.db flights.jsonl.zst
      kvstore export flights.db aa.csv --prefix AA --as-of yesterday
      kvstore export flights.db - --format jsonl | jq .key
      kvstore export city.db trips trips.parquet
      kvstore export city.db trips trips.csv --as-of yesterday
      kvstore export https://kv.example.com:7447 trips - | jq .fare
    """
    path = Path(names[-1])
    if len(names) == 1:
        if columns is not None:
            raise UsageError("--columns are columns of a table", "name a table")
        notation = Encodings.of(encoding, key_encoding, value_encoding)
        span = to_span(notation.key, start=start, end=end, prefix=prefix)
        export_keys(
            store,
            path,
            as_of,
            span,
            notation,
            format_=format_,
            overwrite=overwrite,
            as_json=as_json,
        )
        return
    if len(names) > 2:
        raise UsageError("export takes a table and a file", "name one file")
    notation = Encodings.of(encoding, key_encoding, value_encoding)
    if (prefix, start, end) != (None, None, None) or notation != (Encoding.TEXT, Encoding.TEXT):
        raise UsageError(
            "a table is exported whole, with the types of its columns",
            "leave out --prefix, --start, --end and --encoding, or the name of the table",
        )
    chosen = names_of(columns)
    if str(path) == STDIN:
        name = Path(f"stdout.{(format_ or 'jsonl').lstrip('.')}")
        kind = format_of(name)
        with (
            open_to_read(store) as opened,
            opened.snapshot(as_of) as snapshot,
            packed(sys.stdout.buffer, name) as sink,
        ):
            reader = snapshot.table(names[0]).scan(columns=chosen)
            report = write_table(sink, kind, reader, names[0], snapshot.as_of)
        _note_emptied(report)
        return
    if format_ is not None:
        raise UsageError("--format is for stdout", "files have it in their names")
    with working(f"writing {path}", quiet=as_json) as progress, open_to_read(store) as opened:
        report = export_table(
            opened,
            names[0],
            path,
            as_of,
            columns=chosen,
            overwrite=overwrite,
            progress=counting(progress, "rows"),
        )
    fields = {"as_of": iso(report.as_of), "rows": report.rows, "bytes": report.bytes}
    print_figures(fields, as_json=as_json)
    _note_emptied(report)


def _note_emptied(report: ExportReport) -> None:
    if report.emptied:
        note(f"{report.emptied:,} nulls of text columns are empty in CSV, as empty texts are")


def _build_all(table: Table, indexes: Iterable[str]) -> None:
    """Build new indexes. A unique index that two rows contradict is dropped, and the others are
    built all the same."""
    refused = [error for name in indexes if (error := _contradiction(table, name)) is not None]
    for error in refused[1:]:
        note(str(error))
    if refused:
        raise refused[0]


def _contradiction(table: Table, index: str) -> NotUniqueError | None:
    """Build an index, or drop it where two rows contradict it, and return their error."""
    try:
        _build(table, index)
    except NotUniqueError as error:
        table.alter(drop_index=index)
        return error
    return None


def _build(table: Table, index: str, *, quiet: bool = False) -> int:
    """Build an index; returns the number of rows that were looked at."""
    rows = 0
    with working(f"building index {index}", quiet=quiet) as progress:
        show = counting(progress, "rows")

        def told(count: int) -> None:
            nonlocal rows
            rows = count
            show(count)

        table.build_index(index, progress=told)
    return rows


def _typed(text: str) -> tuple[str, str]:
    name, colon, kind = text.partition(":")
    if not colon:
        raise UsageError(f"{text!r} names no type", "write name:type")
    return name, kind


def _added(text: str) -> tuple[str, Any]:
    name, rest = _typed(text)
    kind, has_default, word = _parted_default(rest)
    found = to_type(kind)
    if not has_default:
        return name, found
    return name, (found, to_value(found, word, f"the default of column {name!r}"))


def _parted_default(text: str) -> tuple[str, bool, str]:
    """Type and default. The `=` of `timestamp[us, tz=UTC]` is part of the type."""
    head, bracket, rest = text.partition("]")
    kind, sign, word = (rest if bracket else head).partition("=")
    return (head + bracket + kind if bracket else kind), bool(sign), word


def _index(text: str) -> tuple[str, list[str | desc]]:
    name, sign, columns = text.partition("=")
    if not sign or not columns:
        raise UsageError(f"{text!r} names no columns", "write index=column,column")
    return name, _parts(columns)


def _named_index(text: str) -> tuple[str, list[str | desc]]:
    """An index of a new table, which its columns name if nothing else does."""
    if "=" in text:
        return _index(text)
    return "_".join(["by", *(each.strip().lstrip("-") for each in text.split(","))]), _parts(text)


def _parts(text: str) -> list[str | desc]:
    words = [each.strip() for each in text.split(",")]
    return [desc(each[1:]) if each.startswith("-") else each for each in words]


# --------------------------------------------------------------------------------------------------
# `kvstore table`: typed rows from the shell; `kvstore export`: a table as a Parquet file.

app = typer.Typer(
    help="Look at tables, read and load their rows, and change their columns.",
    no_args_is_help=True,
    add_completion=False,
)
export_app = typer.Typer(add_completion=False)
register(app, export_app)
rows_cli.register(app)


@app.command(name="list")
def list_tables(store: AddressArgument, as_json: JsonOption = False) -> None:
    """List the tables of a store.

    \b
    Examples:
      kvstore table list city.db
    """
    with open_to_read(store) as opened:
        found = [facts_of(opened.table(name)) for name in opened.tables()]
    if as_json:
        for facts in found:
            print_json(facts)
        return
    rows = []
    for facts in found:
        indexes = ", ".join(index["name"] for index in facts["indexes"])
        key = ", ".join(facts["key"])
        rows.append([facts["table"], str(len(facts["columns"])), key, indexes])
    print_table(["table", "columns", "key", "indexes"], rows)


@app.command()
def show(store: AddressArgument, name: NameArgument, as_json: JsonOption = False) -> None:
    """Print the columns, the key and the indexes of a table.

    \b
    Examples:
      kvstore table show city.db trips
      kvstore table show city.db trips --json | jq .key
    """
    with open_to_read(store) as opened:
        facts = facts_of(opened.table(name))
    _show(facts, as_json=as_json)


def _show(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    rows = [
        [column["name"], column["type"], "" if column["nullable"] else "not null"]
        for column in facts["columns"]
    ]
    print_table(["column", "type", "nulls"], rows)
    print_line(f"key: {', '.join(facts['key'])}")
    if facts["event_time"]:
        print_line(f"event time: {facts['event_time']}")
    if facts["expires"]:
        print_line(f"rows expire: {facts['expires']}")
    if facts["valid_to"]:
        print_line(f"rows are valid until: {facts['valid_to']}")
    for index in facts["indexes"]:
        kinds = ["unique"] * index["unique"] + ["not whole: kvstore table build"] * (
            not index["whole"]
        )
        more = f" ({', '.join(kinds)})" if kinds else ""
        print_line(f"index {index['name']}: {', '.join(index['columns'])}{more}")
