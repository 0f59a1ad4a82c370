"""Chains that a long reader holds: a lease on each, and a snapshot at its newest instant.

Invariants
1. A snapshot that is in use stays open, also after the reader has moved on.
2. A lease is moved up to the time that expiry has set, when the reader moves on. So a reader that
   refreshes does not hold expiry back for long.
3. A storage that takes no writes takes no lease. Then a part that is gone raises an error.
"""

from __future__ import annotations

from contextlib import suppress

from backup.chains import RETENTION, Chains
from backup.reading.rows import plain_span
from backup.shard import EMPTY, ReadLease, Shard
from backup.shard.snapshot import snapshot_unheld
from kvstore.errors import (
    AccessDeniedError,
    HistoryGoneError,
    LeaseExpiredError,
    OutOfSpaceError,
)
from kvstore.span import Span


class Held:
    """One chain, which covers `[since, upper)`."""

    def __init__(self, shard: Shard, lease: ReadLease | None = None) -> None:
        """Takes a lease unless one is given."""
        self.shard = shard
        self._lease = lease or _leased(shard)
        state = shard.refresh()
        self.upper = state.upper
        self.since = state.since if self._lease is None else self._lease.since
        self.kept = state.kept
        newest = self.upper - 1
        if self._lease is None:
            self.snapshot = snapshot_unheld(shard.log, newest)
        else:
            self.snapshot = self._lease.snapshot(newest)
        self.users = 0
        self._is_left = self._is_replaced = False
        self._is_mixed: bool | None = None

    def moved(self) -> Held | None:
        """The chain as it is now: this object if nothing has changed, None if it has expired."""
        state = self.shard.refresh()
        lease = self._lease
        if state.since == EMPTY or (lease is not None and lease.name not in state.leased):
            self.leave()
            return None if state.since == EMPTY else Held(self.shard)
        if lease is not None:
            self.snapshot.renew()
            retention = state.critical.get(RETENTION)
            if retention is not None and lease.since < retention.since < EMPTY:
                lease.downgrade_since(retention.since)
                self.since = lease.since
        if state.upper == self.upper and state.batches == self.snapshot.batches:
            self.kept = state.kept
            return self
        fresh = Held(self.shard, lease)
        self._is_replaced = True
        self.close_if_left()
        return fresh

    def plain(self, span: Span) -> Span:
        """`span` without the keys of tables and expiries, unless it begins among them."""
        if span.plain() == span:
            return span
        if self._is_mixed is None:
            self._is_mixed = plain_span(self.snapshot, Span()) != Span()
        return span.plain() if self._is_mixed else span

    def leave(self) -> None:
        """End the lease, once no snapshot of it is in use here."""
        self._is_left = True
        self.close_if_left()

    def close_if_left(self) -> None:
        """Close the snapshot if it is no longer wanted and not in use."""
        if self.users or not (self._is_left or self._is_replaced):
            return
        self.snapshot.close()
        if self._is_left and self._lease is not None:
            self._lease.leave()


def hold_chains(chains: Chains, held: list[Held]) -> None:
    """Move `held`, the chains that a reader holds, on to the chains of now, oldest first. After a
    failure each chain is held as it was, or as it is now."""
    record = chains.read()
    names = () if record is None else record.chains
    now = {each.shard.name: each for each in held}
    for name in names:
        found = _hold_chain(chains, name, now.get(name))
        if found is None:
            now.pop(name, None)
        else:
            now[name] = found
        held[:] = now.values()
    for name in now.keys() - set(names):
        now.pop(name).leave()
    held[:] = now.values()


def _hold_chain(chains: Chains, name: str, held: Held | None) -> Held | None:
    """Hold the chain `name`, which is `held` already if that is given. None if it has no backup,
    or has just expired."""
    if held is not None:
        with suppress(LeaseExpiredError):  # another process has just ended the lease
            return held.moved()
        held.leave()
    shard = chains.find(name)
    if shard is None or not shard.upper or shard.since == EMPTY:
        return None
    with suppress(HistoryGoneError):
        return Held(shard)
    return None


def _leased(shard: Shard) -> ReadLease | None:
    try:
        return shard.reader()
    except (AccessDeniedError, OutOfSpaceError):
        return None
