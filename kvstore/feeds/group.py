"""Opening, sharing and dropping feeds, and the holds behind the name of a feed.

The holds of a feed are its only record. Workers that share a feed have a hold each. The first
worker takes the holds of all, so that history waits for the others. Opening a feed with another
number of workers takes it over: the old workers are fenced, and each new worker starts at the least
of their positions. Changes between the old positions are then delivered again, and none is left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

from kvstore.arguments import require_age, require_count, require_span
from kvstore.changes.event import Expand, Images, require_expand, require_images
from kvstore.changes.expand import Wanted
from kvstore.changesets import Changesets
from kvstore.claims import FEED, FEED_HOLDS, HoldRecord
from kvstore.errors import HoldLostError, UsageError
from kvstore.feeds.feed import Feed, FeedBatch, Position, Share, Tail
from kvstore.feeds.quiescent import QuiescentReader
from kvstore.feeds.state import StateReader
from kvstore.history import History
from kvstore.holds import Hold
from kvstore.limits import FEED_BATCH_BYTES, FEED_BATCH_ROWS
from kvstore.parts import Parts
from kvstore.span import Span, require_key
from kvstore.timestamp import NOW, NS_PER_SECOND, OLDEST, TimeLike, Timestamp, is_oldest

STATE: Final = "state"
STARTS: Final = (NOW, OLDEST, STATE)
"""The words that a feed can start at, apart from a time."""


class Feeds:
    """The feeds of one open store."""

    def __init__(self, parts: Parts, history: History, changesets: Changesets) -> None:
        self._index, self._committer = parts.index, parts.committer
        self._pins, self._holds, self._reads = parts.pins, parts.holds, parts.reads
        self._history = history
        self._events = history.event_reader
        self._changesets = changesets
        self._state = StateReader(parts.versions, parts.index.generations.at, history.dues)

    def open(
        self,
        name: str,
        start: TimeLike | Position | None = None,
        streams: tuple[int, int] | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
        *,
        span: Span | None = None,
        max_age: timedelta | None = None,
        batch_rows: int | None = None,
        batch_bytes: int | None = None,
    ) -> Feed:
        """See `Store.feed`."""
        share = Share.of(streams)
        wanted = Wanted(require_span(span), require_images(images), require_expand(expand))
        require_age(max_age, name="max_age")
        self._committer.health.require()
        require_name(name)
        self._require_share(share)
        if start == STATE:
            self._committer.sync()  # the state holds nothing that a crash can take back
        with self._committer.lock:
            position = self._start(name, start, share)
            self._reads.require_indexed(position.timestamp)
            self._reads.require_kept(wanted.span, position.timestamp)
            hold = self._take(name, share, position, max_age=max_age, reset=start is not None)
        return self._feed(name, share, hold, position, wanted, batch_rows, batch_bytes)

    def resume(
        self,
        name: str,
        token: str,
        position: Position,
        streams: tuple[int, int] | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
        *,
        span: Span | None = None,
        batch_rows: int | None = None,
        batch_bytes: int | None = None,
    ) -> Feed:
        """The feed of a consumer that has opened it before, at a position that it was delivered:
        for a consumer whose handle cannot live here. `token` is `Feed.token`.

        Raises `FencedError` if a newer consumer has the name. Nothing is written. A batch from a
        position below the last ack may lack history.
        """
        share = Share.of(streams)
        wanted = Wanted(require_span(span), require_images(images), require_expand(expand))
        hold = Hold(self._holds, hold_name(require_name(name), share), token)
        _ = hold.timestamp  # raises if it is not the caller's
        self._committer.readable(position.timestamp)
        return self._feed(name, share, hold, position, wanted, batch_rows, batch_bytes)

    def _feed(
        self,
        name: str,
        share: Share,
        hold: Hold,
        position: Position,
        wanted: Wanted,
        batch_rows: int | None,
        batch_bytes: int | None,
    ) -> Feed:
        rows_max = FEED_BATCH_ROWS if batch_rows is None else batch_rows
        bytes_max = FEED_BATCH_BYTES if batch_bytes is None else batch_bytes
        require_count(rows_max, name="batch_rows")
        require_count(bytes_max, name="batch_bytes")
        if share.workers > 1:
            wanted = replace(wanted, select=share.select)

        def tail(guard: Callable[[], None]) -> Tail:
            return Tail(
                self._events,
                self._committer,
                partial(self._history.plain, wanted),
                position,
                guard=guard,
                require_indexed=self._reads.require_indexed,
                state=self._state,
                rows_max=rows_max,
                bytes_max=bytes_max,
            )

        return Feed(name, share, hold, tail, is_live=self._committer.health.require)

    def follow(
        self,
        since: TimeLike,
        *,
        span: Span | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
        heartbeat: float | None = None,
    ) -> Iterator[FeedBatch]:
        """Batches of durable changes after `since`, and then as they come: a feed without a name.

        History is kept for it while it is being read. Raises as `Store.events`.
        """
        wanted, low, _ = self._history.wanted(since, None, span, images, expand)
        return self._followed(low, wanted, heartbeat)

    def drop(self, name: str) -> None:
        """Give up a feed: its position and its claim on history. Its consumers are fenced.

        Raises `UsageError` for an unknown feed.
        """
        self._committer.health.require()
        require_name(name)
        with self._committer.lock:
            known = self._known(name)
            if not known:
                raise UsageError(
                    f"no feed {name!r}", "`kvstore holds list` or store.holds.all() names all feeds"
                )
            self._holds.take_all({}, max_age=None, dropping=list(known))

    def quiescent_points(self, since: TimeLike = 0) -> QuiescentReader:
        """The times after `since` at which no changeset was half done, with the changes between.

        The changes between are checked: `EventsMissingError` where the epochs show a gap, or count
        other events than there are.
        """
        start = self._committer.to_time(since, name="since")
        self._reads.require_kept(Span(), start)
        return QuiescentReader(
            self._index,
            self._committer,
            self._changesets.epochs,
            self._history.latest,
            since=start,
            reads=self._reads,
            pins=self._pins,
        )

    # -- inside -----------------------------------------------------------------------------

    def _followed(self, since: int, wanted: Wanted, heartbeat: float | None) -> Iterator[FeedBatch]:
        """A pin keeps the history. It ends with the pass."""
        pin = self._pins.new()
        position = Position(Timestamp(since))
        tail = Tail(
            self._events,
            self._committer,
            partial(self._history.plain, wanted),
            position,
            guard=self._committer.health.require,
            require_indexed=self._reads.require_indexed,
        )
        try:
            self._pins.keep(pin, since, kind="follower")
            self._reads.require_kept(wanted.span, since)  # a clear may have come before the pin
            for batch in tail.batches(follow=True, heartbeat=heartbeat):
                yield batch
                self._pins.keep(pin, batch.resolved, kind="follower")
        finally:
            self._pins.let_go(pin, None)

    def _known(self, name: str) -> dict[str, HoldRecord]:
        """All holds of a feed, by name."""
        whole = FEED_HOLDS + name
        return {
            record.name: record
            for record in self._holds.all()
            if record.name == whole or record.name.startswith(whole + "/")
        }

    def _start(self, name: str, start: TimeLike | Position | None, share: Share) -> Position:
        if isinstance(start, Position):
            taken = require_count(start.taken, name="taken", least=0)
            state_from = start.state_from
            if state_from is not None:
                state_from = require_key(state_from, name="state_from", room=1)
            return Position(self._begin(start.timestamp), taken, state_from)
        if start == STATE:
            return Position(Timestamp(self._committer.durable - 1), 0, b"")
        if is_oldest(start):
            return Position(self._oldest())
        if start == NOW:
            return Position(Timestamp(self._committer.close_upto_now() - 1))
        if start is not None:
            return Position(self._begin(start))
        known = self._known(name)
        if not known:
            raise UsageError(
                f"no feed {name!r}", 'pass start= to begin one: "state", "oldest", "now" or a time'
            )
        mine = known.get(hold_name(name, share))
        for record in known.values() if mine is None else [mine]:
            if record.lost:
                budget = (record.max_age_ns or 0) / NS_PER_SECOND
                raise HoldLostError(record.name, held=record.timestamp, budget_seconds=budget)
        held = [mine] if mine else list(known.values())
        oldest = min(each.timestamp for each in held)
        left = [each.state_from for each in held if each.timestamp == oldest]
        # Each worker has passed the keys of its share in order: all below the least are delivered.
        return Position(oldest, 0, min((key for key in left if key is not None), default=None))

    def _oldest(self) -> Timestamp:
        """The oldest time after which all changes are there."""
        return max(self._reads.indexed_since, self._reads.whole_since)

    def _begin(self, start: TimeLike) -> Timestamp:
        """The readable time that `start` names."""
        committer = self._committer
        try:
            time = committer.to_time(start, name="start")
        except UsageError as error:
            if not isinstance(start, str):
                raise
            remedy = f'pass "now", "oldest", "{STATE}", or {error.remedy.partition(" ")[2]}'
            raise UsageError(error.what, remedy) from error
        return Timestamp(committer.readable(time))

    def _take(
        self,
        name: str,
        share: Share,
        position: Position,
        *,
        max_age: timedelta | None,
        reset: bool,
    ) -> Hold:
        """Take the hold of this worker, and the missing holds of the other workers; drop all other
        holds of the feed. One write: if it fails, no hold of the feed has changed."""
        known = self._known(name)
        layout = [hold_name(name, Share(n, share.workers)) for n in range(share.workers)]
        mine = layout[share.worker]
        at = position.timestamp if reset or mine not in known else None
        if max_age is None and mine in known and known[mine].max_age_ns is not None:
            max_age = timedelta(microseconds=(known[mine].max_age_ns or 0) / 1000)
        wanted: dict[str, int | None] = {mine: at}
        for fellow in layout:
            if fellow != mine and fellow not in known:
                wanted[fellow] = position.timestamp
        return self._holds.take_all(
            wanted,
            max_age=max_age,
            kind=FEED,
            address=name,
            state_from=position.state_from,
            dropping=sorted(known.keys() - set(layout)),
        )[mine]

    def _require_share(self, share: Share) -> None:
        streams = len(self._index.generations.current.streams)
        if share.workers > streams:
            raise UsageError(
                f"{share.workers} workers for {streams} stream{'s' if streams > 1 else ''}",
                f"use at most {streams}, or store.reshard(streams={share.workers}) first",
            )


def hold_name(name: str, share: Share) -> str:
    """The name of the hold of one worker of a feed."""
    if share.workers == 1:
        return FEED_HOLDS + name
    return f"{FEED_HOLDS}{name}/{share.worker}of{share.workers}"


def require_name(name: object) -> str:
    """Raise `UsageError` unless `name` can name a feed."""
    if not isinstance(name, str) or not name or not name.isprintable() or "/" in name:
        raise UsageError(f"feed name {name!r}", "pass a printable name without a slash")
    return name
