"""`kvstore backup`: get, scan, history, diff, find. They read a collection and restore nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from backup.cli.options import CollectionArgument, InstantOption, KeyFileOption, open_existing
from backup.reading.reader import CollectionReader
from kvstore.changes import Change
from kvstore.cli.exits import NOT_FOUND
from kvstore.cli.options import (
    Encoding,
    EncodingOption,
    EndOption,
    JsonOption,
    PrefixOption,
    StartOption,
    iso,
    to_bytes,
    to_json,
    to_span,
    to_text,
)
from kvstore.cli.output import note, print_json, print_line, print_raw
from kvstore.timestamp import Timestamp

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="A key.", show_default=False)]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIRECTORY",
        help="Keep the fetched bytes here, for the next call and for other processes.",
        show_default=False,
    ),
]
LimitOption = Annotated[
    int | None, typer.Option(min=0, help="Print this many at most.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (get, scan, history, diff, find):
        app.command()(command)


def get(
    collection: CollectionArgument,
    key: KeyArgument,
    as_of: InstantOption = None,
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
    no_newline: Annotated[
        bool, typer.Option("--no-newline", "-n", help="Print the value's bytes and nothing else.")
    ] = False,
) -> None:
    """Print the value of a key, straight from the backups. Exits with 1 if the key is absent.

    \b
    Examples:
      kvstore backup get /backups/flights AA1
      kvstore backup get s3://bucket/flights AA1 --as-of 2013-01-31T23:59:59Z
    """
    raw = to_bytes(key, encoding)
    with _reader(collection, key_file, cache) as reader:
        value = reader.get(raw, as_of)
    if value is None:
        note(f"no key {key!r} in {collection}" + (f" as of {as_of}" if as_of else ""))
        raise typer.Exit(NOT_FOUND)
    if as_json:
        print_json({"key": to_json(raw, encoding), "value": to_json(value, encoding)})
    elif encoding is Encoding.TEXT:
        print_raw(value, newline=not no_newline)
    else:
        print_raw(to_text(value, encoding).encode(), newline=not no_newline)


def scan(
    collection: CollectionArgument,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    as_of: InstantOption = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="In descending order.")] = False,
    limit: LimitOption = None,
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print keys and values in key order, straight from the backups, a tab between them.

    \b
    Examples:
      kvstore backup scan /backups/flights --prefix AA
      kvstore backup scan /backups/flights --as-of 2013-06-01T00:00Z --json
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    with _reader(collection, key_file, cache) as reader:
        rows = reader.scan(span.start, span.end, as_of=as_of, reverse=reverse, limit=limit)
        for key, value in rows:
            if as_json:
                print_json({"key": to_json(key, encoding), "value": to_json(value, encoding)})
            else:
                print_line(f"{to_text(key, encoding)}\t{to_text(value, encoding)}")


def history(
    collection: CollectionArgument,
    key: KeyArgument,
    limit: LimitOption = None,
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the versions of a key in the newest chain, newest first. Exits with 1 if there is none.

    `find` tells the changes of older chains too.

    \b
    Examples:
      kvstore backup history /backups/flights AA1
    """
    with _reader(collection, key_file, cache) as reader:
        versions = list(islice(reader.history(to_bytes(key, encoding)), limit))
    for version in versions:
        if as_json:
            fields = {"timestamp": iso(version.timestamp), "deleted": version.value is None}
            print_json({**fields, "value": to_json(version.value, encoding)})
        else:
            value = "(deleted)" if version.value is None else to_text(version.value, encoding)
            print_line(f"{iso(version.timestamp)}\t{value}")
    if not versions and limit != 0:
        note(f"no key {key!r} in {collection}")
        raise typer.Exit(NOT_FOUND)


def diff(
    collection: CollectionArgument,
    since: Annotated[
        str, typer.Argument(metavar="TIME", help="The earlier time.", show_default=False)
    ],
    upto: Annotated[
        str | None,
        typer.Argument(metavar="[TIME]", help="The later time; else the newest instant."),
    ] = None,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the last change of each key that changed between two times, in key order.

    \b
    Examples:
      kvstore backup diff /backups/flights 2013-06-01T00:00Z 2013-06-02T00:00Z
      kvstore backup diff /backups/flights 2013-06-01T00:00Z --prefix AA --json
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    with _reader(collection, key_file, cache) as reader:
        found = reader.changes(since, upto, span.start, span.end, "latest")
        _print_changes(found, encoding, as_json=as_json, values=True)


def find(
    collection: CollectionArgument,
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="A key, or its beginning.", show_default=False)
    ],
    cache: CacheOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the instants at which keys that begin with PREFIX changed, oldest first.

    Before an instant the key was as the instant before it left it: `get --as-of` tells the value.

    \b
    Examples:
      kvstore backup find /backups/flights AA1
    """
    span = to_span(encoding, start=None, end=None, prefix=prefix)
    with _reader(collection, key_file, cache) as reader:
        for low, high in _windows(reader):
            found = reader.changes(low, high, span.start, span.end, order="time")
            _print_changes(found, encoding, as_json=as_json, values=False)


def _windows(reader: CollectionReader) -> Iterator[tuple[Timestamp, Timestamp]]:
    """The windows whose changes the chains have, oldest first. A newer chain has the window from
    its `since` on."""
    chains = reader.held()
    for at, chain in enumerate(chains):
        high = min([chain.upper - 1, *(newer.since for newer in chains[at + 1 :])])
        if high > chain.since:
            yield Timestamp(chain.since), Timestamp(high)


def _reader(
    collection: str, key_file: Path | None, cache: Path | None
) -> AbstractContextManager[CollectionReader]:
    return open_existing(collection, key_file).open(cache=cache)


def _print_changes(
    changes: Iterable[Change], encoding: Encoding, *, as_json: bool, values: bool
) -> None:
    for change in changes:
        fields = {
            "timestamp": iso(change.timestamp),
            "op": change.op,
            "key": to_json(change.key, encoding),
            "end_key": to_json(change.end_key, encoding),
        }
        if as_json:
            value = {"value": to_json(change.value, encoding)} if values else {}
            print_json({**fields, **value})
            continue
        texts = [iso(change.timestamp), change.op, to_text(change.key, encoding)]
        if change.end_key is not None:
            texts.append(to_text(change.end_key, encoding))
        if values and change.value is not None:
            texts.append(to_text(change.value, encoding))
        print_line("\t".join(texts))
