"""Commands that write: put, delete, revert. A process that has the store open does it for them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvstore.cli.options import (
    Encoding,
    EncodingOption,
    JsonOption,
    StoreArgument,
    iso,
    open_or_create,
    open_to_write,
    to_bytes,
)
from kvstore.cli.output import print_json, print_line
from kvstore.cli.read import KeyArgument
from kvstore.errors import UsageError
from kvstore.timestamp import Timestamp


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (put, delete, revert):
        app.command()(command)


def put(
    store: StoreArgument,
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
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Set a key and print the timestamp. Durable when the command returns.

    \b
    Examples:
      kvstore put flights.db AA1 'on time' --create
      kvstore put flights.db 00ff 6f6e -e hex
      kvstore put photos.db cat.jpg < cat.jpg
    """
    if value is None and sys.stdin is None:
        raise UsageError("no value was given, and stdin is closed", "pass one of the two")
    raw = sys.stdin.buffer.read() if value is None else to_bytes(value, encoding)
    with open_or_create(store, engine, create=create) as opened:
        _told(opened.put(to_bytes(key, encoding), raw, durability="sync"), as_json)


def delete(
    store: StoreArgument,
    key: KeyArgument,
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Delete a key, which may be absent, and print the timestamp. The history of the key stays.

    \b
    Examples:
      kvstore delete flights.db AA1
    """
    with open_to_write(store) as opened:
        _told(opened.delete(to_bytes(key, encoding), durability="sync"), as_json)


def revert(
    store: StoreArgument,
    import_id: Annotated[
        str,
        typer.Argument(
            metavar="IMPORT", help="The id that `kvstore import` printed.", show_default=False
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Undo an import from now on, and print the timestamp. Its history stays.

    One record for an import of any size. A repeated command prints the first timestamp.

    \b
    Examples:
      kvstore revert flights.db 5e0c1d2f3a4b5c6d
    """
    try:
        number = int(import_id, 16)
    except ValueError as error:
        raise UsageError(f"{import_id!r} is no id of an import", "pass its hex digits") from error
    with open_to_write(store) as opened:
        _told(opened.revert_import(number), as_json)


def _told(timestamp: Timestamp, as_json: bool) -> None:
    if as_json:
        print_json({"timestamp": iso(timestamp)})
    else:
        print_line(iso(timestamp))
