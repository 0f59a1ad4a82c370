"""`kvstore table`: typed rows from the shell; `kvstore export`: a table or keys as files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow as pa
import typer

from kvstore.base.arguments import word
from kvstore.base.timestamp import Timestamp
from kvstore.bulk.cli import (
    ON_CONFLICT,
    DuplicatesOption,
    FormatOption,
    OnConflictOption,
    OverwriteOption,
    QuotingOption,
    export_keys,
    local_files,
)
from kvstore.bulk.delimited import QUOTINGS
from kvstore.bulk.files import FileReads, require_quoting
from kvstore.bulk.loading import TimedRows, import_files
from kvstore.bulk.sort import DUPLICATES
from kvstore.bulk.staging import Manifest, Reading
from kvstore.bulk.tables import export_parquet, json_row, shown_row, to_type, to_value, to_values
from kvstore.cli.app import NOT_FOUND
from kvstore.cli.options import (
    AsOfOption,
    Encoding,
    EncodingOption,
    Encodings,
    EndOption,
    JsonOption,
    KeyEncodingOption,
    PrefixOption,
    StartOption,
    StoreArgument,
    ValueEncodingOption,
    open_to_write,
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
from kvstore.opening import open_read_only
from kvstore.remote.control import client_of
from kvstore.store import Store
from kvstore.tables import Table, unique
from kvstore.tables.codec import dicts
from kvstore.tables.definition import Definition

# --------------------------------------------------------------------------------------------------
# Arguments of the commands of tables, and a definition as these commands print it.

NameArgument = Annotated[
    str, typer.Argument(metavar="TABLE", help="The table's name.", show_default=False)
]
ColumnsOption = Annotated[
    str | None,
    typer.Option("--columns", "-c", metavar="NAMES", help="Only these columns: a,b,c."),
]


def names_of(text: str | None) -> list[str] | None:
    """The names of `--columns`."""
    return None if text is None else [name.strip() for name in text.split(",")]


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
    app.command(name="import")(import_)
    app.command()(alter)
    app.command()(build)
    export_app.command(name="export")(export)


def import_(
    store: StoreArgument,
    name: NameArgument,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Files, also by URL: .parquet, .csv, .arrow, .feather.",
            show_default=False,
        ),
    ],
    expires: ExpiresOption = None,
    on_conflict: OnConflictOption = "overwrite",
    duplicates: DuplicatesOption = "error",
    quoting: QuotingOption = "standard",
    as_json: JsonOption = False,
) -> None:
    """Load many rows at once, with their index entries. All become visible at one time.

    The files have the columns of the table, in any order. A column that they lack is null, or has
    its default. A value that a column cannot hold exactly is refused, by file, column and row.

    \b
    Examples:
      kvstore table import city.db trips 2026-*.parquet
      kvstore table import city.db trips rows.csv --duplicates last
      kvstore table import city.db sessions rows.csv --expires until
    """
    conflict = word(*ON_CONFLICT).check("on_conflict", on_conflict)
    twice = word(*DUPLICATES).check("duplicates", duplicates)
    quotes = word(*QUOTINGS).check("quoting", quoting)
    with (
        working(f"importing into {store}", quiet=as_json) as progress,
        local_files(sources, progress) as files,
        open_to_write(store) as opened,
    ):
        require_quoting(files, quotes)
        read, reading = 0, Reading(files)

        def counted(rows: Iterator[TimedRows]) -> Iterator[TimedRows]:
            nonlocal read
            for each in reading.over(rows, counting(progress, "rows read")):
                yield each
                read += each.num_rows

        table = opened.table(name)
        reads = FileReads(reading, quotes)
        manifest, stamp = import_files(
            table, files, conflict, twice, expires=expires, progress=counted, reads=reads
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
    store: StoreArgument,
    name: NameArgument,
    add: AddOption = None,
    drop: DropOption = None,
    widen: WidenOption = None,
    add_index: AddIndexOption = None,
    unique_index: UniqueIndexOption = None,
    drop_index: DropIndexOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the columns and indexes of a table from now on. Stored rows stay as they are.

    Each option may be repeated. The entries of a new index are made before the command ends. Each
    unique index for which two rows have the same values is dropped again, and all other changes
    stay.

    \b
    Examples:
      kvstore table alter city.db trips --add tip:double --add tax:int64=0
      kvstore table alter city.db trips --widen fare:double --drop note
      kvstore table alter city.db trips --add-index by_zone=zone,-pickup
      kvstore table alter city.db users --unique-index by_mail=mail
      kvstore table alter city.db trips --drop-index by_zone
    """
    indexes: dict[str, Any] = dict(_index(text) for text in add_index or [])
    for each, parts in map(_index, unique_index or []):
        indexes[each] = unique(*parts)
    with open_to_write(store) as opened:
        table = _to_alter(opened, name)
        table.alter(
            add=dict(map(_added, add or [])) or None,
            drop=drop or None,
            widen={each: to_type(kind) for each, kind in map(_typed, widen or [])} or None,
            add_index=indexes or None,
            drop_index=drop_index or None,
        )
        _build_all(table, indexes)
        facts = facts_of(table)
    if as_json:
        print_json(facts)
    else:
        print_line(f"altered; the columns are {', '.join(c['name'] for c in facts['columns'])}")


def build(
    store: StoreArgument,
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
    with open_to_write(store) as opened:
        rows = _build(_to_alter(opened, name), index, quiet=as_json)
    if as_json:
        print_json({"index": index, "rows": rows})


def export(
    store: StoreArgument,
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
    """Write keys and values to a file that `kvstore import` reads, or a table as typed Parquet.

    The name of the file tells the format: .jsonl, .csv, .tsv, .parquet, .arrow; text also with
    .gz or .zst. Bytes that are not text need --encoding hex or base64 in CSV and TSV.

    \b
    Examples:
      kvstore export flights.db flights.jsonl.zst
      kvstore export flights.db aa.csv --prefix AA --as-of yesterday
      kvstore export flights.db - --format jsonl | jq .key
      kvstore export city.db trips trips.parquet
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
    if (prefix, start, end, format_) != (None, None, None, None):
        raise UsageError(
            "a table is exported whole, and as Parquet",
            "leave out --prefix, --start, --end and --format, or the name of the table",
        )
    _export_table(store, names[0], path, as_of, columns, overwrite=overwrite, as_json=as_json)


def _export_table(
    store: Path,
    name: str,
    path: Path,
    as_of: str | None,
    columns: str | None,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    if path.suffix not in (".parquet", ".pq"):
        raise UsageError(f"{path} is no name of a Parquet file", "end it in .parquet")
    with (
        working(f"writing {path}", quiet=as_json) as progress,
        open_read_only(store) as opened,
    ):
        report = export_parquet(
            opened,
            name,
            path,
            as_of,
            columns=names_of(columns),
            overwrite=overwrite,
            progress=counting(progress, "rows"),
        )
    fields = {"as_of": iso(report.as_of), "rows": report.rows, "bytes": report.bytes}
    print_figures(fields, as_json=as_json)


def _to_alter(store: Store, name: str) -> Table:
    """A table in the process that has its store open: this one, or the owner."""
    owner = client_of(store)
    return store.table(name) if owner is None else owner.table(name)


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
    return name, [desc(each[1:]) if each.startswith("-") else each for each in columns.split(",")]


# --------------------------------------------------------------------------------------------------
# `kvstore table`: typed rows from the shell; `kvstore export`: a table as a Parquet file.

ROWS_SHOWN: Final = 100
"""Rows that a person sees unless --limit asks for more: a few screens. Widths of columns are known
only when all rows are, so a printed table is held in memory; JSON lines are not."""

app = typer.Typer(
    help="Look at tables, read and load their rows, and change their columns.",
    no_args_is_help=True,
    add_completion=False,
)
export_app = typer.Typer(add_completion=False)
register(app, export_app)

WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[VALUE]...", help="Values of the first columns of the key.", show_default=False
    ),
]
IndexWordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[VALUE]...", help="Values of the first columns of the index.", show_default=False
    ),
]
ReverseOption = Annotated[bool, typer.Option("--reverse", help="In descending order.")]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit", min=0, help="Print at most this many rows. Default: 100; all with --json."
    ),
]


@app.command(name="list")
def list_tables(store: StoreArgument, as_json: JsonOption = False) -> None:
    """List the tables of a store.

    \b
    Examples:
      kvstore table list city.db
    """
    with open_read_only(store) as opened:
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
def show(store: StoreArgument, name: NameArgument, as_json: JsonOption = False) -> None:
    """Print the columns, the key and the indexes of a table.

    \b
    Examples:
      kvstore table show city.db trips
      kvstore table show city.db trips --json | jq .key
    """
    with open_read_only(store) as opened:
        facts = facts_of(opened.table(name))
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
    for index in facts["indexes"]:
        kinds = ["unique"] * index["unique"] + ["not whole: kvstore table build"] * (
            not index["whole"]
        )
        more = f" ({', '.join(kinds)})" if kinds else ""
        print_line(f"index {index['name']}: {', '.join(index['columns'])}{more}")


@app.command()
def get(
    store: StoreArgument,
    name: NameArgument,
    key: Annotated[
        list[str],
        typer.Argument(metavar="VALUE...", help="The values of the key.", show_default=False),
    ],
    as_of: AsOfOption = None,
    columns: ColumnsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a row. Exits with 1 if there is no such row.

    \b
    Examples:
      kvstore table get city.db trips A 7
      kvstore table get city.db trips A 7 --as-of 2026-01-31T00:00Z --json
    """
    with open_read_only(store) as opened:
        table = opened.table(name)
        codec = table.codec(as_of)
        values = to_values(codec, codec.key.columns, key)
        row = table.get(*values, as_of=as_of, columns=names_of(columns))
        schema = codec.schema_of(names_of(columns))
    if row is None:
        note(f"no row {' '.join(key)} in table {name!r}" + (f" as of {as_of}" if as_of else ""))
        raise typer.Exit(NOT_FOUND)
    if as_json:
        print_json(json_row(schema, row))
    else:
        print_figures(dict(zip(schema.names, shown_row(schema, row), strict=True)), as_json=False)


@app.command()
def scan(
    store: StoreArgument,
    name: NameArgument,
    key: WordsArgument = None,
    as_of: AsOfOption = None,
    columns: ColumnsOption = None,
    reverse: ReverseOption = False,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the rows whose key begins with some values, in key order.

    \b
    Examples:
      kvstore table scan city.db trips
      kvstore table scan city.db trips A --columns trip_id,fare --json
    """
    with open_read_only(store) as opened:
        table = opened.table(name)
        codec = table.codec(as_of)
        values = to_values(codec, codec.key.columns, key or [])
        reader = table.scan(
            *values,
            as_of=as_of,
            columns=names_of(columns),
            reverse=reverse,
            limit=_asked(limit, as_json=as_json),
        )
        rows = chain.from_iterable(map(dicts, reader))
        _print_rows(reader.schema, rows, limit, as_json=as_json)


@app.command()
def find(
    store: StoreArgument,
    name: NameArgument,
    index: Annotated[
        str, typer.Argument(metavar="INDEX", help="The index's name.", show_default=False)
    ],
    key: IndexWordsArgument = None,
    as_of: AsOfOption = None,
    columns: ColumnsOption = None,
    reverse: ReverseOption = False,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the rows whose columns of an index begin with some values, in the index's order.

    \b
    Examples:
      kvstore table find city.db trips by_zone JFK
    """
    with open_read_only(store) as opened:
        table = opened.table(name)
        codec = table.codec(as_of)
        found = codec.definition.index(index)
        by_id = codec.definition.by_id
        values = to_values(codec, [by_id[part.id] for part in found.parts], key or [])
        rows = table.find(
            index,
            *values,
            as_of=as_of,
            columns=names_of(columns),
            reverse=reverse,
            limit=_asked(limit, as_json=as_json),
        )
        _print_rows(rows.schema, rows, limit, as_json=as_json)


def _print_rows(
    schema: pa.Schema, rows: Iterator[dict[str, Any]], limit: int | None, *, as_json: bool
) -> None:
    if as_json:
        for row in rows:
            print_json(json_row(schema, row))
        return
    most = ROWS_SHOWN if limit is None else limit
    found = list(islice(rows, most + 1))
    print_table(schema.names, [shown_row(schema, row) for row in found[:most]])
    if limit is None and len(found) > most:
        note(f"these are the first {most} rows; pass --limit, or --json for all")


def _asked(limit: int | None, *, as_json: bool) -> int | None:
    return ROWS_SHOWN + 1 if limit is None and not as_json else limit
