"""The command group `kvstore feeds`: list, drop, tail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Annotated

import typer

from kvstore.claims import FEED, HoldRecord
from kvstore.cli.changes import (
    IMAGES,
    ImagesOption,
    LinesOption,
    PollOption,
    lines_after,
    print_following,
)
from kvstore.cli.completion import names_of
from kvstore.cli.options import (
    LISTED_MAX,
    JsonOption,
    LimitOption,
    ListLimitOption,
    StoreArgument,
    iso,
    one_of,
)
from kvstore.cli.output import note, print_json, print_lines, print_list
from kvstore.cli.stores import open_to_write
from kvstore.cli.times import in_words
from kvstore.errors import UsageError
from kvstore.opening import open_read_only
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import NS_PER_SECOND

app = typer.Typer(
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


@app.command(name="list")
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


@app.command(name="drop")
def drop_feed(store: StoreArgument, name: FeedArgument, as_json: JsonOption = False) -> None:
    """Drop a feed whose consumer is gone for good: its position, and its claim on history.

    \b
    Examples:
      kvstore feeds drop flights.db audit
    """
    with open_to_write(store) as opened:
        workers = _feed(opened, name)
        fields = _fields(opened, name, workers)
        for record in workers:
            dropped = opened.drop_hold(record.name)
    if as_json:
        print_json(fields)
    note(f"dropped; {dropped.cost_of_dropping}")


@app.command()
def tail(
    store: StoreArgument,
    name: FeedArgument,
    images: ImagesOption = "delta",
    limit: LimitOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with later changes.")
    ] = False,
    poll: PollOption = 1.0,
    _as_json: LinesOption = True,
) -> None:
    """Print the changes that a feed has not acknowledged, as JSON lines. The feed does not move.

    Changes of all keys are printed, and of all streams, from the position of the slowest worker.

    \b
    Examples:
      kvstore feeds tail flights.db audit
      kvstore feeds tail flights.db audit --follow | jq .key
    """
    wanted = one_of("--images", images, IMAGES)
    if follow and limit is not None:
        raise UsageError("--follow has no end", "pass no --limit with it")
    with open_read_only(store) as opened:
        position = min(record.timestamp for record in _feed(opened, name))
        if not follow:
            print_lines(lines_after(opened, position, Span(), wanted), limit)
            return
    print_following(store, position, Span(), wanted, poll)


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
