"""Merges of a follower: one thread merges small tiers, another the large ones.

A merge is large if small ones must not wait for it. Where small merges come late, the next tier
that is due takes in their batches and is a large one. Its small batches are then merged by
themselves: otherwise they would wait for the large merge under way, and each window brings more.

Invariants
1. A small merge never takes a batch that the large merge under way reads, because that merge would
   lose its inputs.
2. A small merge waits for no large one. A large merge waits for a small one that is in its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from backup.shard import Shard
from backup.shard.compact import merge_slot
from backup.shard.state.trace import ShardBatch, Slot, part_of_slot
from kvstore.limits import SMALL_MERGE_BYTES_MAX, SMALL_MERGE_ROWS_MAX

_NOWHERE: Final = (0, 0)


class TierMerges:
    """The merges that are due in a collection, done by one small and one large thread."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        """`is_stopped` is asked before each merge."""
        self._is_stopped = is_stopped
        self._moved = threading.Condition()
        self._small = _NOWHERE
        self._large: Slot | None = None
        """The tier that the large thread merges, or `_NOWHERE` while it pauses after a failure."""

    def merge_small(self, shard: Shard) -> None:
        """Merge the small tiers, and the small batches of tiers for which the large thread has no
        time now."""
        for slot in shard.refresh().slots:
            if is_small(_batches_of(shard, slot)):
                self._merge_taken(shard, self._take_whole(slot))
            else:
                while self._merge_taken(shard, self._take_part(shard, slot)):
                    pass

    def merge_large(self, shard: Shard) -> None:
        """Merge the large tiers."""
        slots = shard.refresh().slots
        self._large = None  # the pause after a failure is over
        for slot in slots:
            if self._is_stopped():
                return
            if is_small(_batches_of(shard, slot)):
                continue
            with self._moved:
                while _overlap(self._small, slot):
                    self._moved.wait()
                self._large = slot
            try:
                _merge(shard, slot)
            except BaseException:
                self._large = _NOWHERE
                raise
            self._large = None

    def _merge_taken(self, shard: Shard, slot: Slot | None) -> bool:
        """Merge a slot taken from the large thread, and give it back. Returns whether the result
        took the place of batches: a merge that was refused would be refused again at once."""
        if slot is None:
            return False
        try:
            return _merge(shard, slot)
        finally:
            with self._moved:
                self._small = _NOWHERE
                self._moved.notify_all()

    def _take_whole(self, slot: Slot) -> Slot | None:
        """Take a small tier from the large thread, unless it has grown into the tier that the large
        thread merges."""
        with self._moved:
            if self._is_stopped() or _overlap(slot, self._large or _NOWHERE):
                return None
            self._small = slot
            return slot

    def _take_part(self, shard: Shard, slot: Slot) -> Slot | None:
        """Take small batches of `slot` from the large thread, unless it merges the slot next."""
        batches = _batches_of(shard, slot)
        with self._moved:
            if self._large is None or self._is_stopped():
                return None
            newer = [batch for batch in batches if batch.lower >= self._large[1]]
            part = part_of_slot(newer, is_small)
            self._small = part or _NOWHERE
            return part


def _overlap(one: Slot, other: Slot) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def is_small(batches: Sequence[ShardBatch]) -> bool:
    """Whether a merge of `batches` is so short that other small merges may wait for it."""
    return (
        sum(batch.size for batch in batches) <= SMALL_MERGE_BYTES_MAX
        and sum(batch.rows for batch in batches) <= SMALL_MERGE_ROWS_MAX
    )


def _batches_of(shard: Shard, slot: Slot) -> list[ShardBatch]:
    return [b for b in shard.state.batches if slot[0] <= b.lower and b.upper <= slot[1]]


def _merge(shard: Shard, slot: Slot) -> bool:
    outcome = merge_slot(shard.log, slot)
    give_memory_back()
    return outcome.applied


def give_memory_back() -> None:
    """Return the memory of rows that are written to the system. Arrow's allocator would keep it for
    the next rows: hundreds of megabytes, in a service that has other uses for them."""
    pa.default_memory_pool().release_unused()
