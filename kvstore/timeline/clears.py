"""Clears: spans whose history was destroyed, and the check that readers make for them.

A clear physically removes all versions and tombstones of a span. A read at its time or later finds
the span empty. A read at an earlier time would find it empty too, which is wrong for that time, so
it raises `HistoryGoneError`.

    clear/<timestamp, 16 hex> := start hex, end hex, timestamp

Invariants
1. A clear is announced to this process's readers before the first byte goes: a reader that asks
   after it has read learns of every clear that could have touched its rows.
2. The record is in the batch that destroys, so that a crash leaves both or neither.
3. A record is removed once `since` has reached its time, because `since` then refuses the same
   reads.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.codec.json import JsonObject
from kvstore.engine.api import WriteBatch
from kvstore.errors import HistoryGoneError
from kvstore.mvcc.meta import KeptRecords, Meta, number_of, span_of, timestamp_of

_PREFIX = "clear/"


class Clear(NamedTuple):
    """The history of `span` below `timestamp` was destroyed."""

    span: Span
    timestamp: Timestamp


class Clears:
    """The clears of one store that `since` has not caught up with."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._kept = KeptRecords(meta, _PREFIX, _read)
        self.reload()

    def reload(self) -> None:
        """Take the records as they are stored: another process may have written them."""
        self._clears = tuple(self._kept.read())

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

    def announce(self, clear: Clear) -> None:
        """Let readers know, before anything is destroyed."""
        self._clears = (*self._clears, clear)

    def withdraw(self, upper: int) -> None:
        """Forget the clears at or above `upper`: they were announced, and their write failed."""
        self._clears = tuple(clear for clear in self._clears if clear.timestamp < upper)

    def stage(self, batch: WriteBatch, clear: Clear) -> None:
        """Add the record to the batch that destroys."""
        assert clear.span.end is not None, "clear_range asks for an end"
        fields = {
            "start": clear.span.start.hex(),
            "end": clear.span.end.hex(),
            "timestamp": clear.timestamp,
        }
        self._meta.stage(batch, _name(clear), fields)

    def stage_forget(self, batch: WriteBatch, upto: int) -> None:
        """Add the removal of all records at or below `upto`, which `since` has reached."""
        for clear in self._clears:
            if clear.timestamp <= upto:
                self._meta.stage_delete(batch, _name(clear))

    def forget(self, upto: int) -> None:
        """Drop what `stage_forget` removed."""
        self._clears = tuple(clear for clear in self._clears if clear.timestamp > upto)


def _read(name: str, record: JsonObject) -> Clear:
    timestamp = timestamp_of(record)
    if timestamp != number_of(name, record):
        raise record.damaged(f"it is of {int(timestamp)}")
    return Clear(span_of(record, record.field("start", str), record.field("end", str)), timestamp)


def _name(clear: Clear) -> str:
    return f"{_PREFIX}{clear.timestamp:016x}"
