"""Feeds: every durable change once, in order, to a consumer that may stop and come back.

A feed reads windows of the change index that end at the durable frontier, so it never delivers a
change that a crash can take back. Catching up and following are one loop: if the frontier has not
moved, the feed waits for the next commit. The position of a feed is a hold. It keeps the history
that the feed still needs, and fences an older consumer of the same name.

    hold feed/<name>                       a feed with one consumer
    hold feed/<name>/<worker>of<workers>   a feed whose streams several workers share

Invariants
1. The position of a batch covers all deliveries up to it: all changes at or below `timestamp`, and
   the first `taken` events of the next commit. Reading from a position gives the same events on
   every run, so a consumer that stores the position with its output processes each change exactly
   once.
2. `ack` moves the hold. A consumer that only acks receives some changes again after a crash and
   misses none. The hold is never above the last delivery.
3. A feed delivers a batch only while it owns its hold, because history that a fenced or overdue
   consumer would read may be gone.
4. A feed holds one batch and a chunk of the index per stream in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from kvstore.arguments import require_seconds
from kvstore.changes.columns import from_events
from kvstore.changes.event import Event
from kvstore.changes.expand import EventReader, Wanted
from kvstore.changes.generation import Generation
from kvstore.commit import Committer
from kvstore.errors import ClosedError, CorruptionError, HistoryGoneError, UsageError
from kvstore.feeds.state import StateReader
from kvstore.holds import Hold
from kvstore.limits import FEED_BATCH_BYTES, FEED_BATCH_ROWS, STREAMS_MAX
from kvstore.loops.columns import gather
from kvstore.timestamp import Timestamp

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
            raise UsageError(f"streams={streams!r}", "pass (worker, workers), or None for all")
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
        """The events as a record batch of `kvstore.changes.columns.changes_schema`. Copies."""
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
        # The compiled loops count no further.
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
        if heartbeat is not None and not require_seconds(heartbeat, name="heartbeat"):
            raise UsageError(f"heartbeat={heartbeat}", "pass seconds above 0, or None")
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
