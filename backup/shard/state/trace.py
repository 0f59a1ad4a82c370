"""The batches of a shard: adjacent stretches of time, each with its parts, and how they are merged.

A *batch* has the updates of `[lower, upper)` in sorted files, its *parts*. The rows are in the
parts; a state only names them.

Which batches are merged is size-tiered: going back from the newest batch, an older one joins the
run while it is no larger than all newer ones of the run together. A run of at least `MERGE_FAN_IN`
batches is merged. So a row is rewritten O(log n) times, and O(log n) batches remain.

A *slot* is a merge that was asked for and is not done yet. Its bounds are in the state, so any
process can do the merge if the one that asked has died. Planning counts a slot as one batch. Slots
never overlap in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.limits import MERGE_FAN_IN

Slot: TypeAlias = tuple[int, int]
EMPTY_BATCH_BYTES = 1024
"""The cost of an empty batch, for planning: its entry in the state, and a look at it."""


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One sorted Parquet file of a batch.

    `key_min` and `key_max` bound every key that the part touches, ends of range tombstones
    included. Both are inclusive and rounded outwards (`key_max` None: unbounded). Parts of one
    `run` follow each other in order; parts of different runs may interleave. `ranges` counts range
    tombstones. `checksum` is a digest of `kvstore.base.digest`.
    """

    name: str
    rows: int
    size: int
    checksum: str
    key_min: bytes
    key_max: bytes | None
    time_min: int
    time_max: int
    run: int = 0
    ranges: int = 0


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """The updates of `[lower, upper)`, of which compaction has left out what no reader from `since`
    on sees.

    `meta` is the caller's: a few short strings that travel with the batch until it is merged.
    """

    lower: int
    upper: int
    since: int = 0
    parts: tuple[ShardPart, ...] = ()
    meta: tuple[tuple[str, str], ...] = ()

    @property
    def rows(self) -> int:
        """The number of rows in the parts."""
        return sum(part.rows for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the parts as stored."""
        return sum(part.size for part in self.parts)

    def names(self) -> frozenset[str]:
        """The blobs that the batch needs."""
        return frozenset(part.name for part in self.parts)


def batches_of(batches: Sequence[ShardBatch], slot: Slot) -> tuple[ShardBatch, ...]:
    """The batches that make up a slot; none where one of its bounds is not an edge."""
    found = tuple(b for b in batches if slot[0] <= b.lower and b.upper <= slot[1])
    return found if found and (found[0].lower, found[-1].upper) == slot else ()


def input_names(batches: Iterable[ShardBatch]) -> frozenset[str]:
    """The names of all parts: the identity of a merge's inputs."""
    return frozenset(part.name for batch in batches for part in batch.parts)


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


def widened(slots: Iterable[Slot], new: Slot) -> Slot:
    """`new`, widened to whole slots where it cuts one."""
    low, high = new
    for slot_low, slot_high in slots:
        if slot_low < high and low < slot_high:
            low, high = min(low, slot_low), max(high, slot_high)
    return low, high


def _covers(outer: Slot, inner: Slot) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
