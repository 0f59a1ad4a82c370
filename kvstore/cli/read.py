"""Commands that read: get, scan, history, changes, stats.

They open the store to read and change nothing, so they run beside the service that has it open.
They show the state of the moment at which they began.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from kvstore import live
from kvstore.changes.event import Images
from kvstore.cli.exits import NOT_FOUND
from kvstore.cli.options import (
    AsOfOption,
    Encoding,
    EncodingOption,
    EndOption,
    JsonOption,
    PrefixOption,
    StartOption,
    StoreArgument,
    iso,
    one_of,
    to_bytes,
    to_json,
    to_span,
    to_text,
    to_time,
)
from kvstore.cli.output import note, print_figures, print_json, print_line, print_raw
from kvstore.feeds import changes_json_lines
from kvstore.feeds.lines import json_line, restored_json_lines
from kvstore.opening import engine_at, open_read_only
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import TimeLike, to_timestamp

IMAGES: Final[tuple[Images, ...]] = ("none", "delta", "pre", "post", "pre+post")

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key.", show_default=False)]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=0, help="Print at most this many.", show_default=False)
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Changes after this time. Default: all complete history.",
        show_default=False,
    ),
]
ImagesOption = Annotated[
    str, typer.Option(help="Values to print: none, delta, pre, post or pre+post.")
]
FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Continue with later changes, and poll for them.")
]
PollOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=0.01, help="With --follow: seconds between two looks at the files."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (get, scan, history, changes, stats):
        app.command()(command)


def get(
    store: StoreArgument,
    key: KeyArgument,
    as_of: AsOfOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
    no_newline: Annotated[
        bool, typer.Option("--no-newline", "-n", help="Print the value's bytes and nothing else.")
    ] = False,
) -> None:
    """Print the value of a key. Exits with 1 if the key is absent.

    \b
    Examples:
      kvstore get flights.db AA1
      kvstore get flights.db AA1 --as-of 2013-01-31T23:59:59Z
      kvstore get flights.db 00ff -e hex --json
      kvstore get photos.db cat.jpg -n > cat.jpg
    """
    with open_read_only(store) as opened:
        raw = to_bytes(key, encoding)
        value = opened.get(raw, to_time(as_of))
    if value is None:
        note(f"no key {key!r} in {store}" + (f" as of {as_of}" if as_of else ""))
        raise typer.Exit(NOT_FOUND)
    if as_json:
        print_json({"key": to_json(raw, encoding), "value": to_json(value, encoding)})
    elif encoding is Encoding.TEXT:
        print_raw(value, newline=not no_newline)
    else:
        print_raw(to_text(value, encoding).encode(), newline=not no_newline)


def scan(
    store: StoreArgument,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    as_of: AsOfOption = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="In descending order.")] = False,
    limit: LimitOption = None,
    keys_only: Annotated[bool, typer.Option("--keys-only", help="Print no values.")] = False,
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Print keys and values in key order, a tab between them.

    \b
    Examples:
      kvstore scan flights.db --prefix AA
      kvstore scan flights.db --start AA --end AB --limit 10
      kvstore scan flights.db --as-of 2013-06-01T00:00Z --json
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    with open_read_only(store) as opened:
        rows = opened.scan(span.start, span.end, as_of=to_time(as_of), reverse=reverse, limit=limit)
        for key, value in rows:
            if as_json:
                fields = {"key": to_json(key, encoding)}
                print_json(fields if keys_only else {**fields, "value": to_json(value, encoding)})
            elif keys_only:
                print_line(to_text(key, encoding))
            else:
                print_line(f"{to_text(key, encoding)}\t{to_text(value, encoding)}")


def history(
    store: StoreArgument,
    key: KeyArgument,
    limit: LimitOption = None,
    encoding: EncodingOption = Encoding.TEXT,
    as_json: JsonOption = False,
) -> None:
    """Print the versions of a key that are kept, newest first. Exits with 1 if there is none.

    \b
    Examples:
      kvstore history flights.db AA1
      kvstore history flights.db AA1 --limit 1 --json
    """
    with open_read_only(store) as opened:
        versions = list(islice(opened.history(to_bytes(key, encoding)), limit))
    for version in versions:
        if as_json:
            fields = {"timestamp": iso(version.timestamp), "deleted": version.value is None}
            print_json({**fields, "value": to_json(version.value, encoding)})
        else:
            value = "(deleted)" if version.value is None else to_text(version.value, encoding)
            print_line(f"{iso(version.timestamp)}\t{value}")
    if not versions and limit != 0:
        note(f"no key {key!r} in {store}")
        raise typer.Exit(NOT_FOUND)


def changes(
    store: StoreArgument,
    since: SinceOption = None,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    images: ImagesOption = "delta",
    follow: FollowOption = False,
    poll: PollOption = 1.0,
    encoding: EncodingOption = Encoding.TEXT,
    _as_json: Annotated[bool, typer.Option("--json", help="No effect: lines are JSON.")] = True,
) -> None:
    """Print changes as JSON lines in time order. --encoding applies to the bounds.

    Changes that a restore brought back have no changeset and no stream.

    With --follow it continues with the changes that a service writes, until it is interrupted. It
    looks at the store's files every --poll seconds, and reads the new changes. Garbage collection
    does not know of this reader, so history must be kept for long enough. (In the service's own
    process, Feeds.follow waits for commits and polls nothing.)

    \b
    Examples:
      kvstore changes flights.db --since 2013-06-01T00:00Z
      kvstore changes flights.db --prefix AA --images pre+post
      kvstore changes flights.db --since 2013-06-01T00:00Z --follow | jq .key
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    wanted = one_of("--images", images, IMAGES)
    position: TimeLike | None = to_time(since)
    if follow and engine_at(store) == "rocksdb":
        _follow(store, position, span, wanted, poll)
    while True:
        seen = files_at(store)
        with open_read_only(store) as opened:
            after = opened.whole_since if position is None else position
            for line in _changes_after(opened, after, span, wanted):
                print_line(line)
            position = max(opened.upper - 1, 0)
        if not follow:
            return
        typer.get_text_stream("stdout").flush()
        time.sleep(poll)
        while files_at(store) == seen:
            time.sleep(poll)


def _follow(
    store: Path, position: TimeLike | None, span: Span, images: Images, poll: float
) -> NoReturn:
    """Print the changes of a store as its writer makes them. An interrupt ends it."""
    with live.follow(store, max_staleness=poll) as reader:
        after = reader.whole_since if position is None else position
        while True:
            upper = reader.upper
            for line in _changes_after(reader, after, span, images, upto=upper - 1):
                print_line(line)
            typer.get_text_stream("stdout").flush()
            after = upper - 1
            reader.wait_beyond(upper)


def _changes_after(
    opened: Store, after: TimeLike, span: Span, images: Images, *, upto: int | None = None
) -> Iterator[str]:
    """Restored changes come from the versions, all others from the change index."""
    begun, indexed = to_timestamp(after, name="since", now=opened.now), opened.indexed_since
    if begun < indexed and images in ("none", "delta"):
        until = min(indexed, opened.upper - 1)
        restored = opened.changes(begun, until, span.start, span.end, order="time")
        yield from restored_json_lines(restored, images)
        begun = indexed
    if upto is None or begun > upto:
        yield from changes_json_lines(opened, begun, span=span, images=images)
    else:
        yield from map(json_line, opened.events(begun, upto, span=span, images=images))


def files_at(store: Path) -> set[tuple[str, int, int]]:
    """Names, sizes and times of a store's files, which change with every commit. 20 us.

    Polling was chosen over notifications (inotify), which need a package for each system, while a
    commit of another process is read from its files in any case.
    """
    found = set()
    with suppress(FileNotFoundError), os.scandir(store) as entries:
        for entry in entries:
            if not entry.name.startswith(("LOG", "rocksdict")):  # a reader rewrites these
                stat = entry.stat(follow_symlinks=False)
                found.add((entry.name, stat.st_size, stat.st_mtime_ns))
    return found


def stats(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Print frontiers, counts, sizes, and the claims that keep history.

    \b
    Examples:
      kvstore stats flights.db
      kvstore stats flights.db --json | jq .data_bytes
    """
    with open_read_only(store) as opened:
        figures = opened.stats()
    frontiers = {name: iso(figures[name]) for name in ("since", "upper", "durable")}
    shown = {**figures, **frontiers}
    held_by = shown["held_by"] if as_json else shown.pop("held_by")
    print_figures(shown, as_json=as_json)
    if not as_json:
        for claim in held_by:
            print_line(f"held by  {claim}")
