"""Merges are planned from the newest batch back; a look at every batch gives the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore.backup.shard.state.trace import (
    EMPTY_BATCH_BYTES,
    ShardBatch,
    ShardPart,
    Slot,
    covering,
    part_of_slot,
    plan_merge,
)
from kvstore.limits import MERGE_FAN_IN

SIZES = st.sampled_from([0, 10, 1_000, 100_000, 1_000_000])


def of_size(lower: int, upper: int, size: int) -> ShardBatch:
    part = ShardPart("s/part/1-a", 1, size, "", b"a", b"b", lower, lower)
    return ShardBatch(lower, upper, parts=(part,))


def planned_of_all(batches: Sequence[ShardBatch], slots: Sequence[Slot]) -> Slot | None:
    """Every slot, and every batch outside one, is a unit; the run takes units while no unit is
    larger than all later units together."""
    units: dict[Slot, int] = {}
    for batch in batches:
        span = (batch.lower, batch.upper)
        unit = covering(slots, span) or span
        units[unit] = units.get(unit, 0) + batch.size + EMPTY_BATCH_BYTES
    run: list[Slot] = []
    total = 0
    for unit, size in reversed(units.items()):
        if run and size > total:
            break
        run.append(unit)
        total += size
    return (run[-1][0], run[0][1]) if len(run) >= MERGE_FAN_IN else None


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[ShardBatch], list[Slot]]:
    edges = [0, *range(3, 3 + draw(st.integers(0, 20)))]
    batches = [of_size(*span, draw(SIZES)) for span in pairwise(edges)]
    cuts: list[Any] = sorted(draw(st.sets(st.sampled_from(edges), max_size=6)))
    return batches, list(zip(cuts[::2], cuts[1::2], strict=False))


@given(chains())
def test_the_plan_is_that_of_looking_at_every_batch(
    chain: tuple[list[ShardBatch], list[Slot]],
) -> None:
    assert plan_merge(*chain) == planned_of_all(*chain)


@given(chains(), st.sampled_from([5_000, 150_000]))
def test_a_part_of_a_slot_is_the_newest_run_that_fits(
    chain: tuple[list[ShardBatch], list[Slot]], most: int
) -> None:
    batches, _ = chain

    def fits(run: Sequence[ShardBatch]) -> bool:
        return sum(batch.size for batch in run) <= most

    def newest_part() -> Slot | None:
        for end in range(len(batches), 0, -1):
            slot = plan_merge(batches[:end], [])
            low, high = slot or (0, 0)
            for first in range(end - MERGE_FAN_IN + 1):
                run = batches[first:end]
                if slot and low <= run[0].lower and run[-1].upper == high and fits(run):
                    return run[0].lower, high
        return None

    assert part_of_slot(batches, fits) == newest_part()


def test_equal_batches_behind_a_large_one_are_a_part() -> None:
    batches = [of_size(at, at + 1, 1_000_000 if at == 0 else 10) for at in range(1 + 3000)]
    assert plan_merge(batches, []) == (0, 3001)
    assert part_of_slot(batches, lambda run: sum(b.size for b in run) < 100_000) == (1, 3001)
