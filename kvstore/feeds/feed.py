"""Feeds: every durable change once, in order, to a consumer that may stop and come back.

A feed reads windows of the change index that end at the durable frontier, so it never hands out a
change that a crash can take back. Catching up and following are the same loop: where the frontier
has not moved, it waits for the next commit. Its position is a hold, which keeps the history it
still needs and fences an older consumer of the same name.

    hold feed/<name>                       a feed with one consumer
    hold feed/<name>/<worker>of<workers>   a feed whose streams several workers share

Invariants
1. A batch's position says what was delivered with it: all changes at or below `timestamp`, and the
   first `taken` events of the commit after. Reading again from there gives what follows, the
   same on every run: a consumer that stores it with its output takes each change exactly once.
2. `ack` moves the hold; a consumer that only acks gets some changes again after a crash, and
   misses none. The hold is never above what was delivered.
3. A batch is handed out only while the hold is owned and was not lost: what a fenced or overdue
   consumer would read may be gone.
4. Memory is one batch and a chunk of the index per stream.
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
from kvstore.holds import Hold
from kvstore.limits import FEED_BATCH_BYTES, FEED_BATCH_ROWS, STREAMS_MAX
from kvstore.loops import gather
from kvstore.timestamp import Timestamp

if TYPE_CHECKING:
    import pyarrow as pa

_BYTES = Event._fields.index("key"), Event._fields.index("changeset")
"""From where on, and up to where, an event holds bytes that count."""
_ENDS = itemgetter(Event._fields.index("end_of_batch"))


class Position(NamedTuple):
    """What was delivered: all at or below `timestamp`, and `taken` events of the next commit."""

    timestamp: Timestamp
    taken: int = 0


class Share(NamedTuple):
    """A worker's part of a feed: the streams whose number modulo `workers` is `worker`.

    Worker 0 has the control stream. The shares of a generation are disjoint and complete,
    however many streams it has.
    """

    worker: int = 0
    workers: int = 1

    @classmethod
    def of(cls, streams: object) -> Share:
        """What the `streams` argument of a feed says: None is all. Raises `UsageError`."""
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
    """Events, and the position after them. No event: only time has passed."""

    events: list[Event]
    position: Position

    @property
    def resolved(self) -> Timestamp:
        """All changes at or below this time have been delivered, and are durable."""
        return self.position.timestamp

    def to_arrow(self) -> pa.RecordBatch:
        """The events as a record batch of `kvstore.changes.columns.CHANGES_SCHEMA`. Copies."""
        return from_events(self.events)


class Tail:
    """The loop of a feed: windows up to the durable frontier, cut into batches."""

    def __init__(
        self,
        events: EventReader,
        committer: Committer,
        wanted: Wanted,
        position: Position,
        *,
        guard: Callable[[], None],
        require_indexed: Callable[[int], None],
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> None:
        """`guard` is called before a batch is handed out, and raises to stop it. So does
        `require_indexed` where the change index begins above a time."""
        self._events = events
        self._committer = committer
        self._wanted = wanted
        self.position = position
        self._guard = guard
        self._require_indexed = require_indexed
        # No more than what is compiled can count to.
        self._rows_max = min(FEED_BATCH_ROWS if rows_max is None else rows_max, sys.maxsize)
        self._bytes_max = min(FEED_BATCH_BYTES if bytes_max is None else bytes_max, sys.maxsize)

    def batches(self, *, follow: bool, heartbeat: float | None) -> Iterator[FeedBatch]:
        """Batches until now, or for ever with `follow`.

        Following, an idle store gives an empty batch every `heartbeat` seconds, if that is set.
        """
        committer = self._committer
        self._guard()
        committer.close_upto_now()
        while True:
            target = Timestamp(committer.make_durable() - 1)
            yield from self._window(target)
            if not follow:
                return
            committer.wait_published(target + 1, timeout=heartbeat, stop=self._is_stopped)
            self._guard()
            if committer.upper > target + 1 or committer.close_upto_now() > target + 1:
                continue
            if heartbeat is not None:  # of a replica time does not pass
                yield self._deliver([], self.position)

    def _is_stopped(self) -> bool:
        try:
            self._guard()
        except Exception:  # noqa: BLE001  # the caller raises it again, outside the wait
            return True
        return False

    def _window(self, target: Timestamp) -> Iterator[FeedBatch]:
        resolved, taken = self.position
        if target <= resolved:
            return
        self._require_indexed(resolved)  # a replica may have taken the window as files
        try:
            events = self._events.events(self._wanted, since=resolved, upto=target)
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
            self._guard()  # a lost hold explains what is missing
            raise
        yield self._deliver(rows, Position(target))

    def _deliver(self, rows: list[Event], position: Position) -> FeedBatch:
        self._guard()
        self.position = position
        return FeedBatch(rows, position)


class Feed:
    """A consumer's handle on a feed; `store.feed` makes it.

    Iterate over it, or over `batches(follow=True)`, and `ack` what has been dealt with. Closing
    it keeps the position; `store.drop_feed` gives it up.
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
        """What was delivered so far by this handle."""
        return self._tail.position

    @property
    def acked(self) -> Timestamp:
        """The time a new consumer of this name starts from. Raises as `ack`."""
        return self._hold.timestamp

    def batches(
        self, *, follow: bool = False, heartbeat: float | None = None
    ) -> Iterator[FeedBatch]:
        """Batches of events from the position on, until now; with `follow`, then as they come.

        The last batch of a window has `resolved` at its end. Following waits without polling; it
        hands out an empty batch every `heartbeat` seconds in which nothing was committed, so
        that `resolved` moves on. Raises `FencedError` once a newer consumer has the name,
        `HoldLostError` once the budget was exceeded, `ClosedError` when the store closes.
        """
        if heartbeat is not None and not require_seconds(heartbeat, name="heartbeat"):
            raise UsageError(f"heartbeat={heartbeat}", "pass seconds above 0, or None")
        return self._tail.batches(follow=follow, heartbeat=heartbeat)

    def __iter__(self) -> Iterator[FeedBatch]:
        return self.batches()

    def ack(self, upto: FeedBatch | Position) -> None:
        """All up to this batch has been dealt with: let its history go, durably. One fsync.

        Part of a commit is acked with the commit's last batch. Raises `UsageError` above what
        was delivered, `FencedError` and `HoldLostError` as `batches`.
        """
        position = upto.position if isinstance(upto, FeedBatch) else upto
        if not isinstance(position, Position):
            raise UsageError(f"ack of a {type(upto).__name__}", "pass a batch, or its position")
        if position > self.position:
            raise UsageError(f"{position} was not delivered yet", "ack what was delivered")
        self._guard()
        if position.timestamp > self._hold.timestamp:
            self._hold.move(position.timestamp)

    def close(self) -> None:
        """Stop; the position stays. Repeatable."""
        self._closed = True

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
        _ = self._hold.timestamp  # raises where it is not ours any more
