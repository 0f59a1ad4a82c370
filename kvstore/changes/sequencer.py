"""The sequencer: assigns changesets to epochs, and closes an epoch when it is complete.

Changesets overlap, so there is seldom a moment at which none is open. Two epochs suffice to cut the
stream of changes nevertheless: the older epoch takes no more changesets and waits for its own to
finish; the newer epoch takes the changesets that begin meanwhile.

    quiescent --acquire--> draining(older, newer) --release--> draining | quiescent

The functions are pure: they map a state and a command to a state and closed epochs. The caller
gives serials in ascending order.

Invariants
1. Epochs follow each other without a gap: each epoch begins where the one before ended.
2. A changeset that begins while no other is open has an epoch of its own, which ends at the next
   serial. So a burst begins with an epoch of one changeset.
3. Two changesets can overlap in time only if they are in the same or in neighbouring epochs.
4. An epoch is closed once, after all its changesets; epochs close in order, empty ones too.
5. If an epoch leaves the state quiescent, no changeset was open when it closed.

Source: Backtrace's two-epoch sequencer.
"""

from __future__ import annotations

from typing import NamedTuple


class Older(NamedTuple):
    """The epoch that drains. It has an end and takes no more changesets."""

    begin: int
    end: int
    in_flight: int
    events: int


class Newer(NamedTuple):
    """The epoch that new changesets join. It begins where the older one ends."""

    begin: int
    in_flight: int
    events: int


class SequencerState(NamedTuple):
    """Quiescent where both epochs are None; `end` is where the next epoch begins."""

    end: int
    older: Older | None = None
    newer: Newer | None = None


class Closed(NamedTuple):
    """A complete epoch of the serials `[begin, end)`, with the event count of its changesets."""

    begin: int
    end: int
    events: int
    quiescent: bool


def acquire(state: SequencerState, serial: int) -> tuple[SequencerState, int]:
    """Begin the changeset `serial`; returns the begin of the epoch it joined."""
    if state.older is None or state.newer is None:
        older = Older(state.end, serial + 1, 1, 0)
        return SequencerState(state.end, older, Newer(serial + 1, 0, 0)), older.begin
    newer = state.newer
    joined = newer._replace(in_flight=newer.in_flight + 1)
    return state._replace(newer=joined), newer.begin


def release(
    state: SequencerState, epoch: int, events: int, fresh: int
) -> tuple[SequencerState, list[Closed]]:
    """End a changeset of `epoch` that made `events`; `fresh` is a new serial for a cut."""
    older, newer = state.older, state.newer
    assert older is not None
    assert newer is not None
    if epoch == newer.begin:
        newer = newer._replace(in_flight=newer.in_flight - 1, events=newer.events + events)
        assert newer.in_flight >= 0
        return state._replace(newer=newer), []
    assert epoch == older.begin
    older = older._replace(in_flight=older.in_flight - 1, events=older.events + events)
    if older.in_flight:
        return state._replace(older=older), []
    closed = [Closed(older.begin, older.end, older.events, quiescent=False)]
    fresh = max(fresh, newer.begin + 1)  # each epoch holds a serial, so the next one begins above
    if newer.in_flight:
        promoted = Older(newer.begin, fresh, newer.in_flight, newer.events)
        return SequencerState(older.begin, promoted, Newer(fresh, 0, 0)), closed
    closed.append(Closed(newer.begin, fresh, newer.events, quiescent=True))
    return SequencerState(fresh), closed
