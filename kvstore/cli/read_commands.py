"""Commands that read: get, scan, count, history, stats.

They open the store to read and change nothing, so they run beside the service that has it open.
They show the state of the moment at which they began. By a URL they ask the server of the store.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from kvstore.base.paths import is_url
from kvstore.cli.main import NOT_FOUND
from kvstore.cli.options import (
    AddressArgument,
    AsOfOption,
    Encoding,
    EncodingOption,
    Encodings,
    EndOption,
    JsonOption,
    KeyEncodingOption,
    LimitOption,
    PrefixOption,
    StartOption,
    ValueEncodingOption,
    open_to_read,
    to_bytes,
    to_json,
    to_span,
    to_text,
)
from kvstore.cli.output import note, print_figures, print_json, print_line, print_raw
from kvstore.cli.times import iso
from kvstore.remote.presence import guests, read_owner, sharing

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key.", show_default=False)]


def get(
    store: AddressArgument,
    key: KeyArgument,
    as_of: AsOfOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_encoding: KeyEncodingOption = None,
    value_encoding: ValueEncodingOption = None,
    as_json: JsonOption = False,
    no_newline: Annotated[
        bool, typer.Option("--no-newline", "-n", help="Print the value's bytes and nothing else.")
    ] = False,
) -> None:
    """Print the value of a key. Exits with 1 if the key is absent.

    A terminal shows control characters and other bytes that are not text as escapes. A pipe gets
    the value as it is.

    \b
    Examples:
      kvstore get flights.db AA1
      kvstore get flights.db AA1 --as-of 2013-01-31T23:59:59Z
      kvstore get flights.db AA1 --as-of '1 hour ago'
      kvstore get flights.db 00ff -e hex --json
      kvstore get flights.db 00ff --key-encoding hex
      kvstore get photos.db cat.jpg -n > cat.jpg
    """
    notation = Encodings.of(encoding, key_encoding, value_encoding)
    raw = to_bytes(key, notation.key)
    with open_to_read(store) as opened:
        value = opened.get(raw, as_of)
    if value is None:
        note(f"no key {key!r} in {store}" + (f" as of {as_of}" if as_of else ""))
        raise typer.Exit(NOT_FOUND)
    if as_json:
        print_json({"key": to_json(raw, notation.key), "value": to_json(value, notation.value)})
    elif notation.value is not Encoding.TEXT:
        print_raw(to_text(value, notation.value).encode(), newline=not no_newline)
    elif no_newline or not sys.stdout.isatty():
        print_raw(value, newline=not no_newline)
    else:
        print_line(to_text(value, notation.value))


def scan(
    store: AddressArgument,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    as_of: AsOfOption = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="In descending order.")] = False,
    limit: LimitOption = None,
    keys_only: Annotated[bool, typer.Option("--keys-only", help="Print no values.")] = False,
    encoding: EncodingOption = Encoding.TEXT,
    key_encoding: KeyEncodingOption = None,
    value_encoding: ValueEncodingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print keys and values in key order, a tab between them.

    \b
    Examples:
      kvstore scan flights.db --prefix AA
      kvstore scan flights.db --start AA --end AB --limit 10
      kvstore scan flights.db --as-of 2013-06-01T00:00Z --json
    """
    notation = Encodings.of(encoding, key_encoding, value_encoding)
    span = to_span(notation.key, start=start, end=end, prefix=prefix)
    with open_to_read(store) as opened:
        rows = opened.scan(span.start, span.end, as_of=as_of, reverse=reverse, limit=limit)
        for key, value in rows:
            if as_json:
                fields = {"key": to_json(key, notation.key)}
                if not keys_only:
                    fields["value"] = to_json(value, notation.value)
                print_json(fields)
            elif keys_only:
                print_line(to_text(key, notation.key))
            else:
                print_line(f"{to_text(key, notation.key)}\t{to_text(value, notation.value)}")


def count(
    store: AddressArgument,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    as_of: AsOfOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Print the number of keys. Costs a pass over the keys of the span.

    \b
    Examples:
      kvstore count flights.db
      kvstore count flights.db --prefix AA --as-of yesterday
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    with open_to_read(store) as opened:
        found = opened.count(span.start, span.end, as_of=as_of)
    if as_json:
        print_json({"keys": found})
    else:
        print_line(str(found))


def history(
    store: AddressArgument,
    key: KeyArgument,
    limit: LimitOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_encoding: KeyEncodingOption = None,
    value_encoding: ValueEncodingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the kept versions of a key, newest first. Exits with 1 if there is none.

    \b
    Examples:
      kvstore history flights.db AA1
      kvstore history flights.db AA1 --limit 1 --json
    """
    notation = Encodings.of(encoding, key_encoding, value_encoding)
    with open_to_read(store) as opened:
        versions = list(islice(opened.history(to_bytes(key, notation.key)), limit))
    for version in versions:
        if as_json:
            fields = {"timestamp": iso(version.timestamp), "deleted": version.value is None}
            print_json({**fields, "value": to_json(version.value, notation.value)})
        else:
            value = "(deleted)" if version.value is None else to_text(version.value, notation.value)
            print_line(f"{iso(version.timestamp)}\t{value}")
    if not versions and limit != 0:
        note(f"no key {key!r} in {store}")
        raise typer.Exit(NOT_FOUND)


def stats(store: AddressArgument, as_json: JsonOption = False) -> None:
    """Print frontiers, counts, sizes, and the claims that keep history. Of a store that processes
    share: its owner, for how long it has owned the store, take-overs, and guests.

    \b
    Examples:
      kvstore stats flights.db
      kvstore stats flights.db --json | jq .data_bytes
    """
    with open_to_read(store) as opened:
        figures = opened.stats()
    if not is_url(store) and (read_owner(Path(store)) or guests(Path(store))):
        figures |= sharing(Path(store))
    frontiers = {name: iso(figures[name]) for name in ("since", "upper", "durable")}
    shown = {**figures, **frontiers}
    held_by = shown["held_by"] if as_json else shown.pop("held_by")
    print_figures(shown, as_json=as_json)
    if not as_json:
        for claim in held_by:
            print_line(f"held by  {claim}")
