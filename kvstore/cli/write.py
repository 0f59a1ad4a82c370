"""Commands that write: put, delete, delete-range, trim, revert.

A process that has the store open does it for them; by a URL, the server of the store."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.cli.options import (
    AddressArgument,
    Encoding,
    EncodingOption,
    Encodings,
    EndOption,
    JsonOption,
    KeyEncodingOption,
    PrefixOption,
    StartOption,
    ValueEncodingOption,
    names_of,
    open_for_rows,
    open_or_create_for_rows,
    to_bytes,
    to_span,
)
from kvstore.cli.output import print_json, print_line
from kvstore.cli.read_commands import KeyArgument
from kvstore.cli.records import import_ids, to_import_id
from kvstore.cli.times import iso
from kvstore.errors import UsageError


def put(
    store: AddressArgument,
    key: KeyArgument,
    value: Annotated[
        str | None,
        typer.Argument(metavar="[VALUE]", help="The value. Default: the bytes of stdin."),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the store if it does not exist.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="The engine for --create: rocksdb, or memory with a journal.")
    ] = "rocksdb",
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Delete the key at this time: +1h, 2026-11-22, or ISO-8601 with a zone. Default: "
            "the key stays.",
            show_default=False,
        ),
    ] = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_encoding: KeyEncodingOption = None,
    value_encoding: ValueEncodingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set a key and print the timestamp. Durable when the command returns.

    \b
    Examples:
      kvstore put flights.db AA1 'on time' --create
      kvstore put flights.db 00ff 6f6e -e hex
      kvstore put flights.db AA1 b24= --value-encoding base64
      kvstore put flights.db session/7 ada --expires +1h
      kvstore put photos.db cat.jpg < cat.jpg
    """
    if value is None and sys.stdin is None:
        raise UsageError("no value was given, and stdin is closed", "pass VALUE, or open stdin")
    notation = Encodings.of(encoding, key_encoding, value_encoding)
    raw = sys.stdin.buffer.read() if value is None else to_bytes(value, notation.value)
    with open_or_create_for_rows(store, engine, create=create) as opened:
        name = to_bytes(key, notation.key)
        _told(opened.put(name, raw, durability="sync", expires=expires), as_json)


def delete(
    store: AddressArgument,
    key: KeyArgument,
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Delete a key, which may be absent, and print the timestamp. The history of the key stays.

    \b
    Examples:
      kvstore delete flights.db AA1
    """
    with open_for_rows(store) as opened:
        _told(opened.delete(to_bytes(key, encoding), durability="sync"), as_json)


def delete_range(
    store: AddressArgument,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Delete all keys of a span by one write, and print the timestamp. Their history stays.

    Nothing is written, and nothing printed, if no key of the span is alive.

    \b
    Examples:
      kvstore delete-range flights.db --prefix AA
      kvstore delete-range flights.db --start AA --end AB
    """
    span = _named(to_span(encoding, start=start, end=end, prefix=prefix)).plain()
    assert span.end is not None
    with open_for_rows(store) as opened:
        deleted = opened.delete_range(span.start, span.end, idempotent=True, durability="sync")
    _told(deleted, as_json)


def trim(
    store: AddressArgument,
    prefixes: Annotated[
        list[str], typer.Option("--prefix", help="Keys that begin with this. Repeatable.")
    ],
    keep: Annotated[int, typer.Option(metavar="N", help="The keys that stay, of each prefix.")],
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Delete all but the last N keys of each prefix by one commit, and print the timestamp.

    Where keys end in a time, the last ones are the newest. Nothing is written, and nothing printed,
    if no prefix has more. History stays.

    \b
    Examples:
      kvstore trim runs.db --prefix run/7/ --prefix run/8/ --keep 100
    """
    with open_for_rows(store) as opened:
        named = [to_bytes(prefix, encoding) for prefix in prefixes]
        _told(opened.trim(named, keep, durability="sync"), as_json)


def revert(
    store: AddressArgument,
    import_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[IMPORT]",
            help="The 16 hex digits that `kvstore import` printed, or a job's decimal id.",
            show_default=False,
            autocompletion=names_of(import_ids),
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Restore the state of a span at this time."),
    ] = None,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Undo an import from now on, or the changes of a span since a time. The history stays.

    Prints the timestamp. An import of any size is undone by one record; a repeated command prints
    the first timestamp. A span gets new versions of the keys that differ; nothing is printed if no
    key does.

    \b
    Examples:
      kvstore revert flights.db 5e0c1d2f3a4b5c6d
      kvstore revert flights.db --prefix AA --to '1 hour ago'
    """
    if (import_id is None) == (to is None):
        raise UsageError("revert takes an import, or --to with a span", "pass one of the two")
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    if import_id is not None:
        if (prefix, start, end) != (None, None, None):
            raise UsageError("an import is reverted as a whole", "pass no span with it")
        number = to_import_id(import_id)
        with open_for_rows(store) as opened:
            _told(opened.revert_import(number), as_json)
        return
    _named(span)
    assert to is not None, "one of the two was given"
    with open_for_rows(store) as opened:
        _told(opened.revert_range(span.start, span.end, to), as_json)


def _named(span: Span) -> Span:
    """The span, if options bound it. A forgotten option must not change the whole store."""
    if span == Span():
        raise UsageError("no span was named", "pass --prefix, or --start and --end")
    return span


def _told(timestamp: Timestamp | None, as_json: bool) -> None:
    shown = None if timestamp is None else iso(timestamp)
    if as_json:
        print_json({"timestamp": shown})
    elif shown is not None:
        print_line(shown)
