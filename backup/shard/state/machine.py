"""The machine: what each command does to a shard's state, decided without touching anything.

`apply(state, command)` gives the next state and an outcome. It has two ways to answer, as
Materialize's persist names them: *continue* commits a new version, even where nothing but the
sequence number changed (so that the answer is linearised); *break* returns the state it was
given, and nothing is committed.

Rules that hold throughout
1. `since` and `upper` never move back.
2. Whoever is told that a write is refused can rely on it: nothing of it is in the state.
3. A tombstone breaks every command; only the bookkeeping of its own removal still commits.

Source of the rules: Materialize's persist (design documents and releases up to 2026).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from backup.shard.state import commands as c
from backup.shard.state.frontier import EMPTY
from backup.shard.state.state import (
    Batch,
    CriticalHold,
    LeasedReader,
    State,
    WriterState,
    is_anonymous,
)
from backup.shard.state.tiers import add_slot, covering, overlapping, plan_merge
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from kvstore.limits import INLINE_BYTES_MAX, ROLLUP_EVERY

OPAQUE_INITIAL = bytes(8)
"""The token of a critical hold that nobody has moved yet."""

_K = TypeVar("_K")
_V = TypeVar("_V")


def apply(state: State, command: c.Command) -> tuple[State, Any]:
    """Decide `command`. The state returned is `state` itself if and only if nothing commits.

    Raises `UsageError` where the command is a caller's mistake in any state.
    """
    return _HANDLERS[type(command)](state, command)


# -- queries ---------------------------------------------------------------------------------


def snapshot(state: State, as_of: int) -> tuple[Batch, ...]:
    """The batches that make up the shard at `as_of`; some hold later updates too.

    Raises `HistoryGoneError` below `since`, `NotYetWrittenError` at or above `upper` (wait).
    """
    if as_of < state.since:
        raise HistoryGoneError(as_of=as_of, since=state.since)
    if as_of >= state.upper:
        raise NotYetWrittenError(as_of=as_of, upper=state.upper)
    return tuple(batch for batch in state.batches if batch.lower <= as_of)


def next_listen_batch(state: State, frontier: int) -> Batch | None:
    """The batch that contains `frontier`; None: not written yet, wait.

    It may begin before `frontier` (compaction merged it): the reader drops what it has seen.
    """
    for batch in reversed(state.batches):
        if batch.lower <= frontier < batch.upper:
            return batch
    return None


# -- writing ---------------------------------------------------------------------------------


def _compare_and_append(state: State, command: c.CompareAndAppend) -> tuple[State, Any]:
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
    remembered = WriterState(command.token, batch.upper, command.now_ns)
    writers = _with(state.writers, command.writer, remembered)
    return _push(state, batch, writers=writers)


def _append(state: State, command: c.Append) -> tuple[State, Any]:
    batch = command.batch
    if (invalid := _invalid_bounds(batch)) is not None:
        return state, invalid
    if batch.upper <= state.upper:
        return state, c.AlreadyWritten(state.upper)
    if batch.lower > state.upper:
        return state, c.UpperMismatch(state.upper, None)
    return _push(state, truncated(batch, state.upper), writers=state.writers)


def _invalid_bounds(batch: Batch) -> c.InvalidBounds | c.InvalidEmptyInterval | None:
    if batch.upper < batch.lower:
        return c.InvalidBounds(batch.lower, batch.upper)
    return (
        c.InvalidEmptyInterval(batch.lower) if batch.upper == batch.lower and batch.parts else None
    )


def truncated(batch: Batch, lower: int) -> Batch:
    """`batch` without what lies below `lower`: whole parts leave, others drop rows when read."""
    parts = tuple(
        part if part.time_min >= lower else replace(part, drop_below=lower, diff_sum=None)
        for part in batch.parts
        if part.time_max >= lower
    )
    return replace(batch, lower=lower, parts=parts)


def _push(
    state: State, batch: Batch, *, writers: Mapping[str, WriterState]
) -> tuple[State, c.Appended]:
    """Add a batch that joins the upper. An empty one lengthens an empty one before it."""
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


def _expire_writer(state: State, command: c.ExpireWriter) -> tuple[State, Any]:
    if state.is_tombstone:
        return state, c.Expired(0)
    known = command.writer in state.writers
    return state.next(writers=_without(state.writers, command.writer)), c.Expired(int(known))


def _expire_idle_writers(state: State, command: c.ExpireIdleWriters) -> tuple[State, Any]:
    idle = {
        name
        for name, writer in state.writers.items()
        if is_anonymous(name) and writer.heartbeat_ns < command.before_ns
    }
    if not idle or state.is_tombstone:
        return state, c.Expired(0)
    writers = {name: writer for name, writer in state.writers.items() if name not in idle}
    return state.next(writers=writers), c.Expired(len(idle))


# -- reading and holding ---------------------------------------------------------------------


def _register_leased(state: State, command: c.RegisterLeasedReader) -> tuple[State, Any]:
    if state.is_tombstone:
        return state, c.ReaderRegistered(EMPTY, state.seqno)
    since = state.since
    if command.from_critical and state.critical:
        since = min(hold.since for hold in state.critical.values())
    seqno = state.seqno + 1
    reader = LeasedReader(seqno, since, command.now_ns, command.lease_ns)
    leased = _with(state.leased, command.reader, reader)
    return state.next(leased=leased), c.ReaderRegistered(since, seqno)


def _downgrade(state: State, command: c.DowngradeSince) -> tuple[State, Any]:
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
    after = state.next(leased=_with(state.leased, command.reader, moved))
    if command.since > reader.since:
        after = _meet(after)
    return after, c.Downgraded(moved.since)


def _expire_leased(state: State, command: c.ExpireLeasedReader) -> tuple[State, Any]:
    if state.is_tombstone:
        return state, c.Expired(0)
    known = command.reader in state.leased
    return state.next(leased=_without(state.leased, command.reader)), c.Expired(int(known))


def _expire_lapsed(state: State, command: c.ExpireLapsed) -> tuple[State, Any]:
    lapsed = {name for name, reader in state.leased.items() if reader.lapsed(command.now_ns)}
    if not lapsed or state.is_tombstone:
        return state, c.Expired(0)
    leased = {name: reader for name, reader in state.leased.items() if name not in lapsed}
    return state.next(leased=leased), c.Expired(len(lapsed))


def _register_critical(state: State, command: c.RegisterCritical) -> tuple[State, Any]:
    if state.is_tombstone:
        return state, c.CriticalRegistered(EMPTY, OPAQUE_INITIAL)
    hold = state.critical.get(command.reader) or CriticalHold(state.since, OPAQUE_INITIAL)
    critical = _with(state.critical, command.reader, hold)
    return state.next(critical=critical), c.CriticalRegistered(hold.since, hold.opaque)


def _compare_and_downgrade(state: State, command: c.CompareAndDowngrade) -> tuple[State, Any]:
    if len(command.opaque) != len(OPAQUE_INITIAL):
        raise UsageError(f"an opaque token has {len(OPAQUE_INITIAL)} bytes")
    if state.is_tombstone:
        return state, c.Downgraded(EMPTY)
    hold = state.critical.get(command.reader)
    if hold is None:
        raise UsageError(f"critical hold {command.reader!r} is not registered", "register it first")
    if hold.opaque != command.expected:
        return state.next(), c.OpaqueMismatch(hold.opaque, hold.since)
    moved = CriticalHold(max(hold.since, command.since), command.opaque)
    after = state.next(critical=_with(state.critical, command.reader, moved))
    if command.since >= hold.since:
        after = _meet(after)
    return after, c.Downgraded(moved.since)


def _expire_critical(state: State, command: c.ExpireCritical) -> tuple[State, Any]:
    if state.is_tombstone:
        return state, c.Expired(0)
    known = command.reader in state.critical
    return state.next(critical=_without(state.critical, command.reader)), c.Expired(int(known))


def _meet(state: State) -> State:
    """Move the shard's since up to the least that anyone holds. Never back."""
    held = [r.since for r in state.leased.values()] + [h.since for h in state.critical.values()]
    return replace(state, since=max(state.since, min(held))) if held else state


# -- compaction ------------------------------------------------------------------------------


def _request_merge(state: State, command: c.RequestMerge) -> tuple[State, Any]:
    if state.is_tombstone:
        return state, c.MergeRequested(None)
    slot = overlapping(state.slots, (command.lower, command.upper))
    if slot in state.slots:
        return state, c.MergeRequested(slot)
    found = _between(state, *slot)
    if not found or (len(found) == 1 and found[0].since >= state.since and _one_run(found[0])):
        return state, c.MergeRequested(None)
    return state.next(slots=add_slot(state.slots, slot)), c.MergeRequested(slot)


def _apply_merge(state: State, command: c.ApplyMerge) -> tuple[State, Any]:
    output = command.output
    bounds = (output.lower, output.upper)
    found = _between(state, *bounds)
    if len(found) == 1 and found[0] == output:
        return state, c.MergeOutcome.ALREADY_APPLIED
    slot = covering(state.slots, bounds)
    if slot is None or not found or part_names(found) != command.inputs:
        return state, c.MergeOutcome.NO_MATCH
    if output.since > state.since or output.since < max(b.since for b in found):
        return state, c.MergeOutcome.INVALID_SINCE
    if output.rows > sum(batch.rows for batch in found):
        return state, c.MergeOutcome.TOO_MANY_UPDATES
    sums = [batch.diff_sum for batch in found]
    known = sum(s for s in sums if s is not None)
    if None not in sums and output.diff_sum not in (None, known):
        return state, c.MergeOutcome.DIFF_SUM_CHANGED
    first = state.batches.index(found[0])
    batches = (*state.batches[:first], output, *state.batches[first + len(found) :])
    if slot == bounds:
        slots = tuple(s for s in state.slots if s != slot)
        return state.next(batches=batches, slots=slots), c.MergeOutcome.APPLIED_EXACT
    return state.next(batches=batches), c.MergeOutcome.APPLIED_SUBSET


def part_names(batches: tuple[Batch, ...]) -> frozenset[str]:
    """The identity of a merge's inputs: the names of all their parts, inline ones too."""
    return frozenset(part.name for batch in batches for part in batch.parts)


def _between(state: State, lower: int, upper: int) -> tuple[Batch, ...]:
    """The batches that make up `[lower, upper)`; none where a bound is not an edge."""
    found = tuple(b for b in state.batches if lower <= b.lower and b.upper <= upper)
    whole = found and found[0].lower == lower and found[-1].upper == upper
    return found if whole else ()


def _one_run(batch: Batch) -> bool:
    return len({part.run for part in batch.parts}) <= 1 and not any(
        part.drop_below for part in batch.parts
    )


# -- rollups, collection, the end ------------------------------------------------------------


def _add_rollup(state: State, command: c.AddRollup) -> tuple[State, Any]:
    if state.is_tombstone and max(state.rollups) >= state.tombstone_seqno:
        return state, c.RollupAdded(False)
    existing = state.rollups.get(command.seqno)
    if existing is not None:
        return state.next(), c.RollupAdded(existing == command.name)
    rollups = _with(state.rollups, command.seqno, command.name)
    return state.next(rollups=rollups), c.RollupAdded(True)


def _remove_rollups(state: State, command: c.RemoveRollups) -> tuple[State, Any]:
    newest = max(state.rollups, default=0)
    going = tuple(s for s, name in command.rollups if state.rollups.get(s) == name and s != newest)
    if not going:
        return state, c.RollupsRemoved(())
    rollups = {seqno: name for seqno, name in state.rollups.items() if seqno not in going}
    return state.next(rollups=rollups), c.RollupsRemoved(going)


def _request_gc(state: State, command: c.RequestGc) -> tuple[State, Any]:
    """Enough has piled up once a rollup's worth of versions can go; claiming it is durable."""
    del command
    target = state.seqno_since
    if state.is_tombstone or target - state.last_gc < ROLLUP_EVERY:
        return state, c.GcRequested(None)
    return state.next(last_gc=target), c.GcRequested(target)


def _finalise(state: State, command: c.Finalise) -> tuple[State, Any]:
    """Clear the handles, then blank one batch a step: no version is ever too large to write."""
    del command
    if state.is_tombstone:
        return state, c.Finalised(True, 0)
    if state.since != EMPTY or state.upper != EMPTY:
        return state, c.Finalised(False, None)
    full = [i for i, batch in enumerate(state.batches) if batch.parts or batch.meta]
    if state.leased or state.critical or state.writers or state.slots:
        cleared = state.next(leased={}, critical={}, writers={}, slots=())
        return cleared, c.Finalised(False, len(full) + 1)
    if full:
        blank = replace(state.batches[full[0]], parts=(), meta=())
        batches = (*state.batches[: full[0]], blank, *state.batches[full[0] + 1 :])
        return state.next(batches=batches), c.Finalised(False, len(full))
    after = state.next(batches=(Batch(0, EMPTY, EMPTY),), tombstone_seqno=state.seqno + 1)
    return after, c.Finalised(True, 0)


# -- schemas and versions --------------------------------------------------------------------


def _register_schema(state: State, command: c.RegisterSchema) -> tuple[State, Any]:
    if state.is_tombstone:
        return state, c.SchemaRegistered(None, "the shard is finished")
    for schema, columns in state.schemas.items():
        if columns == command.columns:
            return state.next(), c.SchemaRegistered(schema)
    if state.schemas:
        return state, c.SchemaRegistered(None, "another schema is registered: evolve it")
    return state.next(schemas={0: command.columns}), c.SchemaRegistered(0)


def _evolve_schema(state: State, command: c.EvolveSchema) -> tuple[State, Any]:
    if state.is_tombstone:
        return state, c.SchemaRegistered(None, "the shard is finished")
    newest = max(state.schemas, default=None)
    if newest is not None and state.schemas[newest] == command.columns:
        return state.next(), c.SchemaRegistered(newest)
    if newest is None or newest != command.expected:
        return state, c.SchemaRegistered(None, f"the newest schema is {newest}")
    old = {column.name: column for column in state.schemas[newest]}
    new = {column.name: column for column in command.columns}
    for name, column in old.items():
        if new.get(name) != column:
            return state, c.SchemaRegistered(None, f"column {name} is gone or changed")
    if any(not column.nullable for name, column in new.items() if name not in old):
        return state, c.SchemaRegistered(None, "a new column must be nullable")
    schemas = _with(state.schemas, newest + 1, command.columns)
    return state.next(schemas=schemas), c.SchemaRegistered(newest + 1)


def _upgrade_version(state: State, command: c.UpgradeVersion) -> tuple[State, Any]:
    if state.is_tombstone or command.version <= state.version:
        return state, c.VersionUpgraded(state.version)
    return state.next(version=command.version), c.VersionUpgraded(command.version)


def _with(mapping: Mapping[_K, _V], key: _K, value: _V) -> dict[_K, _V]:
    return {**mapping, key: value}


def _without(mapping: Mapping[_K, _V], key: _K) -> dict[_K, _V]:
    return {k: v for k, v in mapping.items() if k != key}


_HANDLERS: dict[type, Callable[[State, Any], tuple[State, Any]]] = {
    c.CompareAndAppend: _compare_and_append,
    c.Append: _append,
    c.ExpireWriter: _expire_writer,
    c.ExpireIdleWriters: _expire_idle_writers,
    c.RegisterLeasedReader: _register_leased,
    c.DowngradeSince: _downgrade,
    c.ExpireLeasedReader: _expire_leased,
    c.ExpireLapsed: _expire_lapsed,
    c.RegisterCritical: _register_critical,
    c.CompareAndDowngrade: _compare_and_downgrade,
    c.ExpireCritical: _expire_critical,
    c.RequestMerge: _request_merge,
    c.ApplyMerge: _apply_merge,
    c.AddRollup: _add_rollup,
    c.RemoveRollups: _remove_rollups,
    c.RequestGc: _request_gc,
    c.Finalise: _finalise,
    c.RegisterSchema: _register_schema,
    c.EvolveSchema: _evolve_schema,
    c.UpgradeVersion: _upgrade_version,
}
