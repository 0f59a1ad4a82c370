"""The machine: a pure function decides what each command does to a shard's state.

`apply(state, command)` gives the next state and an outcome. It answers in one of two ways, named as
in Materialize's persist. *Continue* returns a new version to be committed, even where only the
sequence number has changed (so that the answer is linearised). *Break* returns the given state, and
nothing is committed.

Rules that hold throughout
1. `since` and `upper` never move back.
2. A refused write has left nothing in the state.
3. A tombstone breaks every command except the ones that remove its own rollups.

Source of the rules: Materialize's persist (design documents and releases up to 2026).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from backup.shard.state import commands as c
from backup.shard.state import holding, keeping, merging
from backup.shard.state.merging import add_slot, covering, plan_merge
from backup.shard.state.state import (
    EMPTY,
    LastAppend,
    ShardBatch,
    ShardState,
    with_entry,
    without_entry,
)
from kvstore.errors import HistoryGoneError, NotYetWrittenError
from kvstore.limits import INLINE_BYTES_MAX


def apply(state: ShardState, command: c.Command) -> tuple[ShardState, Any]:
    """Decide `command`. The state returned is `state` itself if and only if nothing commits.

    Raises `UsageError` where the command is a caller's mistake in any state.
    """
    return _HANDLERS[type(command)](state, command)


def snapshot(state: ShardState, as_of: int) -> tuple[ShardBatch, ...]:
    """The batches that make up the shard at `as_of`; some have later updates too.

    Raises `HistoryGoneError` below `since`, except at kept instants, and `NotYetWrittenError` at or
    above `upper` (wait).
    """
    if as_of < state.since and as_of not in state.kept:
        raise HistoryGoneError(as_of=as_of, since=state.since)
    if as_of >= state.upper:
        raise NotYetWrittenError(as_of=as_of, upper=state.upper)
    return tuple(batch for batch in state.batches if batch.lower <= as_of)


def next_listen_batch(state: ShardState, frontier: int) -> ShardBatch | None:
    """The batch that contains `frontier`; None: not written yet, wait.

    A batch that compaction has merged may begin before `frontier`: the reader drops older rows.
    """
    for batch in reversed(state.batches):
        if batch.lower <= frontier < batch.upper:
            return batch
    return None


def _compare_and_append(state: ShardState, command: c.CompareAndAppend) -> tuple[ShardState, Any]:
    batch, writer = command.batch, state.writers.get(command.writer)
    if state.is_tombstone:
        return state, c.UpperMismatch(EMPTY, EMPTY)
    if (invalid := _invalid_bounds(batch)) is not None:
        return state, invalid
    if writer is not None and writer.token == command.token:
        return state, c.AlreadyCommitted(state.upper)
    if state.upper != batch.lower:
        return state, c.UpperMismatch(state.upper, None if writer is None else writer.upper)
    held = state.inline_bytes() if any(p.inline is not None for p in batch.parts) else 0
    if held + sum(len(p.inline) for p in batch.parts if p.inline is not None) > INLINE_BYTES_MAX:
        return state, c.InlineBackpressure(held)
    remembered = LastAppend(command.token, batch.upper, command.now_ns)
    writers = with_entry(state.writers, command.writer, remembered)
    return _push(state, batch, writers=writers)


def _append(state: ShardState, command: c.Append) -> tuple[ShardState, Any]:
    batch = command.batch
    if (invalid := _invalid_bounds(batch)) is not None:
        return state, invalid
    if batch.upper <= state.upper:
        return state, c.AlreadyWritten(state.upper)
    if batch.lower > state.upper:
        return state, c.UpperMismatch(state.upper, None)
    return _push(state, truncated(batch, state.upper), writers=state.writers)


def _invalid_bounds(batch: ShardBatch) -> c.InvalidBounds | c.InvalidEmptyInterval | None:
    if batch.upper < batch.lower:
        return c.InvalidBounds(batch.lower, batch.upper)
    return (
        c.InvalidEmptyInterval(batch.lower) if batch.upper == batch.lower and batch.parts else None
    )


def truncated(batch: ShardBatch, lower: int) -> ShardBatch:
    """`batch` without rows below `lower`: whole parts leave, others drop such rows when read."""
    parts = tuple(
        part if part.time_min >= lower else replace(part, drop_below=lower, diff_sum=None)
        for part in batch.parts
        if part.time_max >= lower
    )
    return replace(batch, lower=lower, parts=parts)


def _push(
    state: ShardState, batch: ShardBatch, *, writers: Mapping[str, LastAppend]
) -> tuple[ShardState, c.Appended]:
    """Add a batch that joins the upper. An empty batch lengthens an empty batch before it."""
    if batch.lower == batch.upper:
        return state.next(writers=writers), c.Appended(state.upper)
    batches = (*state.batches, batch)
    last = state.batches[-1] if state.batches else None
    in_slot = last is not None and covering(state.slots, (last.lower, last.upper))
    if last is not None and not (batch.parts or last.parts or batch.meta or last.meta or in_slot):
        batches = (*state.batches[:-1], replace(last, upper=batch.upper))
    slot = plan_merge(batches, state.slots)
    slots = state.slots if slot is None else add_slot(state.slots, slot)
    merges = () if slot is None or slots == state.slots else (slot,)
    after = state.next(upper=batch.upper, batches=batches, slots=slots, writers=writers)
    return after, c.Appended(batch.upper, merges)


def _expire_writer(state: ShardState, command: c.ExpireWriter) -> tuple[ShardState, Any]:
    if state.is_tombstone:
        return state, c.Expired(0)
    known = command.writer in state.writers
    return state.next(writers=without_entry(state.writers, command.writer)), c.Expired(int(known))


def _expire_idle_writers(state: ShardState, command: c.ExpireIdleWriters) -> tuple[ShardState, Any]:
    idle = state.idle_writers(command.before_ns)
    if not idle or state.is_tombstone:
        return state, c.Expired(0)
    writers = {name: writer for name, writer in state.writers.items() if name not in idle}
    return state.next(writers=writers), c.Expired(len(idle))


def _add_rollup(state: ShardState, command: c.AddRollup) -> tuple[ShardState, Any]:
    if state.is_tombstone and max(state.rollups) >= state.tombstone_seqno:
        return state, c.RollupAdded(False)
    existing = state.rollups.get(command.seqno)
    if existing is not None:
        return state.next(), c.RollupAdded(existing == command.name)
    rollups = with_entry(state.rollups, command.seqno, command.name)
    return state.next(rollups=rollups), c.RollupAdded(True)


def _remove_rollups(state: ShardState, command: c.RemoveRollups) -> tuple[ShardState, Any]:
    newest = max(state.rollups, default=0)
    going = tuple(s for s, name in command.rollups if state.rollups.get(s) == name and s != newest)
    if not going:
        return state, c.RollupsRemoved(())
    rollups = {seqno: name for seqno, name in state.rollups.items() if seqno not in going}
    return state.next(rollups=rollups), c.RollupsRemoved(going)


def _request_gc(state: ShardState, command: c.RequestGc) -> tuple[ShardState, Any]:
    """Claim the collection that is due, so that only one process is told to collect."""
    del command
    target = state.gc_target
    return (state if target is None else state.next(last_gc=target)), c.GcRequested(target)


def _finalise(state: ShardState, command: c.Finalise) -> tuple[ShardState, Any]:
    """Clear the handles, then blank one batch a step: no version is ever too large to write."""
    del command
    if state.is_tombstone:
        return state, c.Finalised(True, 0)
    if state.since != EMPTY or state.upper != EMPTY:
        return state, c.Finalised(False, None)
    full = [i for i, batch in enumerate(state.batches) if batch.parts or batch.meta]
    if state.leased or state.critical or state.writers or state.slots or state.kept:
        cleared = state.next(leased={}, critical={}, writers={}, slots=(), kept={})
        return cleared, c.Finalised(False, len(full) + 1)
    if full:
        blank = replace(state.batches[full[0]], parts=(), meta=())
        batches = (*state.batches[: full[0]], blank, *state.batches[full[0] + 1 :])
        return state.next(batches=batches), c.Finalised(False, len(full))
    after = state.next(batches=(ShardBatch(0, EMPTY, EMPTY),), tombstone_seqno=state.seqno + 1)
    return after, c.Finalised(True, 0)


_HANDLERS: dict[type, Callable[[ShardState, Any], tuple[ShardState, Any]]] = {
    c.CompareAndAppend: _compare_and_append,
    c.Append: _append,
    c.ExpireWriter: _expire_writer,
    c.ExpireIdleWriters: _expire_idle_writers,
    c.RegisterLeasedReader: holding.register_leased,
    c.DowngradeSince: holding.downgrade,
    c.ExpireLeasedReader: holding.expire_leased,
    c.ExpireLapsed: holding.expire_lapsed,
    c.RegisterCritical: holding.register_critical,
    c.CompareAndDowngrade: holding.compare_and_downgrade,
    c.ExpireCritical: holding.expire_critical,
    c.KeepInstants: keeping.keep_instants,
    c.LabelInstant: keeping.label_instant,
    c.DropLabel: keeping.drop_label,
    c.RequestMerge: merging.request_merge,
    c.ApplyMerge: merging.apply_merge,
    c.AddRollup: _add_rollup,
    c.RemoveRollups: _remove_rollups,
    c.RequestGc: _request_gc,
    c.Finalise: _finalise,
}
