"""Compaction: the batches of a slot become one. Rows that every reader from `since` on would skip
are left out.

Order of steps
1. The slot enters the state (an append planned it, or a caller asked), so a crash loses no work.
2. The merged rows are streamed into new parts.
3. One command puts the output in place, if the inputs of the merge are still there.
4. The inputs stay in blob until `gc` finds that no version and no reader needs them.

A crash or a lost race after 2 leaves parts that nothing names. They are deleted if the merge was
surely refused; otherwise `scrub` lists them. An output with an unknown fate is never deleted here.
"""

from __future__ import annotations

from typing import Protocol

from kvstore.backup.shard.rows.batch_reader import read_batches
from kvstore.backup.shard.rows.batch_writer import BatchDesc, delete_batch, part_names, write_batch
from kvstore.backup.shard.rows.part_reader import MissingPartError
from kvstore.backup.shard.rows.rules import Compact
from kvstore.backup.shard.state.state import MergeOutcome
from kvstore.backup.shard.state.state_log import StateLog
from kvstore.backup.shard.state.trace import ShardBatch, Slot, batches_of, input_names
from kvstore.base.meters import OnProgress, Tally
from kvstore.base.timestamp import TIMESTAMP_MAX


def request_all(log: StateLog) -> None:
    """Ask for one slot over all batches, unless a merge would gain nothing."""
    upper = log.refresh().upper
    log.apply(lambda state: state.request_merge(0, upper))


class Merge(Protocol):
    """Writes the rows of adjacent batches as the parts of one batch."""

    def __call__(
        self, log: StateLog, inputs: tuple[ShardBatch, ...], since: int, tally: Tally
    ) -> ShardBatch:
        """Merge the batches; leave out the rows that every reader from `since` on would skip.
        `tally` counts the written rows.

        Raises `MissingPartError` if an input is gone.
        """
        ...


def merge_here(
    log: StateLog, inputs: tuple[ShardBatch, ...], since: int, tally: Tally
) -> ShardBatch:
    """Merge in this process. Streams: memory is bounded."""
    lower, upper = inputs[0].lower, inputs[-1].upper
    view = Compact(lower, since, log.state.kept_below(since))
    rows = tally.over(read_batches(log.blob, inputs, view=view))
    desc = BatchDesc(lower, upper, since)
    return write_batch(log.blob, desc, rows, names=part_names(log.shard, log.clock))


def merge_slot(
    log: StateLog, slot: Slot, *, merge: Merge = merge_here, tally: Tally | None = None
) -> MergeOutcome:
    """Merge the batches of `slot` and put the result in place."""
    state = log.refresh()
    inputs = batches_of(state.batches, slot)
    if not inputs:
        return MergeOutcome.NO_MATCH
    since = min(state.since, TIMESTAMP_MAX)
    try:
        output = merge(log, inputs, since, tally or Tally())
    except MissingPartError:
        if inputs_in_place(log.refresh().batches, inputs):
            raise
        return MergeOutcome.NO_MATCH  # merged by another and collected, while we read
    applied = log.apply(lambda state: state.apply_merge(output, input_names(inputs)))
    if not applied.outcome.applied and not applied.unsure:
        delete_batch(log.blob, output)
    return applied.outcome


def merge_pending(
    log: StateLog, *, merge: Merge = merge_here, progress: OnProgress | None = None
) -> list[MergeOutcome]:
    """Merge every slot in the state, also the slots of crashed processes."""
    tally = Tally(progress)
    return [merge_slot(log, slot, merge=merge, tally=tally) for slot in log.refresh().slots]


def inputs_in_place(batches: tuple[ShardBatch, ...], inputs: tuple[ShardBatch, ...]) -> bool:
    """True if all `inputs` are still batches of the shard."""
    return set(inputs) <= set(batches)
