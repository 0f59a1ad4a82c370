"""Holds: named, durable claims on history. `since` never passes the least of them.

    hold/<name> := timestamp, token, max_age_ns | null, lost

Backups, feed positions, replicas and long readers hold. Taking a hold gives its owner a new token,
which moving and releasing it ask for; a former owner's token is out of date, and its calls raise
`FencedError`. A hold that falls further behind than its budget is marked lost when space is wanted,
and its owner's next call raises `HoldLostError`. Beside holds there are pins: claims of this
process only, which open snapshots keep.

Invariants
1. A hold is never below the `since` of the moment it is handed out, and durable by then, unless
   its owner promises to sync before relying on it.
2. A lost hold never holds again.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter

from kvstore.codec.json import JsonObject
from kvstore.commit import Committer
from kvstore.errors import FencedError, HoldLostError, UsageError
from kvstore.meta import Meta, timestamp_of
from kvstore.timestamp import NS_PER_SECOND, TimeLike, Timestamp, to_timestamp

_PREFIX = "hold/"
_NAME = attrgetter("name")


@dataclass(frozen=True, slots=True)
class HoldRecord:
    """A hold as it is stored. `timestamp` is the oldest time that must stay readable."""

    name: str
    timestamp: Timestamp
    token: str
    max_age_ns: int | None
    lost: bool = False


class Hold:
    """An owner's handle on a hold. Leaving a `with` block releases it."""

    def __init__(self, holds: Holds, name: str, token: str) -> None:
        self._holds = holds
        self.name = name
        self.token = token

    @property
    def timestamp(self) -> Timestamp:
        """The time it holds. Raises `FencedError` or `HoldLostError` if it is no longer ours."""
        return self._holds.require_owned(self.name, self.token).timestamp

    def move(self, to: TimeLike, *, durable: bool = True) -> None:
        """Hold `to` instead, durably; if not `durable`, a crash may leave it at an older time.

        Raises `FencedError` if a newer owner has taken the hold,
        `HoldLostError` if it was invalidated, `HistoryGoneError` below `since`,
        `NotYetWrittenError` in the future."""
        self._holds.move(self.name, self.token, to, durable=durable)

    def release(self) -> None:
        """Give it up, durably. Raises as `move`."""
        self._holds.release(self.name, self.token)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Holds:
    """The holds and pins of one store."""

    def __init__(self, meta: Meta, committer: Committer) -> None:
        self._meta = meta
        self._committer = committer
        self._records = {name: _read(name, record) for name, record in meta.records(_PREFIX)}
        self._pins: dict[int, int] = {}
        self._pin_ids = itertools.count()

    def all(self) -> list[HoldRecord]:
        """All holds, by name."""
        return sorted(self._records.values(), key=_NAME)  # copied at once: others change it

    def take(
        self, name: str, *, at: int | None, max_age: timedelta | None, durable: bool = True
    ) -> Hold:
        """Take the hold `name` for a new owner, fencing the one before.

        A new hold stands at `at`, or the newest complete time. An existing one stays where it is
        unless `at` is given. Raises `HistoryGoneError` if `at` is below `since`.
        """
        if not isinstance(name, str) or not name or not name.isprintable():
            raise UsageError(f"hold name {name!r}", "pass a printable name")
        with self._committer.lock:
            known = self._records.get(name)
            if at is not None:
                timestamp = Timestamp(self._committer.readable(at))
            elif known is not None and not known.lost:
                timestamp = known.timestamp
            else:
                timestamp = Timestamp(self._committer.close_upto_now() - 1)
            max_age_ns = None if max_age is None else int(max_age.total_seconds() * NS_PER_SECOND)
            token = secrets.token_hex(8)
            self._store(HoldRecord(name, timestamp, token, max_age_ns))
        if durable:
            self._committer.persist()
        return Hold(self, name, token)

    def move(self, name: str, token: str, to: TimeLike, *, durable: bool = True) -> None:
        """Compare-and-set on the token; see `Hold.move`."""
        at = to_timestamp(to, name="to")
        with self._committer.lock:
            record = self.require_owned(name, token)
            self._committer.readable(at)
            self._store(replace(record, timestamp=at))
        if durable:
            self._committer.persist()

    def release(self, name: str, token: str) -> None:
        """See `Hold.release`."""
        with self._committer.lock:
            self.require_owned(name, token)
            self._drop(name)
        self._committer.persist()

    def drop(self, name: str) -> bool:
        """Remove a hold whoever owns it: an operator's remedy for one that was abandoned."""
        with self._committer.lock:
            if name not in self._records:
                return False
            self._drop(name)
        self._committer.persist()
        return True

    def require_owned(self, name: str, token: str) -> HoldRecord:
        """The record, if `token` owns it and it still holds."""
        record = self._records.get(name)
        if record is None or record.token != token:
            raise FencedError(f"hold {name!r}")
        if record.lost:
            assert record.max_age_ns is not None
            raise HoldLostError(
                name, held=record.timestamp, budget_seconds=record.max_age_ns / NS_PER_SECOND
            )
        return record

    # -- what GC asks -----------------------------------------------------------------------

    def least(self) -> int | None:
        """The oldest time that something needs, None where nothing does."""
        held = [record.timestamp for record in self._records.values() if not record.lost]
        return min([*held, *self._pins.values()], default=None)

    def holder(self) -> str | None:
        """Who needs history, in words: the oldest hold, or a reader. None if nobody does."""
        held = [record for record in self._records.values() if not record.lost]
        if held:
            oldest = min(held, key=lambda record: record.timestamp)
            return f"hold {oldest.name!r} at {int(oldest.timestamp)}"
        return "an open snapshot, transaction or pass over changes" if self._pins else None

    def invalidate_overdue(self, now: int) -> list[HoldRecord]:
        """Mark the holds that are further behind than their budget as lost; returns them."""
        with self._committer.lock:
            overdue = [
                record
                for record in self._records.values()
                if not record.lost
                and record.max_age_ns is not None
                and now - record.timestamp > record.max_age_ns
            ]
            for record in overdue:
                self._store(replace(record, lost=True))
            if overdue:
                self._committer.persist()
            return overdue

    def pin(self, as_of: int) -> int:
        """Keep `as_of` readable for this process until `unpin`; returns what to unpin."""
        with self._committer.lock:
            self._committer.readable(as_of)
            pin = next(self._pin_ids)
            self._pins[pin] = as_of
            return pin

    def pin_newest(self) -> tuple[Timestamp, int]:
        """As `pin`, at the newest complete time, which it returns too. The caller holds the commit
        lock. Hot: once per transaction."""
        newest = Timestamp(self._committer.upper - 1)
        pin = next(self._pin_ids)
        self._pins[pin] = newest
        return newest, pin

    def unpin(self, pin: int) -> bool:
        """Let a pin go. Repeatable; returns whether it was there."""
        return self._pins.pop(pin, None) is not None

    # -- inside -----------------------------------------------------------------------------

    def _store(self, record: HoldRecord) -> None:
        """Write a record. The caller waits for the disk outside the lock, so that commits go on."""
        fields = {
            "timestamp": record.timestamp,
            "token": record.token,
            "max_age_ns": record.max_age_ns,
            "lost": record.lost,
        }
        name = _PREFIX + record.name
        self._committer.write_meta(
            lambda batch: self._meta.stage(batch, name, fields), durable=False
        )
        self._records[record.name] = record

    def _drop(self, name: str) -> None:
        self._committer.write_meta(
            lambda batch: self._meta.stage_delete(batch, _PREFIX + name), durable=False
        )
        del self._records[name]


def _read(name: str, record: JsonObject) -> HoldRecord:
    """A hold from its record. Raises `CorruptionError` where it is not of a hold's shape."""
    max_age_ns = record.optional_integer("max_age_ns")
    lost = record.field("lost", bool)
    if not name or (lost and max_age_ns is None):
        raise record.damaged("no hold is lost without a budget, or without a name")
    return HoldRecord(name, timestamp_of(record), record.text("token"), max_age_ns, lost)
