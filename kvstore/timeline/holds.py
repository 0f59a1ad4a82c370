"""Holds: named, durable claims on history. `since` never passes the least of them.

    hold/<name> := the record of a hold, see `HoldRecord`

Backups, feed positions, replicas and long readers hold. Taking a hold gives its owner a new
token, which moving and releasing it ask for; a former owner's token is out of date, and its calls
raise `FencedError`. A hold that falls further behind than its budget is marked lost when space is
wanted, and its owner's next call raises `HoldLostError`. Readers in this process claim history by
pins, which cost no write.

A record names the purpose and the owner of its hold, because a hold may outlive both: a
collection that was removed with `rm -rf` holds history until somebody drops its hold.
`Holds.needing` lists the claims for GC, and `Holds.drop` removes an abandoned hold.

Invariants
1. A hold is never below the `since` of the moment it is handed out. It is durable by then, unless
   its owner promises to sync before relying on it.
2. A lost hold never holds again.
3. Holds that are taken together are written together: all of them are there, or none.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, Final, TypeAlias

from kvstore.base.arguments import AGE, instance, printable
from kvstore.base.forks import own
from kvstore.base.timestamp import NS_PER_SECOND, TIMESTAMP_MAX, AgeLike, TimeLike, Timestamp
from kvstore.codec.json import JsonObject
from kvstore.engine.api import WriteBatch
from kvstore.errors import Argument, FencedError, HoldLostError, NotFoundError, UsageError
from kvstore.limits import HOLD_TEXT_CHARS_MAX
from kvstore.mvcc.meta import KeptRecords, Meta, optional_timestamp_of, timestamp_of
from kvstore.timeline.committer import Committer

# --------------------------------------------------------------------------------------------------
# Claims on history: the records of holds, and the pins of this process.
#
# A hold is durable. A pin is in memory only and ends with the process:
# snapshots, transactions and long passes pin the time that they read. Both are a `HoldRecord`,
# which tells a person who claims history, for what, and since when.
#
#     record of a hold := {timestamp, token, max_age_ns | null, lost,
#                          kind, address, owner, created_at, moved_at, reached, state_from}
#
# Invariants
# 1. A pin is never below the `since` of the moment it is set. It is set under the commit lock,
#    under which GC and clears ask for the claims on history.
# 2. No interrupt leaves a pin behind: its owner takes the number, and enters the block that ends
#    the pin, before it pins a time.

USER: Final = "user"
FEED: Final = "feed"
BACKUP: Final = "backup"
REPLICA: Final = "replica"
READER: Final = "reader"
FEED_HOLDS: Final = "feed/"
READER_HOLDS: Final = "reader/"
_HOLD_NAME: Final = printable("pass a printable name for the hold")
_ADDRESS: Final = instance(str, hint="pass a text")
"""The holds of feeds and of leases have names that begin so. No other caller takes such a name: it
would fence the feed."""

_ADVICE: Final = {
    USER: ("its owner moves or releases it", "its owner's next call raises FencedError"),
    FEED: ("its consumer acks", "the feed's consumer is fenced and has to begin anew"),
    BACKUP: (
        "the next backup moves it",
        "the next backup may find that its window is gone, and then needs --full (full=True)",
    ),
    REPLICA: (
        "the next replicate moves it",
        "a replica that still lags behind `since` has to be made anew",
    ),
    READER: (
        "it ends by itself, at the end of its time",
        "a reader of another machine may raise HistoryGoneError",
    ),
}
"""By kind: what moves a hold, and what dropping it costs."""


@dataclass(frozen=True, slots=True)
class HoldRecord:
    """A claim on history: a hold as it is stored, or a pin of this process (without a token).

    `timestamp` is the oldest time that must stay readable. `kind` says what the hold was taken for
    (`"user"`, `"feed"`, `"backup"`, `"replica"`, `"reader"`; `"snapshot"` and the like are pins),
    `address` where that is (the URL of a collection without secrets, the path of a replica, the
    name of a feed), `owner` which host and process took it last. `created_at` is the time the hold
    was first taken, `moved_at` the last time that an owner took or moved it.
    """

    name: str
    timestamp: Timestamp
    token: str
    max_age_ns: int | None
    lost: bool = False
    kind: str = USER
    address: str = ""
    owner: str = ""
    created_at: Timestamp | None = None
    moved_at: Timestamp | None = None
    reached: Timestamp | None = None
    """The owner has stored all changes below this time for good. A collection whose upper is lower
    has lost changes."""

    state_from: bytes | None = None
    """The least key of the state at `timestamp` that the consumer of a feed has not processed. None
    for a consumer that is behind the state, or began without it."""

    @property
    def is_pin(self) -> bool:
        """Whether this is a pin: it ends with the process, and cannot be dropped."""
        return not self.token

    def describe(self, now: int) -> str:
        """The claim in one line: its kind and name, its place, its owner, its times."""
        if self.is_pin:
            what = f"an open {self.kind} of this process"
        else:
            what = f"{self.kind} hold {self.name!r}"
        facts = [f"at {self.timestamp}"]
        facts += [f"of {self.address}"] if self.address else []
        facts += [f"by {self.owner}"] if self.owner and not self.is_pin else []
        facts += [f"since {self.created_at}"] if self.created_at is not None else []
        if self.moved_at is not None and not self.is_pin:
            facts.append(f"last moved {_age(now - self.moved_at)} ago")
        if not self.is_pin:
            facts.append(_budget(self))
        return f"{what} ({', '.join(facts)})"

    @property
    def remedy(self) -> str:
        """The step after which its history may be given up."""
        if self.is_pin:
            return "close it, or wait for its end"
        moved_by, cost = _ADVICE.get(self.kind, _ADVICE[USER])
        return f"{moved_by}; if the hold is abandoned, drop it (afterwards {cost})"

    @property
    def cost_of_dropping(self) -> str:
        """The error or limit that its owner meets after the hold was dropped."""
        return _ADVICE.get(self.kind, _ADVICE[USER])[1]


_Pin: TypeAlias = "tuple[int, str, int]"
"""The pinned time, the kind of the owner, and the time of pinning. Plain: one is made for each
transaction."""


class Pins:
    """The pins of one store, by number."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._pins: dict[int, _Pin] = {}
        self.new = itertools.count().__next__
        """A new number. It keeps nothing yet."""
        self.let_go = self._pins.pop
        """`let_go(pin, None)` ends a pin, and returns None if there was none. Repeatable, and one
        step that no signal divides, for `finally` and finalizers."""
        own(self, "the pins of a store", endings=("let_go",))

    def __len__(self) -> int:
        return len(self._pins)

    def keep(self, pin: int, as_of: int, *, kind: str) -> None:
        """Keep `as_of` readable until `pin` ends, in place of the time that it kept before.

        Messages tell the reader by its `kind`. Raises `HistoryGoneError` and `NotYetWrittenError`.
        """
        with self._committer.lock:
            self._committer.readable(as_of)
            self._pins[pin] = as_of, kind, self._committer.now()

    def keep_newest(self, pin: int, newest: int) -> None:
        """Keep the newest complete time for a transaction. The caller holds the commit lock. Hot:
        once per transaction."""
        self._pins[pin] = newest, "transaction", newest

    def claims(self) -> list[HoldRecord]:
        """The oldest pin of each kind, as a claim on history."""
        oldest: dict[str, _Pin] = {}
        for pin in list(self._pins.values()):  # copied at once: others change it
            oldest[pin[1]] = min(pin, oldest.get(pin[1], pin))
        return [
            HoldRecord("", Timestamp(at), "", None, kind=kind, created_at=Timestamp(since))
            for at, kind, since in oldest.values()
        ]


def to_fields(record: HoldRecord) -> dict[str, Any]:
    """The fields of a hold's record."""
    return {
        "timestamp": record.timestamp,
        "token": record.token,
        "max_age_ns": record.max_age_ns,
        "lost": record.lost,
        "kind": record.kind,
        "address": record.address,
        "owner": record.owner,
        "created_at": record.created_at,
        "moved_at": record.moved_at,
        "reached": record.reached,
        "state_from": None if record.state_from is None else record.state_from.hex(),
    }


def from_fields(name: str, record: JsonObject) -> HoldRecord:
    """A hold from its record. Raises `CorruptionError` where it is not of a hold's shape."""
    max_age_ns = record.optional_integer("max_age_ns")
    lost = record.field("lost", bool)
    if not name or (lost and max_age_ns is None):
        raise record.damaged("no hold is lost without a budget, or without a name")
    return HoldRecord(
        name,
        timestamp_of(record),
        record.text("token"),
        max_age_ns,
        lost,
        kind=record.text("kind"),
        address=record.text("address"),
        owner=record.text("owner"),
        created_at=optional_timestamp_of(record, "created_at"),
        moved_at=optional_timestamp_of(record, "moved_at"),
        reached=optional_timestamp_of(record, "reached"),
        state_from=_optional_key(record),
    )


def _optional_key(record: JsonObject) -> bytes | None:
    text = record.optional("state_from", str)
    return None if text is None else record.unhexed(text, name="state_from")


def this_process() -> str:
    """The host name and the process id of this process."""
    return one_line(f"{socket.gethostname()} process {os.getpid()}")


def one_line(text: str) -> str:
    """A text as one line of a message: of bounded length, with escapes for the rest."""
    return (text if text.isprintable() else ascii(text))[:HOLD_TEXT_CHARS_MAX]


def _age(ns: int) -> str:
    seconds = max(ns, 0) / NS_PER_SECOND
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _budget(record: HoldRecord) -> str:
    if record.max_age_ns is None:
        return "kept for ever"
    return f"kept for {_age(record.max_age_ns)}"


# --------------------------------------------------------------------------------------------------
# Holds.


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


def listed_names(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(f"{name!r:.60}" for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown or "none"


_NAMES_SHOWN: Final = 10


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

    def __repr__(self) -> str:
        return f"<kvstore.Holds: {listed_names([record.name for record in self.all()])}>"

    def all(self) -> list[HoldRecord]:
        """All holds, by name."""
        return sorted(self._records.values(), key=_NAME)  # copied at once: others change it

    def take(
        self,
        name: str,
        at: TimeLike | None = None,
        max_age: AgeLike | None = None,
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
        _HOLD_NAME.check("name", name)
        if name.startswith((FEED_HOLDS, READER_HOLDS)):
            raise UsageError(
                f"hold name {name!r} is one of a feed or of a reader, which it would fence",
                (
                    f"choose a name that begins with neither {FEED_HOLDS} nor {READER_HOLDS}; ",
                    Argument("store.holds.drop()"),
                    " removes a hold that was abandoned",
                ),
            )
        when = None if at is None else self._committer.to_time(at, name="at")
        age = AGE.or_none.check("max_age", max_age)
        self._committer.health.require()
        taken = self.take_all(
            {name: when}, max_age=age, durable=durable, kind=kind, address=address
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
        for name in wanted:
            _HOLD_NAME.check("name", name)
        printable("pass a printable text").check("kind", kind)
        _ADDRESS.check("address", address)
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
            self._committer.sync_all()
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
            self._committer.sync_all()

    def note_state(self, name: str, token: str, state_from: bytes) -> None:
        """Record how far the owner has processed the state that its feed begins with, durably."""
        with self._committer.lock:
            record = self.require_owned(name, token)
            self._write([replace(record, moved_at=self._committer.now(), state_from=state_from)])
        self._committer.sync_all()

    def note_proof(self, address: str, at: Timestamp) -> None:
        """Have the metrics tell that a drill at `at` has proved the backup at `address`."""
        self.proofs[address] = max(at, self.proofs.get(address, at))

    def release(self, name: str, token: str) -> None:
        """See `Hold.release`."""
        with self._committer.lock:
            self.require_owned(name, token)
            self._write((), [name])
        self._committer.sync_all()

    def drop(self, name: str) -> HoldRecord:
        """Remove a hold whoever owns it: an operator's remedy for one that was abandoned.

        Returns the record that was removed. Raises `NotFoundError` if there is no such hold.
        """
        self._committer.require_writable()
        with self._committer.lock:
            record = self._records.get(name) if isinstance(name, str) else None
            if record is None:
                raise NotFoundError(
                    f"no hold {name!r}",
                    (Argument("store.holds.all()"), " names all holds"),
                )
            self._write((), [name])
        self._committer.sync_all()
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
                self._committer.sync_all()
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

        mend = self._committer.mend_by(self.reload)
        self._committer.write_meta(stage, show, durable=False, mend=mend)
