"""`kvstore table`: typed rows from the shell; `kvstore export`: a table as a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Annotated, Any, Final

import pyarrow as pa
import typer

from bulk.tables import write
from bulk.tables.cells import json_row, shown_row, to_values
from bulk.tables.options import ColumnsOption, NameArgument, facts_of, names_of
from kvstore.cli.exits import NOT_FOUND
from kvstore.cli.options import AsOfOption, JsonOption, StoreArgument
from kvstore.cli.output import note, print_figures, print_json, print_line, print_table
from kvstore.opening import open_read_only
from kvstore.tables.codec import dicts

ROWS_SHOWN: Final = 100
"""Rows that a person sees unless --limit asks for more: a few screens. Widths of columns are known
only when all rows are, so a printed table is held in memory; JSON lines are not."""

app = typer.Typer(
    help="Look at tables, read and load their rows, and change their columns.",
    no_args_is_help=True,
    add_completion=False,
)
export_app = typer.Typer(add_completion=False)
write.register(app, export_app)

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
