"""The sequencer, in every interleaving of a few changesets."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from kvstore.changes.epochs import Closed, SequencerState, acquire, release

CHANGESETS = 5


class World(NamedTuple):
    """Everything that happened so far: open changesets, ended changesets, closed epochs."""

    state: SequencerState
    clock: int
    open: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int, int | None], ...]
    closed: tuple[Closed, ...]
    begun_quiescent: tuple[int, ...]


def steps(world: World) -> list[World]:
    """Every world that one command leads to."""
    found = []
    if len(world.spans) < CHANGESETS:
        serial = world.clock + 1
        state, epoch = acquire(world.state, serial)
        alone = (*world.begun_quiescent, serial) if not world.open else world.begun_quiescent
        found.append(
            World(
                state,
                serial,
                (*world.open, (serial, epoch)),
                (*world.spans, (serial, serial, None)),
                world.closed,
                alone,
            )
        )
    for number, (serial, epoch) in enumerate(world.open):
        fresh = world.clock + 1
        # Each changeset makes as many events as its serial, so a count tells the changesets in an
        # epoch.
        state, closed = release(world.state, epoch, serial, fresh)
        spans = tuple(s if s[0] != serial else (serial, s[1], fresh) for s in world.spans)
        still_open = world.open[:number] + world.open[number + 1 :]
        found.append(
            World(
                state,
                fresh,
                still_open,
                spans,
                (*world.closed, *closed),
                world.begun_quiescent,
            )
        )
    return found


def check(world: World) -> None:
    closed, spans = world.closed, world.spans
    assert not closed or closed[0].begin == 0
    assert all(a.end == b.begin for a, b in pairwise(closed)), "a gap between epochs"
    for epoch in closed:
        assert epoch.begin < epoch.end
        members = [serial for serial, _, _ in spans if epoch.begin <= serial < epoch.end]
        assert epoch.events == sum(members), "a count that does not fit its changesets"
        assert all(end is not None for serial, _, end in spans if serial in members)
        # Nothing was open when a quiescent epoch closed: its end is the moment it closed.
        if epoch.quiescent:
            begun = [span for span in spans if span[1] < epoch.end]
            assert all(end is not None and end <= epoch.end for _, _, end in begun)
    edge = closed[-1].end if closed else 0
    assert all(serial >= edge for serial, _ in world.open), "closed over an open changeset"
    assert (world.state.older is None) == (not world.open), "quiescent is: nothing is open"
    if not world.open:
        assert all(serial < edge for serial, _, _ in spans), "a finished changeset waits"
    places = {
        serial: next((n for n, e in enumerate(closed) if e.begin <= serial < e.end), None)
        for serial, _, _ in spans
    }
    for a, b in overlapping(spans):
        if places[a] is not None and places[b] is not None:
            assert abs(places[a] - places[b]) <= 1, "overlap over more than neighbours"
    for serial in world.begun_quiescent:
        place = places[serial]
        if place is not None:
            inside = [s for s in places if closed[place].begin <= s < closed[place].end]
            assert inside == [serial], "the first epoch of a burst holds one changeset"


def overlapping(spans: tuple[tuple[int, int, int | None], ...]) -> list[tuple[int, int]]:
    late = 1 << 60
    return [
        (a[0], b[0])
        for number, a in enumerate(spans)
        for b in spans[number + 1 :]
        if b[1] < (a[2] or late)
    ]


def test_every_interleaving_keeps_the_invariants() -> None:
    seen, waiting = set(), [World(SequencerState(0), 0, (), (), (), ())]
    while waiting:
        world = waiting.pop()
        if world in seen:
            continue
        seen.add(world)
        check(world)
        waiting.extend(steps(world))
    # All orders in which 5 changesets can begin and end: 945 complete orders and their beginnings.
    complete = [w for w in seen if len(w.spans) == CHANGESETS and not w.open]
    assert len(complete) == 945
    assert all(w.closed[-1].quiescent for w in complete)


def test_a_lone_changeset_closes_its_epoch_and_an_empty_one() -> None:
    state, epoch = acquire(SequencerState(0), 10)
    state, closed = release(state, epoch, 3, 20)
    assert closed == [Closed(0, 11, 3, quiescent=False), Closed(11, 20, 0, quiescent=True)]
    assert state == SequencerState(20)


def test_empty_epochs_between_draining_ones_are_published() -> None:
    state, first = acquire(SequencerState(0), 1)
    state, second = acquire(state, 5)
    state, closed = release(state, first, 1, 9)
    assert closed == [Closed(0, 2, 1, quiescent=False)]
    state, closed = release(state, second, 1, 12)
    assert closed == [Closed(2, 9, 1, quiescent=False), Closed(9, 12, 0, quiescent=True)]
