"""Feeds: every durable change once, in order, to a consumer that may stop and come back.

A feed reads windows of the change index that end at the durable frontier, so it never delivers a
change that a crash can take back. Catching up and following are one loop: if the frontier has not
moved, the feed waits for the next commit. The position of a feed is a hold. It keeps the history
that the feed still needs, and fences an older consumer of the same name.

    hold feed/<name>                       a feed with one consumer
    hold feed/<name>/<worker>of<workers>   a feed whose streams several workers share

Invariants
1. The position of a batch covers all deliveries up to it: all changes at or below `timestamp`,
   and the first `taken` events of the next commit. Reading from a position gives the same events
   on every run, so a consumer that stores the position with its output processes each change
   exactly once.
2. `ack` moves the hold. A consumer that only acks receives some changes again after a crash and
   misses none. The hold is never above the last delivery.
3. A feed delivers a batch only while it owns its hold, because history that a fenced or overdue
   consumer would read may be gone.
4. A feed holds one batch and a chunk of the index per stream in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.base.arguments import AGE, COUNT, NUMBER, SECONDS, SPAN, printable
from kvstore.base.span import Span, require_key
from kvstore.base.timestamp import (
    NOW,
    NS_PER_SECOND,
    OLDEST,
    AgeLike,
    TimeLike,
    Timestamp,
    is_oldest,
)
from kvstore.changes.batches import from_events
from kvstore.changes.epochs import Audit, ChangesetId, Epoch, find_anchor
from kvstore.changes.events import (
    EXPAND_CHOICE,
    IMAGES_CHOICE,
    Change,
    Event,
    Expand,
    Images,
    Operation,
)
from kvstore.changes.index import ChangeIndex
from kvstore.changes.streams import Generation
from kvstore.changes.windows import DueTimes, EventReader, Wanted
from kvstore.errors import (
    Argument,
    ClosedError,
    CorruptionError,
    HistoryGoneError,
    HoldLostError,
    NotFoundError,
    UsageError,
)
from kvstore.feeds.history import History
from kvstore.limits import FEED_BATCH_BYTES, FEED_BATCH_ROWS, STREAMS_MAX
from kvstore.loops.columns import gather
from kvstore.mvcc import Versions
from kvstore.timeline.changesets import Changesets
from kvstore.timeline.committer import Committer
from kvstore.timeline.holds import FEED, FEED_HOLDS, Hold, HoldRecord, Pins, listed_names
from kvstore.timeline.parts import Parts
from kvstore.timeline.read_times import Reads

if TYPE_CHECKING:
    import pyarrow as pa


_BYTES = Event._fields.index("key"), Event._fields.index("changeset")
"""The fields of an event between which its bytes are counted."""
_ENDS = itemgetter(Event._fields.index("end_of_batch"))


class Position(NamedTuple):
    """A place in a feed: behind all changes at or below `timestamp` and `taken` events of the next
    commit. In a feed that begins with the state at `timestamp`, `state_from` is the least key that
    was not delivered; it is None behind the state."""

    timestamp: Timestamp
    taken: int = 0
    state_from: bytes | None = None

    def is_beyond(self, other: Position) -> bool:
        """Whether this place comes after `other`."""
        return _place(self) > _place(other)


def _place(position: Position) -> tuple[int, bool, int, bytes]:
    timestamp, taken, state_from = position
    return timestamp, state_from is None, taken, state_from or b""


class Share(NamedTuple):
    """A worker's part of a feed: the streams whose number modulo `workers` is `worker`.

    Worker 0 has the control stream. Together the shares cover each stream of a generation once.
    """

    worker: int = 0
    workers: int = 1

    @classmethod
    def of(cls, streams: object) -> Share:
        """The share that the `streams` argument of a feed names; None means all. Raises
        `UsageError`."""
        if streams is None:
            return cls()
        if not isinstance(streams, tuple) or [type(part) for part in streams] != [int, int]:
            raise UsageError(
                Argument.of("streams", streams), "pass (worker, workers), or None for all"
            )
        share = cls(*streams)
        if not 1 <= share.workers <= STREAMS_MAX or not 0 <= share.worker < share.workers:
            raise UsageError(
                f"worker {share.worker} of {share.workers}", "workers count from 0, below workers"
            )
        return share

    def select(self, found: Generation) -> list[bytes]:
        """The streams of a generation that this worker reads."""
        mine = list(found.streams[self.worker :: self.workers])
        if found.is_split and self.worker == 0:
            mine.insert(0, found.control)
        return mine


@dataclass(frozen=True, slots=True)
class FeedBatch:
    """Events, and the position after them. A batch without events says that time has passed."""

    events: list[Event]
    position: Position
    is_state: bool = False
    """Whether the events are rows of the state that the feed begins with: each is a put, at the
    time of the state."""

    @property
    def resolved(self) -> Timestamp:
        """All changes at or below this time are delivered and durable."""
        return self.position.timestamp

    def to_arrow(self) -> pa.RecordBatch:
        """The events as a record batch of `kvstore.changes.batches.changes_schema`. Copies."""
        return from_events(self.events)


class Tail:
    """The loop of a feed: windows up to the durable frontier, cut into batches."""

    def __init__(
        self,
        events: EventReader,
        committer: Committer,
        wanted: Callable[[], Wanted],
        position: Position,
        *,
        guard: Callable[[], None],
        require_indexed: Callable[[int], None],
        state: StateReader | None = None,
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> None:
        """`wanted` is called before each window. `guard` is called before each delivery and raises
        to stop it. `require_indexed` raises if the change index begins above a time."""
        self._events = events
        self._committer = committer
        self._wanted = wanted
        self.position = position
        self._guard = guard
        self._require_indexed = require_indexed
        self._state = state
        # The compiled loops count up to this number.
        self._rows_max = min(FEED_BATCH_ROWS if rows_max is None else rows_max, sys.maxsize)
        self._bytes_max = min(FEED_BATCH_BYTES if bytes_max is None else bytes_max, sys.maxsize)

    def batches(self, *, follow: bool, heartbeat: float | None) -> Iterator[FeedBatch]:
        """Batches until now, or for ever with `follow`.

        Following, an idle store gives an empty batch every `heartbeat` seconds, if that is set.
        """
        committer = self._committer
        self._guard()
        yield from self._rest_of_state()
        committer.close_upto_now()
        while True:
            target = Timestamp(committer.make_durable() - 1)
            yield from self._window(target)
            if not follow:
                return
            committer.frontiers.wait(target + 1, timeout=heartbeat, stop=self._is_stopped)
            self._guard()
            if committer.upper > target + 1 or committer.close_upto_now() > target + 1:
                continue
            if heartbeat is not None:  # time does not pass on a replica
                yield self._deliver([], self.position)

    def _is_stopped(self) -> bool:
        try:
            self._guard()
        except Exception:  # noqa: BLE001  # the caller raises it again, outside the wait
            return True
        return False

    def _rest_of_state(self) -> Iterator[FeedBatch]:
        at, _, first = self.position
        if first is None:
            return
        assert self._state is not None, "only feeds of a store begin with its state"
        try:
            events = self._state.events(self._wanted(), at, first)
            while True:
                rows: list[Event] = []
                size = gather(events, rows, self._rows_max, self._bytes_max, *_BYTES)
                if len(rows) < self._rows_max and size < self._bytes_max:
                    break
                yield self._deliver(rows, Position(at, 0, rows[-1].key + b"\0"), is_state=True)
        except (CorruptionError, HistoryGoneError):
            self._guard()  # if the hold is lost, its error explains the gap
            raise
        yield self._deliver(rows, Position(at), is_state=True)

    def _window(self, target: Timestamp) -> Iterator[FeedBatch]:
        resolved, taken, _ = self.position
        if target <= resolved:
            return
        self._require_indexed(resolved)  # a replica may have taken the window as files
        try:
            events = self._events.events(self._wanted(), since=resolved, upto=target)
            events = islice(events, taken, None)
            while True:
                rows: list[Event] = []
                size = gather(events, rows, self._rows_max, self._bytes_max, *_BYTES)
                if len(rows) < self._rows_max and size < self._bytes_max:
                    break
                taken += len(rows)
                if True in (ends := list(map(_ENDS, rows))):
                    taken = ends[::-1].index(True)
                    resolved = rows[-1 - taken].timestamp
                yield self._deliver(rows, Position(resolved, taken))
        except (CorruptionError, HistoryGoneError):
            self._guard()  # if the hold is lost, its error explains the gap
            raise
        yield self._deliver(rows, Position(target))

    def _deliver(
        self, rows: list[Event], position: Position, *, is_state: bool = False
    ) -> FeedBatch:
        self._guard()
        self.position = position
        return FeedBatch(rows, position, is_state)


class Feed:
    """A consumer's handle on a feed; `store.feed` makes it.

    Iterate over the feed, or over `batches(follow=True)`, and `ack` each batch after processing it.
    Closing the handle keeps the position; `store.feeds.drop` gives it up.

    Example:

        index = {}
        store.put(b"k", b"v")
        with store.feed("search", start="oldest") as feed:
            for batch in feed:
                for event in batch.events:
                    index[event.key] = event.value
                feed.ack(batch)
        assert index == {b"k": b"v"}
    """

    def __init__(
        self,
        name: str,
        share: Share,
        hold: Hold,
        tail: Callable[[Callable[[], None]], Tail],
        *,
        is_live: Callable[[], None],
    ) -> None:
        self.name = name
        self.share = share
        self._hold = hold
        self._is_live = is_live
        self._closed = False
        self._tail = tail(self._guard)

    @property
    def position(self) -> Position:
        """The position after the last delivery of this handle."""
        return self._tail.position

    @property
    def token(self) -> str:
        """The token of the feed's hold, by which `Feeds.resume` knows this consumer again."""
        return self._hold.token

    @property
    def acked(self) -> Timestamp:
        """The time from which a new consumer of this name starts. Raises as `ack`."""
        return self._hold.timestamp

    def batches(
        self, *, follow: bool = False, heartbeat: float | None = None
    ) -> Iterator[FeedBatch]:
        """Batches of events from the position on, until now; with `follow` also all later ones.

        The last batch of a window has `resolved` at the window's end. Following waits without
        polling. After every `heartbeat` seconds without a commit it yields an empty batch, so that
        `resolved` moves on. Raises `FencedError` once a newer consumer has the name,
        `HoldLostError` once the budget was exceeded, and `ClosedError` when the store closes.
        """
        if heartbeat is not None and not SECONDS.check("heartbeat", heartbeat):
            raise UsageError(Argument("heartbeat", str(heartbeat)), "pass seconds above 0, or None")
        return self._tail.batches(follow=follow, heartbeat=heartbeat)

    def __iter__(self) -> Iterator[FeedBatch]:
        return self.batches()

    def ack(self, upto: FeedBatch | Position) -> None:
        """Release the history up to this batch, durably: the consumer has processed it. One fsync.

        A batch that ends inside a commit releases the commits before; the commit's last batch
        releases the commit. Raises `UsageError` above the last delivery, and `FencedError` and
        `HoldLostError` as `batches`.
        """
        position = upto.position if isinstance(upto, FeedBatch) else upto
        if not isinstance(position, Position):
            raise UsageError(f"ack of a {type(upto).__name__}", "pass a batch, or its position")
        if position.is_beyond(self.position):
            raise UsageError(f"{position} was not delivered yet", "ack a batch that was delivered")
        self._guard()
        acked = Position(self._hold.timestamp, 0, self._hold.state_from)
        if position._replace(taken=0).is_beyond(acked):
            self._hold.move(position.timestamp, state_from=position.state_from)

    def take_back(self, position: Position) -> None:
        """Go back to `position`: the batches behind it did not reach the consumer."""
        self._tail.position = position

    def close(self) -> None:
        """Close the handle. The position stays. Repeatable."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<kvstore.Feed {self.name!r}>"

    def __enter__(self) -> Feed:
        self._guard()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _guard(self) -> None:
        """Raise unless this handle may read on."""
        if self._closed:
            raise ClosedError(f"feed {self.name!r}")
        self._is_live()
        _ = self._hold.timestamp  # raises if the hold is not ours any more


# --------------------------------------------------------------------------------------------------
# The beginning of a feed: the state at one time, as events, before the changes after it.
#
# A worker that shares a feed gets the rows whose later changes it gets too. So no change of a key
# overtakes the row of that key, and the workers need not wait for each other.
#
# Invariants
# 1. The rows come by key, and each batch ends at a key. Reading from there gives the same rows on
#    every run, because the hold of the feed keeps the time readable.
# 2. One chunk of a scan and one batch are in memory.

_NO_CHANGESET = ChangesetId(0, 0)


@dataclass(frozen=True, slots=True)
class StateReader:
    """Reads the state of a store. `generation` gives the streams at a time."""

    versions: Versions
    generation: Callable[[int], Generation]
    dues: DueTimes

    def events(self, wanted: Wanted, at: Timestamp, first: bytes) -> Iterator[Event]:
        """The live rows of `wanted` at the time `at`, from the key `first` on."""
        span = wanted.span.intersect(first, None)
        if span is None:
            return iter(())
        return self.dues.of_events(self._events(wanted, at, span), span, as_of=at)

    def _events(self, wanted: Wanted, at: Timestamp, span: Span) -> Iterator[Event]:
        found = self.generation(at)
        mine = None if wanted.select is None else set(wanted.select(found))
        keys_only, with_post = wanted.images == "none", wanted.images.endswith("post")
        stream = found.streams[0]
        for keys, values in self.versions.scan(span, at):
            for key, value in zip(keys, values, strict=True):
                if found.is_split:
                    stream = found.stream_of(key)
                if mine is None or stream in mine:
                    yield Event(
                        at,
                        0,
                        Operation.PUT,
                        key,
                        None,
                        None if keys_only else value,
                        None,
                        value if with_post else None,
                        _NO_CHANGESET,
                        stream,
                        False,
                    )


# --------------------------------------------------------------------------------------------------
# Opening, sharing and dropping feeds, and the holds behind the name of a feed.
#
# The holds of a feed are its only record. Workers that share a feed have a hold each. The first
# worker takes the holds of all, so that history waits for the others. Opening a feed with another
# number of workers takes it over: the old workers are fenced, and each new worker starts at the
# least of their positions. Changes between the old positions are then delivered again, and none is
# left out.

FEED_NAME: Final = printable("pass a printable name without a slash for the feed", but="/")
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
        max_age: AgeLike | None = None,
        batch_rows: int | None = None,
        batch_bytes: int | None = None,
    ) -> Feed:
        """See `Store.feed`."""
        share = Share.of(streams)
        wanted = Wanted(
            SPAN.check("span", span),
            IMAGES_CHOICE.check("images", images),
            EXPAND_CHOICE.check("expand", expand),
        )
        age = AGE.or_none.check("max_age", max_age)
        self._committer.health.require()
        FEED_NAME.check("name", name)
        count = len(self._index.generations.current.streams)
        if share.workers > count:
            raise UsageError(
                f"{share.workers} workers for {count} stream{'s' if count > 1 else ''}",
                f"use at most {count}, or store.reshard(streams={share.workers}) first",
            )
        if start == STATE:
            self._committer.sync()  # the state holds nothing that a crash can take back
        with self._committer.lock:
            position = self._start(name, start, share)
            self._reads.require_indexed(position.timestamp)
            self._reads.require_kept(wanted.span, position.timestamp)
            hold = self._take(name, share, position, max_age=age, reset=start is not None)
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
        wanted = Wanted(
            SPAN.check("span", span),
            IMAGES_CHOICE.check("images", images),
            EXPAND_CHOICE.check("expand", expand),
        )
        hold = Hold(self._holds, hold_name(FEED_NAME.check("name", name), share), token)
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
        COUNT.check("batch_rows", rows_max)
        COUNT.check("batch_bytes", bytes_max)
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
        FEED_NAME.check("name", name)
        with self._committer.lock:
            known = self._known(name)
            if not known:
                raise NotFoundError(
                    f"no feed {name!r}",
                    (Argument("store.holds.all()"), " names all feeds"),
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

    def __repr__(self) -> str:
        names = sorted(
            {
                record.name.removeprefix(FEED_HOLDS).partition("/")[0]
                for record in self._holds.all()
                if record.kind == FEED
            }
        )
        return f"<kvstore.Feeds: {listed_names(names)}>"

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
            taken = NUMBER.check("taken", start.taken)
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
            raise NotFoundError(
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
            raise error.at(remedy=remedy) from error
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


def hold_name(name: str, share: Share) -> str:
    """The name of the hold of one worker of a feed."""
    if share.workers == 1:
        return FEED_HOLDS + name
    return f"{FEED_HOLDS}{name}/{share.worker}of{share.workers}"


# --------------------------------------------------------------------------------------------------
# Quiescent points: states in which no changeset is half done, with proof that no event is missing.
#
# The commits of a changeset are not atomic, so the state at any time may show half of a changeset.
# The reader goes from quiescent point to quiescent point. Between two points it compares the change
# index with the epochs: epochs must follow each other without a gap, and count as many events as
# the index holds. The reader takes its changes from the versions, so it buffers nothing, and
# changes that cancel each other never appear.
#
# Invariants
# 1. The reader yields a point only if all events up to it are in epochs, each with its full count.
# 2. At a quiescent point no changeset was open.
# 3. The first epoch of a domain begins at 0. Restored and replicated changes have no domain, and no
#    epoch counts them: each of their commits is atomic.


@dataclass(frozen=True, slots=True)
class QuiescentPoint:
    """A time at which no changeset was half done, and the changes since the point before."""

    since: Timestamp
    timestamp: Timestamp
    _changes: Callable[[int, int], Iterator[Change]]

    def changes(self) -> Iterator[Change]:
        """The changes that turn the state at `since` into the state at `timestamp`, by key."""
        return self._changes(self.since, self.timestamp)


class QuiescentReader:
    """Iterates over the quiescent points above `since`. Iterate again for points that came later.

    Raises `EventsMissingError` at the first epoch whose count differs from the index.
    """

    def __init__(
        self,
        index: ChangeIndex,
        committer: Committer,
        epochs: Callable[[], Iterator[Epoch]],
        changes: Callable[[int, int], Iterator[Change]],
        *,
        since: Timestamp,
        reads: Reads,
        pins: Pins,
    ) -> None:
        self._index = index
        self._reads = reads
        self._committer = committer
        self._epochs = epochs
        self._changes = changes
        self._pins = pins
        self.position = since

    def __iter__(self) -> Iterator[QuiescentPoint]:
        """Yield the points. Costs two passes over the stored epochs and the headers of new entries.

        A pin keeps history meanwhile, because the reader would miss events that GC removes.
        """
        pin = self._pins.new()
        try:
            with self._committer.lock:
                self._pins.keep(pin, self._committer.since, kind="pass")
                floor = self._reads.indexed_since
            yield from self._points(floor)
        finally:
            self._pins.let_go(pin, None)

    def _points(self, floor: int) -> Iterator[QuiescentPoint]:
        durable = self._committer.make_durable()
        anchor = find_anchor(self._complete(durable), floor=floor, upto=self.position)
        if anchor is None:
            return
        audit = Audit(after=anchor.after)
        headers = self._index.headers(since=anchor.since, upto=durable - 1)
        for epoch in audit.over(self._after(anchor.after, durable), headers):
            audit.close(epoch)
            reached = Timestamp(epoch.closed_at - 1)
            if epoch.quiescent and reached > self.position:
                since, self.position = self.position, reached
                yield QuiescentPoint(since, reached, self._changes)

    def _complete(self, durable: int) -> Iterator[Epoch]:
        """The epochs whose events are all durable, oldest first."""
        return takewhile(lambda epoch: epoch.closed_at <= durable, self._epochs())

    def _after(self, first: Epoch | None, durable: int) -> Iterator[Epoch]:
        """The epochs that follow `first`. Raises `HistoryGoneError` if it was trimmed since."""
        epochs = self._complete(durable)
        if first is not None and first not in epochs:  # `in` takes the epochs up to `first`
            raise HistoryGoneError(as_of=self.position, since=self._committer.since)
        return epochs
