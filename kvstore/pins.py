"""Pins: claims of this process on history, for as long as something reads it.

Snapshots, transactions and long passes pin the time that they read. A pin is in memory only and
ends with the process. Durable claims are holds (`kvstore.holds`).

Invariants
1. A pin is never below the `since` of the moment it is set. It is set under the commit lock, under
   which GC and clears ask for the claims on history.
2. No interrupt leaves a pin behind: its owner takes the number, and prepares to let it go, before
   it pins a time.
"""

from __future__ import annotations

import itertools
from typing import TypeAlias

from kvstore.claims import HoldRecord
from kvstore.commit import Committer
from kvstore.forks import own
from kvstore.timestamp import Timestamp

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
        """Keep `as_of` readable until `pin` is let go, in place of the time that it kept before.

        `kind` says in messages what reads it. Raises `HistoryGoneError` and `NotYetWrittenError`.
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
