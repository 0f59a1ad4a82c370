"""The rows of tables from the shell: the commands `get`, `scan`, `find`, `count`, `history`,
`changes`, `put`, `delete`, `delete-range`, `revert` and `clear` of `kvstore table`.

Invariants
1. Each command takes the path of a store, also of one in use, or the URL of its server.
2. A value that is printed as JSON is the same value when it is read again, whatever its type: see
   `kvstore.tables.words`.
3. Rows and keys that come by stdin, a JSON value a line, are written by one commit.
"""

from __future__ import annotations

import io
import json
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Annotated, Any, Final
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import typer

from kvstore.base.timestamp import Timestamp
from kvstore.bulk.row_files import json_objects, json_values
from kvstore.cli.changes import LinesOption
from kvstore.cli.main import NOT_FOUND
from kvstore.cli.options import AddressArgument, AsOfOption, JsonOption, open_for_rows, open_to_read
from kvstore.cli.output import note, print_figures, print_json, print_line, print_table
from kvstore.cli.times import iso
from kvstore.errors import UsageError
from kvstore.limits import SERVER_BODY_BYTES_MAX
from kvstore.remote.control import StoreOrClient
from kvstore.store import Store
from kvstore.tables import Table, TableCodec
from kvstore.tables.definition import Column, Index
from kvstore.tables.nested import is_nested
from kvstore.tables.row_changes import ROW_IMAGES
from kvstore.tables.row_codec import dicts
from kvstore.tables.words import (
    json_row,
    read_row,
    read_value,
    shown_row,
    to_value,
    to_values,
)

ROWS_SHOWN: Final = 100
"""Rows that a person sees unless --limit asks for more: a few screens. Widths of columns are known
only when all rows are, so a printed table is held in memory; JSON lines are not."""

NameArgument = Annotated[
    str, typer.Argument(metavar="TABLE", help="The table's name.", show_default=False)
]
ColumnsOption = Annotated[
    str | None,
    typer.Option("--columns", "-c", metavar="NAMES", help="Only these columns: a,b,c."),
]
KeyWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[VALUE]...",
        help="The values of the key. Default: keys from stdin, a JSON list or object a line.",
        show_default=False,
    ),
]
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
FirstOption = Annotated[
    str | None,
    typer.Option(
        "--start",
        metavar="VALUES",
        help="The first key to include: values of its first columns, as a JSON list or one word.",
        show_default=False,
    ),
]
BehindOption = Annotated[
    str | None,
    typer.Option(
        "--end", metavar="VALUES", help="The first key to exclude, likewise.", show_default=False
    ),
]
PrefixOption = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        "-p",
        metavar="VALUES",
        help="Only rows whose key begins with these values, likewise.",
        show_default=False,
    ),
]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="CONDITION",
        help="Only rows that meet it: 'fare >= 10', 'zone = JFK', 'zone is null'. Given several "
        "times, all must hold.",
        show_default=False,
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="All rows of the table.")]


def names_of(text: str | None) -> list[str] | None:
    """The names of `--columns`."""
    return None if text is None else [name.strip() for name in text.split(",")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (get, scan, find, count, history, changes, put, delete, revert, clear):
        app.command()(command)
    app.command(name="delete-range")(delete_range)


# --------------------------------------------------------------------------------------------------
# Reading.


def get(
    store: AddressArgument,
    name: NameArgument,
    key: KeyWords = None,
    as_of: AsOfOption = None,
    columns: ColumnsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a row. Exits with 1 if there is no such row.

    Without values, the rows of the keys that stdin has are printed as JSON, one a line, in their
    order, and null for an absent one.

    \b
    Examples:
      kvstore table get city.db trips A 7
      kvstore table get city.db trips A 7 --as-of 2026-01-31T00:00Z --json
      kvstore table get http://127.0.0.1:7447 trips A 7
      printf '["A", 7]\\n["A", 8]\\n' | kvstore table get city.db trips
    """
    with open_to_read(store) as opened:
        table = opened.table(name)
        at = _at(opened, as_of)
        codec = table.codec(at)
        schema = codec.schema_of(names_of(columns))
        if not key:
            found = table.get_many(list(_keys(codec)), at, columns=names_of(columns))
            for row in found:
                print_line("null" if row is None else _line(schema, row))
            if None in found:
                raise typer.Exit(NOT_FOUND)
            return
        values = to_values(codec, codec.key.columns, key)
        row = table.get(*values, as_of=at, columns=names_of(columns))
    if row is None:
        note(f"no row {' '.join(key)} in table {name!r}" + (f" as of {as_of}" if as_of else ""))
        raise typer.Exit(NOT_FOUND)
    if as_json:
        print_json(json_row(schema, row))
    else:
        print_figures(dict(zip(schema.names, shown_row(schema, row), strict=True)), as_json=False)


def scan(
    store: AddressArgument,
    name: NameArgument,
    key: WordsArgument = None,
    where: WhereOption = None,
    as_of: AsOfOption = None,
    columns: ColumnsOption = None,
    reverse: ReverseOption = False,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the rows whose key begins with some values, in key order.

    A condition is a column, one of =, !=, <, <=, >, >=, 'begins with' and 'contains', and a value;
    or a column and 'is null' or 'is not null'. A value with blanks at its ends is a JSON string.

    \b
    Examples:
      kvstore table scan city.db trips
      kvstore table scan city.db trips A --columns trip_id,fare --json
      kvstore table scan city.db trips --where 'fare >= 10' --where 'zone begins with J'
    """
    with open_to_read(store) as opened:
        table = opened.table(name)
        at = _at(opened, as_of)
        codec = table.codec(at)
        values = to_values(codec, codec.key.columns, key or [])
        reader = table.scan(
            *values,
            as_of=at,
            columns=names_of(columns),
            reverse=reverse,
            limit=_asked(limit, as_json=as_json),
            filter=_filter(codec, where or []),
        )
        rows = chain.from_iterable(map(dicts, reader))
        _print_rows(reader.schema, rows, limit, as_json=as_json)


def find(
    store: AddressArgument,
    name: NameArgument,
    index: Annotated[
        str,
        typer.Argument(
            metavar="INDEX",
            help="The index's name, or the first column of the only index that begins with it.",
            show_default=False,
        ),
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
      kvstore table find city.db trips zone JFK --json
    """
    with open_to_read(store) as opened:
        table = opened.table(name)
        at = _at(opened, as_of)
        codec = table.codec(at)
        found = _index(codec, index)
        by_id = codec.definition.by_id
        values = to_values(codec, [by_id[part.id] for part in found.parts], key or [])
        rows = table.find(
            found.name,
            *values,
            as_of=at,
            columns=names_of(columns),
            reverse=reverse,
            limit=_asked(limit, as_json=as_json),
        )
        _print_rows(rows.schema, rows, limit, as_json=as_json)


def _at(opened: StoreOrClient, as_of: str | None) -> Timestamp | None:
    """The time of a read, which is taken once: it picks the columns, and then the rows."""
    return None if as_of is None else opened.to_time(as_of, name="as_of")


_OPERATORS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "begins with": pc.starts_with,
    "contains": pc.match_substring,
}
"""Those that begin another one stand behind it."""


def _filter(codec: TableCodec, conditions: Sequence[str]) -> pc.Expression | None:
    """The rows that meet all of some conditions. None if there is none."""
    found = None
    for text in conditions:
        one = _condition(codec, text)
        found = one if found is None else found & one
    return found


def _condition(codec: TableCodec, text: str) -> pc.Expression:
    """The rows that meet one condition."""
    columns = sorted(codec.definition.columns, key=lambda column: len(column.name), reverse=True)
    for column in columns:  # the name of a column may begin another one, and have blanks
        rest = text.strip().removeprefix(column.name)
        if rest == text.strip():
            continue
        rest = rest.strip()
        if rest in ("is null", "is not null"):
            null = pc.field(column.name).is_null()
            return null if rest == "is null" else ~null
        for name, compare in _OPERATORS.items():
            if rest.startswith(name):
                word = rest.removeprefix(name).strip()
                if is_nested(column.type):
                    raise UsageError(
                        f"{text!r}: the column is {column.type}", "ask whether it is null"
                    )
                if word[:1] == '"':
                    with suppress(ValueError):
                        word = str(json.loads(word))
                return _compared(compare, column, word, f"{codec.definition.where}, {text!r}")
    names = ", ".join(column.name for column in codec.definition.columns)
    raise UsageError(
        f"{text!r} is no condition",
        f"write 'COLUMN >= VALUE' or 'COLUMN is null'; the columns are {names}",
    )


def _compared(
    compare: Callable[[Any, Any], Any], column: Column, word: str, where: str
) -> pc.Expression:
    """The rows whose column compares with the value that a word tells."""
    field, type_ = pc.field(column.name), column.type
    if compare in (pc.starts_with, pc.match_substring):
        if pa.types.is_fixed_size_binary(type_):
            type_ = pa.binary()  # the start of a value is shorter
            field = field.cast(type_)
        value = to_value(type_, word, where)
        if not isinstance(value, str | bytes):
            raise UsageError(f"{where}: the column is {type_}", "ask so of texts and binaries")
        return compare(field, value)
    value = to_value(type_, word, where)
    if isinstance(value, UUID):  # Arrow compares its bytes alone
        type_, value = pa.binary(16), value.bytes
        field = field.cast(type_)
    return compare(field, pa.scalar(value, type_))


def _index(codec: TableCodec, word: str) -> Index:
    """The index of a name, or the only one that begins with the column of that name."""
    definition = codec.definition
    named = [each for each in definition.indexes if each.name == word]
    begun = [each for each in definition.indexes if definition.by_id[each.parts[0].id].name == word]
    found = named or begun
    return found[0] if len(found) == 1 else definition.index(word)


def count(
    store: AddressArgument,
    name: NameArgument,
    key: WordsArgument = None,
    where: WhereOption = None,
    as_of: AsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the number of rows, or of those whose key begins with some values.

    Conditions are as of `kvstore table scan`.

    \b
    Examples:
      kvstore table count city.db trips
      kvstore table count city.db trips A --as-of yesterday
    """
    with open_to_read(store) as opened:
        table = opened.table(name)
        at = _at(opened, as_of)
        codec = table.codec(at)
        values = to_values(codec, codec.key.columns, key or [])
        found = table.count(*values, as_of=at, filter=_filter(codec, where or []))
    if as_json:
        print_json({"rows": found})
    else:
        print_line(str(found))


def history(
    store: AddressArgument,
    name: NameArgument,
    key: Annotated[
        list[str],
        typer.Argument(metavar="VALUE...", help="The values of the key.", show_default=False),
    ],
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, help="Print at most this many.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the kept versions of a row, newest first, each with the columns of its time. Exits with
    1 if there is none.

    \b
    Examples:
      kvstore table history city.db trips A 7
    """
    with open_to_read(store) as opened:
        table = opened.table(name)
        codec = table.codec()
        versions = table.history(*to_values(codec, codec.key.columns, key))
        for at, row in islice(versions, limit):
            shown = None
            if row is not None:
                shown = json_row(table.codec(at).definition.schema, row)
            if as_json:
                print_json({"timestamp": iso(at), "deleted": row is None, "row": shown})
            else:
                text = "(deleted)" if shown is None else _text(shown)
                print_line(f"{iso(at)}\t{text}")
    if not versions and limit != 0:
        note(f"no row {' '.join(key)} in table {name!r}")
        raise typer.Exit(NOT_FOUND)


def changes(
    store: AddressArgument,
    name: NameArgument,
    since: Annotated[
        str,
        typer.Option(metavar="TIME", help="Changes after this time.", show_default=False),
    ],
    upto: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Changes at or before this time. Default: all.", show_default=False
        ),
    ] = None,
    columns: ColumnsOption = None,
    images: Annotated[
        str, typer.Option(help="Rows of updates to print: pre, post or pre+post.")
    ] = "pre+post",
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, help="Print at most this many.")
    ] = None,
    _as_json: LinesOption = True,
) -> None:
    """Print the changes of rows as JSON lines, in time order.

    The change is `insert`, `update_preimage`, `update_postimage` or `delete`.

    \b
    Examples:
      kvstore table changes city.db trips --since yesterday
      kvstore table changes city.db trips --since 2026-01-31 --upto 2026-02-01 --images post
    """
    with open_to_read(store) as opened:
        table = opened.table(name)
        after = opened.to_time(since, name="since")
        until = None if upto is None else opened.to_time(upto, name="upto")
        wanted = ROW_IMAGES.check("images", images)
        found = table.changes(after, until, images=wanted, columns=names_of(columns))
        schema = pa.schema([field for field in found.schema if field.name not in _CHANGE_COLUMNS])
        rows = chain.from_iterable(map(dicts, found))
        for row in islice(rows, limit):
            change, at = row["_change_type"], Timestamp(row["_commit_version"])
            shown = json_row(schema, {field.name: row[field.name] for field in schema})
            print_json({"timestamp": iso(at), "change": change, "row": shown})


_CHANGE_COLUMNS: Final = ("_change_type", "_commit_version", "_commit_timestamp")


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


def _line(schema: pa.Schema, row: dict[str, Any]) -> str:
    return _text(json_row(schema, row))


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False)


# --------------------------------------------------------------------------------------------------
# Writing.


def put(
    store: AddressArgument,
    name: NameArgument,
    row: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COLUMN=VALUE]...",
            help="The columns of a row, or rows as JSON objects. Default: rows from stdin, a JSON "
            "object a line.",
            show_default=False,
        ),
    ] = None,
    insert: Annotated[
        bool, typer.Option("--insert", help="Refuse a row whose key has one, and write nothing.")
    ] = False,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Delete the rows at this time: +1h, 2026-11-22, or ISO-8601 with a zone. Default: "
            "they stay.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Set rows in place of those with the same keys, in one commit, and print the timestamp.

    A column that is left out is null, or has its default. Binary is hex as a word, and text or
    {"base64": ...} in JSON. More rows than a commit takes are loaded by `kvstore table import`.

    \b
    Examples:
      kvstore table put city.db trips vendor=A trip_id=7 fare=12.5
      kvstore table put city.db trips '{"vendor": "A", "trip_id": 7}' --insert
      kvstore table scan old.db trips --json | kvstore table put city.db trips
    """
    with open_for_rows(store) as opened:
        table = opened.table(name)
        types = {field.name: field.type for field in table.schema}
        if row:
            rows = _rows_of_words(types, row, f"table {name!r}")
        else:
            rows = [read_row(types, fields, place) for place, fields in _objects()]
        if not rows:
            raise UsageError("no row came by stdin", "pass column=value, or pipe JSON lines")
        stamp = _put(opened, table, rows, expires, insert=insert)
        write_told(opened, {"timestamp": stamp, "rows": len(rows)}, as_json=as_json)


def _put(
    opened: StoreOrClient,
    table: Table,
    rows: list[dict[str, Any]],
    expires: str | None,
    *,
    insert: bool,
) -> Timestamp | None:
    if not insert:
        return table.put_batch(rows, expires=expires)
    if len(rows) == 1:
        return table.insert(rows[0], expires=expires)

    def body(transaction: Any) -> Any:
        inside = transaction.table(table.name)
        for row in rows:
            inside.insert(row, expires=expires)
        return transaction

    found: Timestamp = opened.transact(body).timestamp
    return found


def _rows_of_words(
    types: dict[str, pa.DataType], words: Sequence[str], where: str
) -> list[dict[str, Any]]:
    if words[0].lstrip()[:1] == "{":
        text = io.BytesIO("\n".join(words).encode("utf-8", "surrogateescape"))
        return [read_row(types, fields, place) for place, _, fields in json_objects(text, where)]
    row = {}
    for word in words:
        column, sign, value = word.partition("=")
        if not sign:
            raise UsageError(f"{where}: {word!r} names no value", "write column=value")
        if column not in types:
            raise UsageError(f"{where}: no column {column!r}", f"there are {', '.join(types)}")
        if column in row:
            raise UsageError(f"{where}: two values for column {column!r}", "pass one")
        row[column] = to_value(types[column], value, f"{where}, column {column!r}")
    return [row]


def delete(
    store: AddressArgument,
    name: NameArgument,
    key: KeyWords = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a row, which may be absent, and print the timestamp. The history of the row stays.

    Without values, the rows of the keys that stdin has are deleted by one commit.

    \b
    Examples:
      kvstore table delete city.db trips A 7
      kvstore table find city.db trips by_zone JFK -c vendor,trip_id --json \\
        | kvstore table delete city.db trips
    """
    with open_for_rows(store) as opened:
        table = opened.table(name)
        codec = table.codec()
        keys = [tuple(to_values(codec, codec.key.columns, key))] if key else list(_keys(codec))
        stamp = table.delete_many(keys)
        write_told(opened, {"timestamp": stamp, "keys": len(keys)}, as_json=as_json)


def delete_range(
    store: AddressArgument,
    name: NameArgument,
    prefix: PrefixOption = None,
    start: FirstOption = None,
    end: BehindOption = None,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the rows of a span by one commit, and print the timestamp. Their history stays.

    \b
    Examples:
      kvstore table delete-range city.db trips --prefix A
      kvstore table delete-range city.db trips --start '["A", 7]' --end '["A", 9]'
    """
    with open_for_rows(store) as opened:
        table = opened.table(name)
        span = _span(table.codec(), prefix, start, end, everything=everything)
        stamp = table.delete_range(**span)
        write_told(opened, {"timestamp": stamp}, as_json=as_json)


def revert(
    store: AddressArgument,
    name: NameArgument,
    to: Annotated[str, typer.Option(metavar="TIME", help="Restore the rows of this time.")],
    prefix: PrefixOption = None,
    start: FirstOption = None,
    end: BehindOption = None,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give rows the values that they had at a time, by one commit, and print the timestamp.

    Nothing is printed if no row differs. History keeps the undone versions.

    \b
    Examples:
      kvstore table revert city.db trips --all --to '1 hour ago'
      kvstore table revert city.db trips --prefix A --to yesterday
    """
    with open_for_rows(store) as opened:
        table = opened.table(name)
        stamp = table.revert(to, **_span(table.codec(), prefix, start, end, everything=everything))
        write_told(opened, {"timestamp": stamp}, as_json=as_json)


def clear(
    store: AddressArgument,
    name: NameArgument,
    prefix: PrefixOption = None,
    start: FirstOption = None,
    end: BehindOption = None,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Destroy rows of a table with their entries and their history, and print the timestamp.

    Nothing brings the rows back, but backups that were made before. The table stays. Refused while
    a hold or an open reader needs the history.

    \b
    Examples:
      kvstore table clear city.db trips --prefix A
      kvstore table clear city.db trips --start '["A", 7]' --end B
      kvstore table clear city.db trips --all
    """
    with open_for_rows(store) as opened:
        table = opened.table(name)
        stamp = table.clear(**_span(table.codec(), prefix, start, end, everything=everything))
        write_told(opened, {"timestamp": stamp}, as_json=as_json)


def write_told(opened: StoreOrClient, fields: dict[str, Any], *, as_json: bool) -> None:
    """Print the time of a write, which is durable then: the owner of a store may have a durability
    of its own."""
    stamp = fields["timestamp"]
    if stamp is not None and not isinstance(opened, Store):
        opened.sync()
    shown = None if stamp is None else iso(stamp)
    if as_json:
        print_json({**fields, "timestamp": shown})
    elif shown is not None:
        print_line(shown)


# --------------------------------------------------------------------------------------------------
# Keys and rows that come as words, or by stdin.


def _span(
    codec: TableCodec,
    prefix: str | None,
    start: str | None,
    end: str | None,
    *,
    everything: bool,
) -> dict[str, Any]:
    """The span of rows that options name, as arguments of a table. A forgotten option must not
    change the whole table."""
    bounds = {"prefix": prefix, "start": start, "end": end}
    given = {name: word for name, word in bounds.items() if word is not None}
    if bool(given) == everything:
        raise UsageError(
            "rows are named by a span, or by --all", "pass --prefix, --start and --end, or --all"
        )
    if everything:
        return {"prefix": ()}
    return {name: _bound(codec, word, f"--{name}") for name, word in given.items()}


def _bound(codec: TableCodec, word: str, option: str) -> tuple[Any, ...]:
    if word[:1] != "[":
        return tuple(to_values(codec, codec.key.columns, [word]))
    text = io.BytesIO(word.encode("utf-8", "surrogateescape"))
    [(_, values)] = json_values(text, option)
    return _key(codec.key.columns, values, option)


def _keys(codec: TableCodec) -> Iterator[tuple[Any, ...]]:
    """The keys of stdin."""
    columns, keys = codec.key.columns, 0
    for place, given in json_values(_stdin(), "stdin"):
        keys += 1
        found = _key(columns, given, place)
        if len(found) < len(columns):
            names = ", ".join(column.name for column in columns)
            raise UsageError(f"{place}: {len(found)} values", f"a key has {names}")
        yield found
    if not keys:
        raise UsageError("no key came by stdin", "pass the values of the key, or pipe JSON lines")


def _key(columns: Sequence[Column], given: Any, where: str) -> tuple[Any, ...]:
    """The values of the first columns of a key: of a list, of an object, or one alone."""
    if isinstance(given, dict) and list(given) != ["base64"]:
        if set(given) != {column.name for column in columns}:
            names = ", ".join(column.name for column in columns)
            raise UsageError(f"{where}: {', '.join(given)} is no key", f"a key has {names}")
        given = [given[column.name] for column in columns]
    values = given if isinstance(given, list) else [given]
    if len(values) > len(columns):
        names = ", ".join(column.name for column in columns)
        raise UsageError(f"{where}: {len(values)} values", f"a key has {names}")
    return tuple(
        read_value(column.type, value, f"{where}: column {column.name!r}")
        for column, value in zip(columns, values, strict=False)
    )


def _objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of stdin, with their places."""
    size = 0
    for place, length, fields in json_objects(_stdin(), "stdin"):
        size += length
        if size > SERVER_BODY_BYTES_MAX:
            raise UsageError(
                f"stdin has more than {SERVER_BODY_BYTES_MAX >> 20} MiB, too much for one commit",
                "load them: kvstore table import STORE TABLE - --format jsonl",
            )
        yield place, fields


def _stdin() -> Any:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("nothing comes by stdin", "pass the values, or pipe JSON lines")
    return sys.stdin.buffer
