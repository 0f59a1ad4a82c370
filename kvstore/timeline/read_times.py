"""Reads of one store: the choice of their time, and the check that its history was whole.

GC and clears remove history while reads run, and no read takes a lock. Two means keep a read whole.
A short read checks afterwards whether GC or a clear has reached its time. A long read pins its time
first, and GC and clears leave pinned history alone.

A clear physically removes all versions and tombstones of a span. A read at its time or later finds
the span empty. A read at an earlier time would find it empty too, which is wrong for that time, so
it raises `HistoryGoneError`. The store keeps a record of each clear for this check:

    clear/<timestamp, 16 hex> := start hex, end hex, timestamp

Invariants
1. A read returns the whole state of its time, or raises `HistoryGoneError`. It never returns the
   part that a removal has left.
2. A read without a time reads the newest complete time, and never raises `HistoryGoneError`.
3. A clear is announced to this process's readers before the first byte goes: a reader that asks
   after it has read learns of every clear that could have touched its rows.
4. The record of a clear is in the batch that destroys, so that a crash leaves both or neither.
5. A record is removed once `since` has reached its time, because `since` then refuses the same
   reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, Timestamp, is_oldest
from kvstore.codec.json import JsonObject
from kvstore.engine.api import WriteBatch
from kvstore.errors import HistoryGoneError, KVStoreError, UsageError
from kvstore.mvcc.meta import KeptRecords, Meta, number_of, span_of, timestamp_of
from kvstore.timeline.committer import Committer
from kvstore.timeline.holds import Pins

T = TypeVar("T")

_PREFIX = "clear/"


class Clear(NamedTuple):
    """The history of `span` below `timestamp` was destroyed."""

    span: Span
    timestamp: Timestamp


class Clears:
    """The clears of one store that `since` has not caught up with."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._kept = KeptRecords(meta, _PREFIX, _clears_of)
        self.reload()

    def reload(self) -> None:
        """Take the records as they are stored: another process may have written them."""
        self._clears = tuple(clear for record in self._kept.read() for clear in record)

    @property
    def newest(self) -> int:
        """The time of the newest clear, 0 if there is none. Reads at or above it need no check."""
        return max((clear.timestamp for clear in self._clears), default=0)

    def all(self) -> tuple[Clear, ...]:
        """The clears, oldest first."""
        return self._clears

    def hit(self, span: Span, as_of: int) -> Clear | None:
        """The newest clear that destroyed something of `span` as it was at `as_of`. O(clears)."""
        for clear in reversed(self._clears):
            if as_of < clear.timestamp and clear.span.intersect(span.start, span.end) is not None:
                return clear
        return None

    def require(self, span: Span, as_of: int) -> None:
        """Raise `HistoryGoneError`, naming the cleared span, where `hit` finds one."""
        clear = self.hit(span, as_of)
        if clear is not None:
            raise HistoryGoneError(
                as_of=as_of,
                since=clear.timestamp,
                span=(clear.span.start, clear.span.end),
                remedy=f"it was cleared then: read at {clear.timestamp} or later, or read "
                "around the span; a backup or feed starts over from a full read",
            )

    def announce(self, clears: Sequence[Clear]) -> None:
        """Let readers know, before anything is destroyed."""
        self._clears = (*self._clears, *clears)

    def withdraw(self, upper: int) -> None:
        """Forget the clears at or above `upper`: they were announced, and their write failed."""
        self._clears = tuple(clear for clear in self._clears if clear.timestamp < upper)

    def stage(self, batch: WriteBatch, clears: Sequence[Clear]) -> None:
        """Add the record to the batch that destroys. The clears have one timestamp."""
        first, *more = clears
        fields: dict[str, Any] = {**_bounds(first), "timestamp": first.timestamp}
        if more:
            fields["more"] = [_bounds(clear) for clear in more]
        self._meta.stage(batch, _record_name(first), fields)

    def stage_forget(self, batch: WriteBatch, upto: int) -> None:
        """Add the removal of all records at or below `upto`, which `since` has reached."""
        for name in {_record_name(clear) for clear in self._clears if clear.timestamp <= upto}:
            self._meta.stage_delete(batch, name)

    def forget(self, upto: int) -> None:
        """Drop what `stage_forget` removed."""
        self._clears = tuple(clear for clear in self._clears if clear.timestamp > upto)


def _bounds(clear: Clear) -> dict[str, str]:
    assert clear.span.end is not None, "clear_range asks for an end"
    return {"start": clear.span.start.hex(), "end": clear.span.end.hex()}


def _clears_of(name: str, record: JsonObject) -> list[Clear]:
    timestamp = timestamp_of(record)
    if timestamp != number_of(name, record):
        raise record.damaged(f"it is of {int(timestamp)}")
    spans = [record, *(record.objects("more") if "more" in record else ())]
    return [
        Clear(span_of(each, each.field("start", str), each.field("end", str)), timestamp)
        for each in spans
    ]


def _record_name(clear: Clear) -> str:
    return f"{_PREFIX}{clear.timestamp:016x}"


class Reads:
    """Picks the time of each read, and checks that its history was whole."""

    def __init__(
        self, committer: Committer, pins: Pins, clears: Clears, *, index_floor: int
    ) -> None:
        """`index_floor` is the time above which the change index is whole."""
        self._committer = committer
        self._frontiers = committer.frontiers
        self._pins = pins
        self._clears = clears
        self._index_floor = index_floor
        committer.frontiers.raise_floor(clears.newest)

    @property
    def whole_since(self) -> Timestamp:
        """The oldest time at which all of the store is readable: `since`, or the newest clear."""
        return Timestamp(max(self._frontiers.since, self._clears.newest))

    @property
    def indexed_since(self) -> Timestamp:
        """The oldest time that windows of the change index can begin at."""
        return Timestamp(max(self._frontiers.since, self._index_floor))

    def raise_index_floor(self, timestamp: int) -> None:
        """Note that the change index has no entry at or below `timestamp`."""
        self._index_floor = timestamp

    def at(self, as_of: TimeLike | None) -> int:
        """The time of a read as of `as_of`. Raises `HistoryGoneError` and `NotYetWrittenError`."""
        frontiers = self._frontiers
        if not frontiers.is_healthy:
            self._committer.catch_up() if as_of is None else self._committer.health.require()
        if as_of is None:
            return frontiers.upper - 1
        if type(as_of) is Timestamp and frontiers.since <= as_of < frontiers.upper:
            return as_of
        return self._committer.readable(self._committer.to_time(as_of, name="as_of"))

    def window(self, since: TimeLike, upto: TimeLike | None) -> tuple[int, int]:
        """The bounds of `(since, upto]`. Without `upto` an empty window has equal bounds."""
        if is_oldest(since):
            since = self.whole_since
        low, high = self._committer.to_time(since, name="since"), self.at(upto)
        if low > high and upto is not None:
            raise UsageError(f"since {low} is above upto {high}", "swap them")
        return low, max(low, high)

    def read(self, as_of: TimeLike | None, span: Span, read: Callable[[int], T]) -> T:
        """The result of `read` in `span` at `as_of`. May run `read` more than once.

        History may go between the choice of the time and the read. GC and clears announce each
        removal before they begin it, so a check after the read tells whether the read was whole.
        If it was not, a read at `as_of` raises `HistoryGoneError`, and a read without a time runs
        again at the time that is then the newest.
        """
        while True:
            at = self.at(as_of)
            try:
                result = read(at)
            except KVStoreError:  # half of the history is like damage
                if self._was_whole(as_of, span, at):
                    raise
            else:
                if self._was_whole(as_of, span, at):
                    return result
            with self._committer.lock:
                pass  # The clear under way publishes its time before it releases the lock.

    def guard(self) -> Callable[[], bool]:
        """A function that tells whether no history has been removed since this call, nor is being
        removed: GC and clears announce what they remove before it goes."""
        if self._committer.policy.is_live:  # another process removes, and does not say so first
            return lambda: False
        frontiers, floor = self._frontiers, self._frontiers.floor
        return lambda: frontiers.floor == floor

    def _was_whole(self, as_of: TimeLike | None, span: Span, at: int) -> bool:
        """Whether the history of a read at `at` that has just ended was whole. Raises
        `HistoryGoneError` if it was not, and the caller of the read has named its time."""
        if at >= self._frontiers.floor:
            return True
        if as_of is not None:
            self.require_kept(span, at)
            return True
        return at >= self._frontiers.since and self._clears.hit(span, at) is None

    @contextmanager
    def watched(self, span: Span, as_of: int) -> Iterator[None]:
        """A read at `as_of` whose history may go meanwhile. If it went, the block raises
        `HistoryGoneError`, whatever it has found or raised itself."""
        try:
            yield
        except KVStoreError:
            self._require_untouched(span, as_of)
            raise
        self._require_untouched(span, as_of)

    def late(self, keys: list[bytes], read: Callable[[int], list[T | None]]) -> list[T | None]:
        """As `read` without a time, of keys, while the deletes that are due are being written: the
        result of `read` has None for each key that has expired."""
        expiries, frontiers = self._committer.expiries, self._frontiers
        now = self._committer.now()
        while True:
            at = frontiers.upper - 1
            found = read(at)
            gone = expiries.have_passed(keys, at, now)
            if at >= frontiers.floor:
                break
            with self._committer.lock:
                pass  # as in `read`
        return [None if is_gone else value for value, is_gone in zip(found, gone, strict=True)]

    def pinned(self, span: Span, as_of: int, open_pass: Callable[[], Iterator[T]]) -> Iterator[T]:
        """The rows of `open_pass`. Its history is pinned from the first row until the pass ends.

        Raises `HistoryGoneError` at the first row, if GC or a clear came before the pin.
        """
        pins = self._pins  # in a forked child, which ends the pass, handles have no fields
        pin = pins.new()
        try:
            pins.keep(pin, as_of, kind="pass over changes")
            self._clears.require(span, as_of)
            if self._committer.policy.is_live:
                with self.watched(span, as_of):
                    rows = open_pass()  # it may read ahead
                yield from self._watched(span, as_of, rows)
            else:
                yield from open_pass()
        finally:
            pins.let_go(pin, None)

    def _watched(self, span: Span, as_of: int, rows: Iterator[T]) -> Iterator[T]:
        """`rows`, while another process may remove history by GC and clears. Raises
        `HistoryGoneError` before the first row that a removal may have changed."""
        ended = object()
        while True:
            with self.watched(span, as_of):
                row = next(rows, ended)
            if row is ended:
                return
            yield row  # type: ignore[misc]  # not `ended`

    def _require_untouched(self, span: Span, as_of: int) -> None:
        if as_of < self._frontiers.floor:
            self.require_kept(span, as_of)

    def require_kept(self, span: Span, as_of: int) -> None:
        """Raise unless the whole of `span` can be read as of `as_of`."""
        self._committer.readable(as_of)
        self._clears.require(span, as_of)

    def require_indexed(self, since: int) -> None:
        """Raise `HistoryGoneError` unless the change index is whole above `since`."""
        if since < self._index_floor:
            raise HistoryGoneError(
                as_of=since,
                since=Timestamp(self._index_floor),
                remedy="the store was restored then, or took a large window of its source as "
                "files, and feeds begin there: take a scan at that time first",
            )
