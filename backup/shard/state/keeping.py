"""Instants that stay readable when `since` passes them: chosen by a policy, or labelled.

Only a readable instant becomes kept. The rows that it needs are there at that moment, and merges
leave them from then on. An instant that loses its last label stays until a policy chooses others.
Then a merge of all batches is asked for: a `since` that does not move asks for none.
"""

from __future__ import annotations

from typing import Any

from backup.shard.state import commands as c
from backup.shard.state.merging import add_slot, overlapping
from backup.shard.state.state import ShardState


def keep_instants(state: ShardState, command: c.KeepInstants) -> tuple[ShardState, Any]:
    """Keep the instants given, and the labelled ones."""
    if state.is_tombstone:
        return state, c.Kept(False)
    chosen = {time: () for time in command.instants if state.is_readable(time)}
    kept = chosen | {time: labels for time, labels in state.kept.items() if labels}
    if kept == state.kept:
        return state, c.Kept(True)
    slots = state.slots
    if state.batches and any(time < state.since for time in state.kept.keys() - kept.keys()):
        slots = add_slot(slots, overlapping(slots, (0, state.upper)))
    return state.next(kept=kept, slots=slots), c.Kept(True)


def label_instant(state: ShardState, command: c.LabelInstant) -> tuple[ShardState, Any]:
    """Give a label to a readable instant, unless another one has it."""
    found = labelled(state, command.label)
    if found is not None:
        return state, c.Kept(found == command.instant, found)
    if state.is_tombstone or not state.is_readable(command.instant):
        return state, c.Kept(False)
    labels = (*state.kept.get(command.instant, ()), command.label)
    kept = {**state.kept, command.instant: tuple(sorted(labels))}
    return state.next(kept=kept), c.Kept(True, command.instant)


def drop_label(state: ShardState, command: c.DropLabel) -> tuple[ShardState, Any]:
    """Take a label away."""
    found = labelled(state, command.label)
    if found is None:
        return state, c.Kept(False)
    labels = tuple(label for label in state.kept[found] if label != command.label)
    return state.next(kept={**state.kept, found: labels}), c.Kept(True, found)


def labelled(state: ShardState, label: str) -> int | None:
    """The instant that has a label."""
    return next((time for time, labels in state.kept.items() if label in labels), None)
