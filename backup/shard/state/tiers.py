"""Which adjacent batches to merge, so that reads stay short and each row is rewritten seldom.

Size-tiered: going back from the newest batch, an older one joins the run while it is no larger
than all newer ones of the run together. Runs of `MERGE_FAN_IN` or more are merged. So a row is
rewritten O(log n) times, and O(log n) batches remain.

A merge that was asked for and is not done yet is a *slot*: its bounds are in the state, so any
process can do it if the one that asked has died. For further planning a slot counts as one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from backup.shard.state.state import Batch
from kvstore.limits import MERGE_FAN_IN

Slot = tuple[int, int]

_EMPTY_BATCH_BYTES = 1024
"""The cost of an empty batch: its entry in the state, and a look at it."""


def plan_merge(batches: Sequence[Batch], slots: Iterable[Slot]) -> Slot | None:
    """The run ending at the newest batch that should become one; None if it is too short.

    O(batches of the run): it looks no further back.
    """
    pending = tuple(slots)
    total = count = 0
    at = low = len(batches)
    while at:
        slot = covering(pending, (batches[at - 1].lower, batches[at - 1].upper))
        size = 0
        while True:
            at -= 1
            size += batches[at].size + _EMPTY_BATCH_BYTES
            if slot is None or batches[at].lower <= slot[0] or (count and size > total):
                break
        if count and size > total:
            break
        low, total, count = at, total + size, count + 1
    return (batches[low].lower, batches[-1].upper) if count >= MERGE_FAN_IN else None


def add_slot(slots: Iterable[Slot], new: Slot) -> tuple[Slot, ...]:
    """`slots` and `new`, which swallows those inside it. A slot that already covers it stays."""
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
