"""Holders of history in a shard's state: leased readers and critical holds.

A leased reader holds `since` and a version until it stops renewing. A critical hold keeps `since`
and never expires; moving it takes its token. The shard's `since` is the least that any of them
holds, and never moves back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backup.shard.state import commands as c
from backup.shard.state.state import (
    EMPTY,
    CriticalHold,
    LeasedReader,
    ShardState,
    with_entry,
    without_entry,
)
from kvstore.errors import UsageError

OPAQUE_INITIAL = bytes(8)
"""The token of a critical hold that nobody has moved yet."""


def register_leased(state: ShardState, command: c.RegisterLeasedReader) -> tuple[ShardState, Any]:
    """Register a leased reader, at the version that this makes."""
    if state.is_tombstone:
        return state, c.ReaderRegistered(EMPTY, state.seqno)
    since = state.since
    if command.from_critical and state.critical:
        since = min(hold.since for hold in state.critical.values())
    seqno = state.seqno + 1
    reader = LeasedReader(seqno, since, command.now_ns, command.lease_ns)
    leased = with_entry(state.leased, command.reader, reader)
    return state.next(leased=leased), c.ReaderRegistered(since, seqno)


def downgrade(state: ShardState, command: c.DowngradeSince) -> tuple[ShardState, Any]:
    """Move a leased reader forward and renew its lease."""
    reader = state.leased.get(command.reader)
    if reader is None or state.is_tombstone:
        return state, c.Downgraded(EMPTY)
    now = state.seqno + 1
    outstanding = now if command.outstanding is None else min(command.outstanding, now)
    moved = replace(
        reader,
        seqno=max(reader.seqno, outstanding),
        since=max(reader.since, command.since),
        heartbeat_ns=max(reader.heartbeat_ns, command.now_ns),
    )
    after = state.next(leased=with_entry(state.leased, command.reader, moved))
    if command.since > reader.since:
        after = _meet(after)
    return after, c.Downgraded(moved.since)


def expire_leased(state: ShardState, command: c.ExpireLeasedReader) -> tuple[ShardState, Any]:
    """Forget a leased reader."""
    if state.is_tombstone:
        return state, c.Expired(0)
    known = command.reader in state.leased
    return state.next(leased=without_entry(state.leased, command.reader)), c.Expired(int(known))


def expire_lapsed(state: ShardState, command: c.ExpireLapsed) -> tuple[ShardState, Any]:
    """Forget all leased readers whose lease has run out."""
    lapsed = state.lapsed_readers(command.now_ns)
    if not lapsed or state.is_tombstone:
        return state, c.Expired(0)
    leased = {name: reader for name, reader in state.leased.items() if name not in lapsed}
    return state.next(leased=leased), c.Expired(len(lapsed))


def register_critical(state: ShardState, command: c.RegisterCritical) -> tuple[ShardState, Any]:
    """Register a critical hold; an existing one stays as it is."""
    if state.is_tombstone:
        return state, c.CriticalRegistered(EMPTY, OPAQUE_INITIAL)
    hold = state.critical.get(command.reader) or CriticalHold(state.since, OPAQUE_INITIAL)
    critical = with_entry(state.critical, command.reader, hold)
    return state.next(critical=critical), c.CriticalRegistered(hold.since, hold.opaque)


def compare_and_downgrade(
    state: ShardState, command: c.CompareAndDowngrade
) -> tuple[ShardState, Any]:
    """Move a critical hold if its token is the expected one."""
    if len(command.opaque) != len(OPAQUE_INITIAL):
        raise UsageError(
            f"an opaque token has {len(OPAQUE_INITIAL)} bytes",
            "pass the token that the holder was given",
        )
    if state.is_tombstone:
        return state, c.Downgraded(EMPTY)
    hold = state.critical.get(command.reader)
    if hold is None:
        raise UsageError(f"critical hold {command.reader!r} is not registered", "register it first")
    if hold.opaque != command.expected:
        return state.next(), c.OpaqueMismatch(hold.opaque, hold.since)
    moved = CriticalHold(max(hold.since, command.since), command.opaque)
    after = state.next(critical=with_entry(state.critical, command.reader, moved))
    if command.since >= hold.since:
        after = _meet(after)
    return after, c.Downgraded(moved.since)


def expire_critical(state: ShardState, command: c.ExpireCritical) -> tuple[ShardState, Any]:
    """Forget a critical hold."""
    if state.is_tombstone:
        return state, c.Expired(0)
    known = command.reader in state.critical
    return state.next(critical=without_entry(state.critical, command.reader)), c.Expired(int(known))


def _meet(state: ShardState) -> ShardState:
    """Move the shard's since up to the least that anyone holds. Never back."""
    held = [r.since for r in state.leased.values()] + [h.since for h in state.critical.values()]
    return replace(state, since=max(state.since, min(held))) if held else state
