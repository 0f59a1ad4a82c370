"""Which adjacent batches are merged, and how a merge enters the state.

Size-tiered: going back from the newest batch, an older one joins the run while it is no larger
than all newer ones of the run together. A run of at least `MERGE_FAN_IN` batches is merged. So a
row is rewritten O(log n) times, and O(log n) batches remain.

A *slot* is a merge that was asked for and is not done yet. Its bounds are in the state, so any
process can do the merge if the one that asked has died. Planning counts a slot as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from backup.shard.state import commands as c
from backup.shard.state.state import ShardBatch, ShardState
from kvstore.limits import MERGE_FAN_IN

Slot = tuple[int, int]
EMPTY_BATCH_BYTES = 1024
"""The cost of an empty batch, for planning: its entry in the state, and a look at it."""


def plan_merge(batches: Sequence[ShardBatch], slots: Iterable[Slot]) -> Slot | None:
    """The run ending at the newest batch that should become one; None if it is too short.

    O(batches of the run): no older batch is looked at.
    """
    pending = tuple(slots)
    total = count = 0
    at = low = len(batches)
    while at:
        slot = covering(pending, (batches[at - 1].lower, batches[at - 1].upper))
        size = 0
        while True:
            at -= 1
            size += batches[at].size + EMPTY_BATCH_BYTES
            if slot is None or batches[at].lower <= slot[0] or (count and size > total):
                break
        if count and size > total:
            break
        low, total, count = at, total + size, count + 1
    return (batches[low].lower, batches[-1].upper) if count >= MERGE_FAN_IN else None


def part_of_slot(
    batches: Sequence[ShardBatch], fits: Callable[[Sequence[ShardBatch]], bool]
) -> Slot | None:
    """The newest run of `batches` that is worth a merge of its own, where a merge of all of them is
    due. Its oldest batches are left out until `fits` takes it. None if no run is long enough."""
    for end in range(len(batches), MERGE_FAN_IN - 1, -1):
        slot = plan_merge(batches[:end], ())
        run = [] if slot is None else [b for b in batches[:end] if slot[0] <= b.lower]
        while len(run) >= MERGE_FAN_IN and not fits(run):
            del run[0]
        if len(run) >= MERGE_FAN_IN:
            return run[0].lower, run[-1].upper
    return None


def add_slot(slots: Iterable[Slot], new: Slot) -> tuple[Slot, ...]:
    """`slots` with `new`, which replaces the slots inside it. A slot that covers `new` stays."""
    kept = [slot for slot in slots if not _covers(new, slot)]
    if any(_covers(slot, new) for slot in kept):
        return tuple(kept)
    return tuple(sorted([*kept, new]))


def covering(slots: Iterable[Slot], inner: Slot) -> Slot | None:
    """The slot that `inner` lies in."""
    return next((slot for slot in slots if _covers(slot, inner)), None)


def overlapping(slots: Iterable[Slot], new: Slot) -> Slot:
    """`new`, widened to whole slots where it cuts one: slots never overlap in part."""
    low, high = new
    for slot_low, slot_high in slots:
        if slot_low < high and low < slot_high:
            low, high = min(low, slot_low), max(high, slot_high)
    return low, high


def _covers(outer: Slot, inner: Slot) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def request_merge(state: ShardState, command: c.RequestMerge) -> tuple[ShardState, Any]:
    """Add a slot, unless one covers it or a merge would change nothing."""
    if state.is_tombstone:
        return state, c.MergeRequested(None)
    slot = overlapping(state.slots, (command.lower, command.upper))
    if slot in state.slots:
        return state, c.MergeRequested(slot)
    found = _between(state, *slot)
    if not found or (len(found) == 1 and found[0].since >= state.since and _one_run(found[0])):
        return state, c.MergeRequested(None)
    return state.next(slots=add_slot(state.slots, slot)), c.MergeRequested(slot)


def apply_merge(state: ShardState, command: c.ApplyMerge) -> tuple[ShardState, Any]:
    """Put the output of a merge in the place of its inputs, if they are still there."""
    output = command.output
    bounds = (output.lower, output.upper)
    found = _between(state, *bounds)
    if len(found) == 1 and found[0] == output:
        return state, c.MergeOutcome.ALREADY_APPLIED
    slot = covering(state.slots, bounds)
    if slot is None or not found or input_names(found) != command.inputs:
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


def input_names(batches: tuple[ShardBatch, ...]) -> frozenset[str]:
    """The identity of a merge's inputs: the names of all their parts, inline ones too."""
    return frozenset(part.name for batch in batches for part in batch.parts)


def _between(state: ShardState, lower: int, upper: int) -> tuple[ShardBatch, ...]:
    """The batches that make up `[lower, upper)`; none where a bound is not an edge."""
    found = tuple(b for b in state.batches if lower <= b.lower and b.upper <= upper)
    whole = found and found[0].lower == lower and found[-1].upper == upper
    return found if whole else ()


def _one_run(batch: ShardBatch) -> bool:
    return len({part.run for part in batch.parts}) <= 1 and not any(
        part.drop_below for part in batch.parts
    )
