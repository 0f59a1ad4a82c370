"""Claims on history: the records of holds, and the pins of this process.

A hold is durable (`kvstore.holds`). A pin is in memory only and ends with the process: snapshots,
transactions and long passes pin the time that they read. Both are a `HoldRecord`, which tells a
person who claims history, for what, and since when.

    record of a hold := {timestamp, token, max_age_ns | null, lost,
                         kind, address, owner, created_at, moved_at, reached, state_from}

Invariants
1. A pin is never below the `since` of the moment it is set. It is set under the commit lock, under
   which GC and clears ask for the claims on history.
2. No interrupt leaves a pin behind: its owner takes the number, and enters the block that ends the
   pin, before it pins a time.
"""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvstore.codec.json import JsonObject
from kvstore.commit import Committer
from kvstore.forks import own
from kvstore.limits import HOLD_TEXT_CHARS_MAX
from kvstore.meta import optional_timestamp_of, timestamp_of
from kvstore.timestamp import NS_PER_SECOND, Timestamp

USER: Final = "user"
FEED: Final = "feed"
BACKUP: Final = "backup"
REPLICA: Final = "replica"
READER: Final = "reader"
FEED_HOLDS: Final = "feed/"
READER_HOLDS: Final = "reader/"
"""The holds of feeds and of leases have names that begin so. No other caller takes such a name: it
would fence the feed."""

_ADVICE: Final = {
    USER: ("its owner moves or releases it", "its owner's next call raises FencedError"),
    FEED: ("its consumer acks", "the feed's consumer is fenced and has to begin anew"),
    BACKUP: (
        "the next backup moves it",
        "the next backup may find that its window is gone, and then needs full=True",
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
