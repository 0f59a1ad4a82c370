"""Commands that tell changes (`changes`, `follow`, `diff`), and the group `feeds`.

They open the store to read and change nothing, so they run beside the service that has it open.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from kvstore.base.arguments import word
from kvstore.base.span import Span
from kvstore.base.timestamp import NS_PER_SECOND, TimeLike, Timestamp, is_oldest
from kvstore.changes.events import Images
from kvstore.cli.options import (
    LISTED_MAX,
    Encoding,
    EncodingOption,
    Encodings,
    EndOption,
    JsonOption,
    KeyEncodingOption,
    LimitOption,
    ListLimitOption,
    PrefixOption,
    StartOption,
    StoreArgument,
    ValueEncodingOption,
    names_of,
    reach,
    to_json,
    to_span,
    to_text,
)
from kvstore.cli.output import note, print_json, print_line, print_lines, print_list
from kvstore.cli.times import in_words, iso
from kvstore.errors import UsageError
from kvstore.feeds import changes_json_lines
from kvstore.feeds.lines import json_line, restored_json_lines
from kvstore.opening import engine_at, open_read_only
from kvstore.remote import live
from kvstore.store import Store
from kvstore.timeline.holds import FEED, HoldRecord

IMAGES: Final[tuple[Images, ...]] = ("none", "delta", "pre", "post", "pre+post")

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
        "--poll",
        metavar="SECONDS",
        min=0.01,
        help="Seconds between two looks at the files, while following.",
    ),
]
LinesOption = Annotated[bool, typer.Option("--json", help="No effect: lines are JSON.")]

_KEYS_AT_ONCE: Final = 1000


def changes(
    store: StoreArgument,
    since: SinceOption = None,
    upto: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Changes at or before this time. Default: all.", show_default=False
        ),
    ] = None,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    images: ImagesOption = "delta",
    limit: LimitOption = None,
    follow: FollowOption = False,
    max_staleness: PollOption = 1.0,
    encoding: EncodingOption = Encoding.TEXT,
    _as_json: LinesOption = True,
) -> None:
    """Print changes as JSON lines in time order. --encoding applies to the bounds.

    Changes that a restore brought back have no changeset and no stream.

    With --follow the command continues with the changes that a service writes, until it is
    interrupted. It looks at the store's files every --poll seconds, and reads the new changes.
    Garbage collection does not know of this reader, so history must be kept for long enough. (In
    the service's own process, Feeds.follow waits for commits and polls nothing.)

    \b
    Examples:
      kvstore changes flights.db --since 2013-06-01T00:00Z
      kvstore changes flights.db --since yesterday --upto today
      kvstore changes flights.db --prefix AA --images pre+post
      kvstore changes flights.db --since 2013-06-01T00:00Z --follow | jq .key
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    wanted = word(*IMAGES).check("images", images)
    if follow:
        if upto is not None or limit is not None:
            raise UsageError("--follow has no end", "pass no --upto and no --limit with it")
        print_following(store, since, span, wanted, max_staleness)
        return
    with open_read_only(store) as opened:
        after = opened.whole_since if since is None else since
        assert after is not None
        until = None if upto is None else opened.to_time(upto, name="upto")
        print_lines(lines_after(opened, after, span, wanted, upto=until), limit)


def follow(
    store: StoreArgument,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Changes after this time. Default: now.", show_default=False
        ),
    ] = None,
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    images: ImagesOption = "delta",
    max_staleness: PollOption = 1.0,
    encoding: EncodingOption = Encoding.TEXT,
    _as_json: LinesOption = True,
) -> None:
    """Print each change as a service commits it, as JSON lines, until interrupted.

    The same as `kvstore changes --follow`, which begins with the past.

    \b
    Examples:
      kvstore follow flights.db
      kvstore follow flights.db --prefix AA --since '10 minutes ago'
    """
    span = to_span(encoding, start=start, end=end, prefix=prefix)
    print_following(
        store,
        "now" if since is None else since,
        span,
        word(*IMAGES).check("images", images),
        max_staleness,
    )


def diff(
    store: StoreArgument,
    since: Annotated[
        str, typer.Argument(metavar="TIME1", help="The earlier time.", show_default=False)
    ],
    upto: Annotated[str, typer.Argument(metavar="[TIME2]", help="The later time.")] = "now",
    prefix: PrefixOption = None,
    start: StartOption = None,
    end: EndOption = None,
    limit: LimitOption = None,
    keys_only: Annotated[bool, typer.Option("--keys-only", help="Print no values.")] = False,
    encoding: EncodingOption = Encoding.TEXT,
    key_encoding: KeyEncodingOption = None,
    value_encoding: ValueEncodingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the keys whose values differ between two times, in key order.

    A line begins with + for a key that is new, - for one that is gone, ~ for one that has another
    value. Costs what changed between the two times.

    \b
    Examples:
      kvstore diff flights.db yesterday today
      kvstore diff flights.db '1 hour ago' --prefix AA --json
    """
    notation = Encodings.of(encoding, key_encoding, value_encoding)
    span = to_span(notation.key, start=start, end=end, prefix=prefix)
    with open_read_only(store) as opened:
        before, after = (
            opened.to_time(each, name=name) for each, name in ((since, "TIME1"), (upto, "TIME2"))
        )
        if before > after:
            raise UsageError(f"{since} is later than {upto}", "pass the earlier time first")
        for key, old, new in islice(_differences(opened, before, after, span), limit):
            _print_difference(key, old, new, notation, keys_only=keys_only, as_json=as_json)


def _print_difference(
    key: bytes,
    old: bytes | None,
    new: bytes | None,
    notation: Encodings,
    *,
    keys_only: bool,
    as_json: bool,
) -> None:
    if as_json:
        fields = {"key": to_json(key, notation.key)}
        if not keys_only:
            fields["old"] = to_json(old, notation.value)
            fields["new"] = to_json(new, notation.value)
        print_json(fields)
        return
    sign = "+" if old is None else "-" if new is None else "~"
    values = [] if keys_only else [each for each in (old, new) if each is not None]
    shown = [to_text(key, notation.key), *(to_text(each, notation.value) for each in values)]
    print_line(f"{sign} " + "\t".join(shown))


def _differences(
    opened: Store, before: Timestamp, after: Timestamp, span: Span
) -> Iterator[tuple[bytes, bytes | None, bytes | None]]:
    """The keys whose values at the two times differ, with both values."""
    keys = _changed_keys(opened, before, after, span)
    while some := list(islice(keys, _KEYS_AT_ONCE)):
        old, new = opened.get_many(some, before), opened.get_many(some, after)
        for key, was, is_now in zip(some, old, new, strict=True):
            if was != is_now:
                yield key, was, is_now


def _changed_keys(
    opened: Store, before: Timestamp, after: Timestamp, span: Span
) -> Iterator[bytes]:
    """The keys that were written, and the keys that range deletes cover, each once and in order."""
    found = opened.changes(before, after, span.start, span.end, revisions="latest")
    covered: Iterator[bytes] = iter(())
    waiting: bytes | None = None
    """The next of the keys that the range deletes so far cover."""
    beyond = b""
    """The end of these range deletes."""
    for change in found:
        while waiting is not None and waiting < change.key:
            yield waiting
            waiting = next(covered, None)
        if change.op != "delete_range":
            if waiting == change.key:
                waiting = next(covered, None)
            yield change.key
            continue
        assert change.end_key is not None
        first = max(change.key, beyond)
        if first < change.end_key:
            more = (key for key, _ in opened.scan(first, change.end_key, as_of=before))
            covered = more if waiting is None else chain([waiting], covered, more)
            waiting, beyond = next(covered, None), change.end_key
    while waiting is not None:
        yield waiting
        waiting = next(covered, None)


def print_following(
    store: Path, position: TimeLike | None, span: Span, images: Images, poll: float
) -> None:
    """Print the changes of a store as its writer makes them. An interrupt ends it."""
    if engine_at(store) != "rocksdb":
        _follow_journal(store, position, span, images, poll)
    with live.follow(store, max_staleness=poll) as reader:
        after = reader.whole_since if position is None else position
        while True:
            upper = reader.upper
            print_lines(lines_after(reader, after, span, images, upto=upper - 1))
            sys.stdout.flush()
            after = upper - 1
            reader.wait_beyond(upper)


def _follow_journal(
    store: Path, position: TimeLike | None, span: Span, images: Images, poll: float
) -> NoReturn:
    """As `print_following`, for a store in memory: its journal is read again when it changes."""
    while True:
        seen = files_at(store)
        with open_read_only(store) as opened:
            after = opened.whole_since if position is None else position
            print_lines(lines_after(opened, after, span, images))
            position = max(opened.upper - 1, 0)
        sys.stdout.flush()
        time.sleep(poll)
        while files_at(store) == seen:
            time.sleep(poll)


def lines_after(
    opened: Store, after: TimeLike, span: Span, images: Images, *, upto: int | None = None
) -> Iterator[str]:
    """Restored changes come from the versions, all others from the change index."""
    indexed = opened.indexed_since
    begun = opened.whole_since if is_oldest(after) else opened.to_time(after, name="since")
    if begun < indexed and images in ("none", "delta"):
        until = min(indexed, opened.upper - 1 if upto is None else upto)
        restored = opened.changes(begun, until, span.start, span.end, order="time")
        yield from restored_json_lines(restored, images)
        begun = indexed
        if upto is not None and upto <= indexed:
            return
    if upto is None:
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


# --------------------------------------------------------------------------------------------------
# The command group `kvstore feeds`: list, drop, tail.

feeds_app = typer.Typer(
    help="List the feeds of a store, print changes that a feed has not acknowledged, or drop one.",
    no_args_is_help=True,
    add_completion=False,
)


def _names(store: Store) -> Iterator[str]:
    return (name for name, _ in _feeds(store))


FeedArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The feed's name.", show_default=False, autocompletion=names_of(_names)
    ),
]


@feeds_app.command(name="list")
def list_feeds(
    store: StoreArgument, limit: ListLimitOption = LISTED_MAX, as_json: JsonOption = False
) -> None:
    """List the feeds of a store: workers, position, owner, and how far each is behind.

    \b
    Examples:
      kvstore feeds list flights.db
      kvstore feeds list flights.db --json | jq 'select(.lag_seconds > 3600)'
    """
    with open_read_only(store) as opened:
        found = [_fields(opened, name, workers) for name, workers in _feeds(opened)]
    columns = ["name", "workers", "position", "lag", "owner", "lost"]
    print_list(found, columns, limit, as_json=as_json)


@feeds_app.command(name="drop")
def drop_feed(store: StoreArgument, name: FeedArgument, as_json: JsonOption = False) -> None:
    """Drop a feed whose consumer is gone for good: its position, and its claim on history.

    \b
    Examples:
      kvstore feeds drop flights.db audit
    """
    with open_read_only(store) as opened:
        workers = _feed(opened, name)
        fields = _fields(opened, name, workers)
    with reach(store) as owned:
        for record in workers:
            dropped = owned.drop_hold(record.name)
    if as_json:
        print_json(fields)
    note(f"dropped; {dropped.cost_of_dropping}")


@feeds_app.command()
def tail(
    store: StoreArgument,
    name: FeedArgument,
    images: ImagesOption = "delta",
    limit: LimitOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with later changes.")
    ] = False,
    max_staleness: PollOption = 1.0,
    _as_json: LinesOption = True,
) -> None:
    """Print the changes that a feed has not acknowledged, as JSON lines. The feed does not move.

    Changes of all keys are printed, and of all streams, from the position of the slowest worker.

    \b
    Examples:
      kvstore feeds tail flights.db audit
      kvstore feeds tail flights.db audit --follow | jq .key
    """
    wanted = word(*IMAGES).check("images", images)
    if follow and limit is not None:
        raise UsageError("--follow has no end", "pass no --limit with it")
    with open_read_only(store) as opened:
        position = min(record.timestamp for record in _feed(opened, name))
        if not follow:
            print_lines(lines_after(opened, position, Span(), wanted), limit)
            return
    print_following(store, position, Span(), wanted, max_staleness)


def _feeds(store: Store) -> list[tuple[str, list[HoldRecord]]]:
    """All feeds by name, each with the holds of its workers."""
    by_name = attrgetter("address")
    holds = sorted((each for each in store.holds.all() if each.kind == FEED), key=by_name)
    return [(name, list(workers)) for name, workers in groupby(holds, by_name)]


def _feed(store: Store, name: str) -> list[HoldRecord]:
    found = dict(_feeds(store)).get(name)
    if found is None:
        raise UsageError(f"no feed {name!r}", "`kvstore feeds list` names all feeds")
    return found


def _fields(store: Store, name: str, workers: Sequence[HoldRecord]) -> dict[str, object]:
    slowest = min(workers, key=attrgetter("timestamp"))
    begin = max(int(slowest.timestamp), int(store.browsing.oldest()))  # no change lies below
    lag_ns = max(store.upper - 1 - begin, 0)
    return {
        "name": name,
        "workers": len(workers),
        "position": iso(slowest.timestamp),
        "lag": in_words(lag_ns),
        "lag_seconds": lag_ns / NS_PER_SECOND,
        "owner": slowest.owner,
        "lost": any(each.lost for each in workers),
    }
