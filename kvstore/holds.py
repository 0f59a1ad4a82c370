"""Holds: named, durable claims on history. `since` never passes the least of them.

    hold/<name> := the record of a hold, see `kvstore.claims`

Backups, feed positions, replicas and long readers hold. Taking a hold gives its owner a new token,
which moving and releasing it ask for; a former owner's token is out of date, and its calls raise
`FencedError`. A hold that falls further behind than its budget is marked lost when space is wanted,
and its owner's next call raises `HoldLostError`. Readers in this process claim history by pins
(`kvstore.claims`), which cost no write.

A record names the purpose and the owner of its hold, because a hold may outlive both: a collection
that was removed with `rm -rf` holds history until somebody drops its hold. `Holds.needing` lists
the claims for GC, and `Holds.drop` removes an abandoned hold.

Invariants
1. A hold is never below the `since` of the moment it is handed out. It is durable by then, unless
   its owner promises to sync before relying on it.
2. A lost hold never holds again.
3. Holds that are taken together are written together: all of them are there, or none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter

from kvstore.arguments import require_age
from kvstore.claims import (
    BACKUP,
    FEED_HOLDS,
    READER_HOLDS,
    REPLICA,
    USER,
    HoldRecord,
    Pins,
    from_fields,
    one_line,
    this_process,
    to_fields,
)
from kvstore.commit import Committer
from kvstore.engine.api import WriteBatch
from kvstore.errors import FencedError, HoldLostError, UsageError
from kvstore.forks import own
from kvstore.meta import KeptRecords, Meta
from kvstore.timestamp import NS_PER_SECOND, TIMESTAMP_MAX, TimeLike, Timestamp

_PREFIX = "hold/"
_COPIES = (BACKUP, REPLICA)
_NAME = attrgetter("name")
_TIMESTAMP = attrgetter("timestamp")


class Hold:
    """An owner's handle on a hold. Leaving a `with` block releases it."""

    def __init__(self, holds: Holds, name: str, token: str, *, is_new: bool = False) -> None:
        self._holds = holds
        self.name = name
        self.token = token
        self.is_new = is_new
        """Whether no hold had this name before. The owner of such a hold releases it if its work
        fails."""

    @property
    def timestamp(self) -> Timestamp:
        """The time from which the hold keeps history. Raises `FencedError` if a newer owner has
        taken the hold, `HoldLostError` if it was invalidated."""
        return self._holds.require_owned(self.name, self.token).timestamp

    @property
    def state_from(self) -> bytes | None:
        """See `HoldRecord.state_from`. Raises as `timestamp`."""
        return self._holds.require_owned(self.name, self.token).state_from

    def move(
        self,
        to: TimeLike,
        *,
        durable: bool = True,
        reached: TimeLike | None = None,
        state_from: bytes | None = None,
    ) -> None:
        """Hold `to` instead, durably; if not `durable`, a crash may leave it at an older time.
        `reached` records that the owner has stored all changes below that time for good.

        Raises `FencedError` if a newer owner has taken the hold,
        `HoldLostError` if it was invalidated, `HistoryGoneError` below `since`,
        `NotYetWrittenError` in the future."""
        if state_from is None:
            self._holds.move(self.name, self.token, to, durable=durable, reached=reached)
        else:
            self._holds.note_state(self.name, self.token, state_from)

    def release(self) -> None:
        """Give up the hold, durably. Raises as `move`."""
        self._holds.release(self.name, self.token)

    def __repr__(self) -> str:
        return f"<kvstore.Hold {self.name!r}>"

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Holds:
    """The holds of one store, and with its pins all claims on its history."""

    def __init__(self, meta: Meta, committer: Committer, pins: Pins) -> None:
        self._meta = meta
        self._kept = KeptRecords(meta, _PREFIX, from_fields)
        self._committer = committer
        self.reload()
        self.pins = pins
        self.proofs: dict[str, Timestamp] = {}
        """When a drill last proved each backup, by address, as far as this process knows."""
        own(self, "the holds of a store", endings=("release",))

    def reload(self) -> None:
        """Take the records as they are stored: another process may have written them."""
        self._records = {record.name: record for record in self._kept.read()}

    def all(self) -> list[HoldRecord]:
        """All holds, by name."""
        return sorted(self._records.values(), key=_NAME)  # copied at once: others change it

    def take(
        self,
        name: str,
        at: TimeLike | None = None,
        max_age: timedelta | None = None,
        *,
        durable: bool = True,
        kind: str = USER,
        address: str = "",
    ) -> Hold:
        """Take the hold `name` for a new owner, fencing the one before.

        A new hold stands at `at`, or the newest complete time. An existing one stays where it is
        unless `at` is given. Raises `HistoryGoneError` if `at` is below `since`, and `UsageError`
        for a name of a feed's hold or of a lease.
        """
        _require_name(name)
        if name.startswith((FEED_HOLDS, READER_HOLDS)):
            raise UsageError(
                f"hold name {name!r} is one of a feed or of a reader, which it would fence",
                f"choose a name that begins with neither {FEED_HOLDS} nor {READER_HOLDS}; "
                "`kvstore holds drop` removes a hold that was abandoned",
            )
        when = None if at is None else self._committer.to_time(at, name="at")
        if max_age is not None:
            require_age(max_age, name="max_age")
        self._committer.health.require()
        taken = self.take_all(
            {name: when}, max_age=max_age, durable=durable, kind=kind, address=address
        )
        return taken[name]

    def take_all(
        self,
        wanted: Mapping[str, int | None],
        *,
        max_age: timedelta | None,
        durable: bool = True,
        kind: str = USER,
        address: str = "",
        state_from: bytes | None = None,
        dropping: Sequence[str] = (),
    ) -> dict[str, Hold]:
        """Take each name at its time, and drop others. One write does all of it, or nothing."""
        for name in (*wanted, kind):
            _require_name(name)
        if not isinstance(address, str):
            raise UsageError(f"address={address!r}", "pass a text")
        max_age_ns = None
        if max_age is not None:  # the record has no room for more, and no store is so old
            max_age_ns = min(int(max_age.total_seconds() * NS_PER_SECOND), TIMESTAMP_MAX)
        with self._committer.lock:
            taken: list[HoldRecord] = []
            holds: dict[str, Hold] = {}
            for name, at in wanted.items():
                known = self._records.get(name)
                former = None if known is None or known.lost else known
                now = self._committer.now()
                record = HoldRecord(
                    name,
                    self._time(former, at),
                    secrets.token_hex(8),
                    max_age_ns,
                    kind=kind,
                    address=one_line(address),
                    owner=this_process(),
                    created_at=now if former is None else former.created_at or now,
                    moved_at=now,
                    reached=None if known is None else known.reached,
                    state_from=former.state_from if former and at is None else state_from,
                )
                taken.append(record)
                holds[name] = Hold(self, name, record.token, is_new=former is None)
            self._write(taken, dropping)
        if durable:
            self._committer.persist()
        return holds

    def _time(self, former: HoldRecord | None, at: int | None) -> Timestamp:
        if at is not None:
            return Timestamp(self._committer.readable(at))
        if former is not None:
            return former.timestamp
        return Timestamp(self._committer.close_upto_now() - 1)

    def move(
        self,
        name: str,
        token: str,
        to: TimeLike,
        *,
        durable: bool = True,
        reached: TimeLike | None = None,
    ) -> None:
        """Compare-and-set on the token; see `Hold.move`."""
        at = self._committer.to_time(to, name="to")
        noted = None if reached is None else self._committer.to_time(reached, name="reached")
        with self._committer.lock:
            record = self.require_owned(name, token)
            self._committer.readable(at)
            now, noted = self._committer.now(), noted or record.reached
            moved = replace(record, timestamp=at, moved_at=now, reached=noted, state_from=None)
            self._write([moved])
        if durable:
            self._committer.persist()

    def note_state(self, name: str, token: str, state_from: bytes) -> None:
        """Record how far the owner has processed the state that its feed begins with, durably."""
        with self._committer.lock:
            record = self.require_owned(name, token)
            self._write([replace(record, moved_at=self._committer.now(), state_from=state_from)])
        self._committer.persist()

    def note_proof(self, address: str, at: Timestamp) -> None:
        """Have the metrics tell that a drill at `at` has proved the backup at `address`."""
        self.proofs[address] = max(at, self.proofs.get(address, at))

    def release(self, name: str, token: str) -> None:
        """See `Hold.release`."""
        with self._committer.lock:
            self.require_owned(name, token)
            self._write((), [name])
        self._committer.persist()

    def drop(self, name: str) -> HoldRecord:
        """Remove a hold whoever owns it: an operator's remedy for one that was abandoned.

        Returns the record that was removed. Raises `UsageError` if there is no such hold.
        """
        self._committer.require_writable()
        with self._committer.lock:
            record = self._records.get(name) if isinstance(name, str) else None
            if record is None:
                raise UsageError(
                    f"no hold {name!r}", "`kvstore holds list` or store.holds.all() names all holds"
                )
            self._write((), [name])
        self._committer.persist()
        return record

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

    def needing(self, below: int | None = None) -> tuple[HoldRecord, ...]:
        """The claims on history below a time (default: any), oldest first: the holds that are not
        lost, and the oldest pin of each kind."""
        held = [record for record in self.all() if not record.lost]
        claims = [*held, *self.pins.claims()]
        found = [claim for claim in claims if below is None or claim.timestamp < below]
        return tuple(sorted(found, key=_TIMESTAMP))

    def holder(self) -> str | None:
        """The oldest claim on history in words, holds before pins. None if there is none."""
        found = sorted(self.needing(), key=lambda record: record.is_pin)
        return found[0].describe(self._committer.now()) if found else None

    def invalidate_overdue(
        self, now: int, oldest_lacking: Callable[[int, int], int | None]
    ) -> list[HoldRecord]:
        """Mark the holds that are further behind than their budget as lost; returns them.

        The age of a backup or a replica counts from the oldest commit that it lacks, which
        `oldest_lacking` tells: the copy of an idle store is never behind.
        """

        def age(record: HoldRecord) -> int:
            begin: int | None = record.timestamp
            if record.kind in _COPIES:
                begin = oldest_lacking(record.timestamp, now)
            return 0 if begin is None else now - begin

        with self._committer.lock:
            overdue = [
                record
                for record in self._records.values()
                if not record.lost
                and record.max_age_ns is not None
                and now - record.timestamp > record.max_age_ns
                and age(record) > record.max_age_ns
            ]
            if overdue:
                self._write([replace(record, lost=True) for record in overdue])
                self._committer.persist()
            return overdue

    # -- inside -----------------------------------------------------------------------------

    def _write(self, records: Sequence[HoldRecord], dropping: Iterable[str] = ()) -> None:
        """Write records and remove others, at once. The caller waits for the disk outside the lock,
        so that commits continue."""
        doomed = [name for name in dropping if name in self._records]

        def stage(batch: WriteBatch) -> None:
            for record in records:
                self._meta.stage(batch, _PREFIX + record.name, to_fields(record))
            for name in doomed:
                self._meta.stage_delete(batch, _PREFIX + name)

        def show() -> None:
            self._records.update((record.name, record) for record in records)
            for name in doomed:
                del self._records[name]

        self._committer.write_meta(stage, show, durable=False)


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UsageError(f"hold name {name!r}", "pass a printable name")
