"""The sequencer: which changesets share an epoch, and when an epoch is complete.

Changesets overlap, so there is seldom a moment at which none is open. Two epochs suffice to cut
the stream of changes all the same: the older takes no more changesets and waits for its own to
finish, the newer takes all that begin meanwhile.

    quiescent --acquire--> draining(older, newer) --release--> draining | quiescent

Pure: state and command in, state and closed epochs out. Serials are given by the caller, in
ascending order.

Invariants
1. Epochs follow each other without a gap: each begins where the one before ended.
2. A changeset that begins while nothing is open has an epoch of its own, which ends right after
   it. So a burst begins with an epoch of one changeset.
3. Two changesets can overlap in time only if they are in the same or in neighbouring epochs.
4. An epoch is closed once, after all its changesets; epochs close in order, empty ones too.
5. An epoch that leaves the state quiescent proves that nothing was open when it closed.

Source: Backtrace's two-epoch sequencer.
"""

from __future__ import annotations

from typing import NamedTuple


class Older(NamedTuple):
    """The epoch that drains: it has an end, and takes no more changesets."""

    begin: int
    end: int
    in_flight: int
    events: int


class Newer(NamedTuple):
    """The epoch that takes what begins now; where the older one ends, it begins."""

    begin: int
    in_flight: int
    events: int


class SequencerState(NamedTuple):
    """Quiescent where both epochs are None; `end` is where the next epoch begins."""

    end: int
    older: Older | None = None
    newer: Newer | None = None


class Closed(NamedTuple):
    """An epoch `[begin, end)` of serials that is complete, with the events of its changesets."""

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
    """End a changeset of `epoch` that made `events`; `fresh` is a new serial, to cut with."""
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
    fresh = max(fresh, newer.begin + 1)  # no epoch is of no width; the next serial is not below
    if newer.in_flight:
        promoted = Older(newer.begin, fresh, newer.in_flight, newer.events)
        return SequencerState(older.begin, promoted, Newer(fresh, 0, 0)), closed
    closed.append(Closed(newer.begin, fresh, newer.events, quiescent=True))
    return SequencerState(fresh), closed
