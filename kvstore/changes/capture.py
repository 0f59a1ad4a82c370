"""Capture: tags each commit with its changeset and closes the epochs of one domain.

All functions here run under the commit lock. A commit outside any changeset is a changeset of its
own, which begins and ends inside the commit: that costs 1.5 us and no write. Closed epochs wait in
memory; a later commit writes them, or `sync` or `close` does.

Invariants
1. A run of epochs is written with or after the commits that it counts. Batches survive a crash in
   their order, so the events of a stored record are stored too.
2. After a crash one epoch, counted from the change index, replaces the epochs that were not
   written. It ends the domain, because no changeset can be open in a process that is gone.
3. A close ends the domain in the same way, and cuts the changesets that are still open.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from kvstore.changes.changeset import DOMAIN_MAX, Changeset, ChangesetId, Serials, ambient
from kvstore.changes.epoch import (
    FIELDS,
    FLAG_ENDED,
    FLAG_QUIESCENT,
    PREFIX,
    Epoch,
    epoch_of,
    pack_run,
    record_of,
    run_head,
    run_name,
    unpack_run,
)
from kvstore.changes.index import ChangeIndex
from kvstore.changes.sequencer import Closed, SequencerState, acquire, release
from kvstore.engine.api import Engine, WriteBatch
from kvstore.limits import EPOCH_EVENTS_PENDING_MAX, EPOCHS_PENDING_MAX
from kvstore.meta import INDEX_FLOOR, Meta

_QUIESCENT_ENDED: Final = FLAG_QUIESCENT | FLAG_ENDED

Begun: TypeAlias = "tuple[tuple[int, int], Changeset | None]"
"""A commit that has begun: the id that tags its entries, and the open changeset around it."""


class Capture:
    """The changesets and epochs of one domain. The caller holds the commit lock."""

    def __init__(self, meta: Meta, serials: Serials, *, domain: int, run: int, quiet: int) -> None:
        self._meta = meta
        self._serials = serials
        self.domain = domain
        self.state = SequencerState(0)
        self._begin = 0
        self._pending = array("Q")
        self._pending_events = 0
        self._run = run
        self.quiet = quiet
        self.open: set[Changeset] = set()
        self.recovered: list[Epoch] = []
        """The epochs of processes that died, which this opening ended."""

    # -- commits ----------------------------------------------------------------------------

    def begin_commit(self, timestamp: int) -> Begun:
        """Find the changeset of a commit at `timestamp`, before it is staged. Hot: once per commit.

        A commit outside any changeset takes two serials in a row: its own, at which its epoch
        ends, and the one at which the empty epoch behind it ends.
        """
        changeset = ambient(self)
        if changeset is not None:
            assert changeset.id is not None
            return changeset.id, changeset
        return (self.domain, self._serials.next(timestamp, taken=2)), None

    def finish_commit(self, begun: Begun, events: int, upper: int) -> None:
        """Count a written commit with `events` in the change index; `upper` is above its time."""
        (_, serial), changeset = begun
        if changeset is not None:
            changeset.events += events
        elif events:
            state = self.state
            if state.older is None:
                # `acquire` and `release` in one step, without their objects: 0.8 us less.
                fresh = serial + 2
                self._pending.extend(
                    (serial + 1, upper, events, 0, fresh, upper, 0, FLAG_QUIESCENT)
                )
                self._pending_events += events
                self.state = SequencerState(fresh)
                self.quiet = upper
            else:
                self.state, epoch = acquire(state, serial)
                self._release(epoch, events, upper)

    # -- changesets -------------------------------------------------------------------------

    def begin_changeset(self, changeset: Changeset, now_ns: int) -> None:
        """Give a changeset its id and its epoch; `now_ns` is the time."""
        serial = self._serials.next(now_ns)
        self.state, changeset.epoch = acquire(self.state, serial)
        changeset.id = ChangesetId(self.domain, serial)
        self.open.add(changeset)

    def finish_changeset(self, changeset: Changeset, upper: int) -> None:
        """End a changeset, and close the epochs that waited for it."""
        self.open.discard(changeset)
        self._release(changeset.epoch, changeset.events, upper)

    def _release(self, epoch: int, events: int, upper: int) -> None:
        self.state, closed = release(self.state, epoch, events, self._serials.step())
        for each in closed:
            self._close(each, upper)

    def _close(self, closed: Closed, upper: int) -> None:
        flags = FLAG_QUIESCENT if closed.quiescent else 0
        self._pending.extend((closed.end, upper, closed.events, flags))
        self._pending_events += closed.events
        if closed.quiescent:
            self.quiet = upper

    @property
    def is_quiescent(self) -> bool:
        """Whether no changeset is open."""
        return self.state.older is None

    # -- records ----------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether enough epochs wait for the next commit to write them."""
        return (
            len(self._pending) >= EPOCHS_PENDING_MAX * FIELDS
            or self._pending_events >= EPOCH_EVENTS_PENDING_MAX
        )

    @property
    def has_pending(self) -> bool:
        """Whether closed epochs wait to be written."""
        return bool(self._pending)

    def stage(self, batch: WriteBatch) -> None:
        """Add the waiting epochs to an engine batch. From here on they count as written."""
        if not self._pending:
            return
        record = pack_run(self.domain, self._begin, self._pending, quiet=self.quiet)
        self._meta.stage(batch, run_name(self._run), record)
        self._run += 1
        self._begin = self._pending[-FIELDS]
        self._pending = array("Q")
        self._pending_events = 0

    def end(self, batch: WriteBatch, upper: int) -> None:
        """End the domain, in which no commit will follow. Cuts the open changesets."""
        state = self.state
        if state.older is not None and state.newer is not None:
            events = state.older.events + state.newer.events + sum(c.events for c in self.open)
            last = max(self._serials.step(), state.newer.begin + 1)
            self._pending.extend((last, upper, events, _QUIESCENT_ENDED))
            self.state = SequencerState(last)
            self.open.clear()
        self.quiet = upper
        record = pack_run(self.domain, self._begin, self._pending, quiet=upper)
        self._meta.stage(batch, run_name(self._run), record)
        self._run += 1
        self._pending = array("Q")

    def begin_anew(self, engine: Engine, index: ChangeIndex, *, since: int, upper: int) -> None:
        """End the domain as a crash ends it, and begin another: its counts may lack a commit, or
        have one twice. No changeset is open."""
        run, ended = _end_domains(engine, index, since=since, upper=upper)
        self.recovered += ended
        self.domain = secrets.randbelow(DOMAIN_MAX) + 1
        self.state, self._begin = SequencerState(0), 0
        self._pending, self._pending_events = array("Q"), 0
        self._run, self.quiet = run, upper

    def reload(self) -> None:
        """Take the number of the next run from the stored runs: another process writes them."""
        self._run, _, _ = last_run(self._meta)

    def pending(self) -> tuple[int, list[Epoch]]:
        """The number of the next run, and the epochs that will be in it."""
        begin, epochs = self._begin, []
        numbers = self._pending
        for at in range(0, len(numbers), FIELDS):
            end, closed_at, events, flags = numbers[at : at + FIELDS]
            epochs.append(epoch_of(self.domain, begin, end, closed_at, events, flags))
            begin = end
        return self._run, epochs

    def stage_trim(self, batch: WriteBatch, since: int) -> None:
        """Add the removal of the runs of epochs that closed at or below `since`.

        The newest run stays: it says where recovery begins.
        """
        for number, fields in self._meta.numbered(PREFIX):
            newest = number == self._run - 1
            if newest or any(epoch.closed_at > since for epoch in unpack_run(fields)):
                return
            self._meta.stage_delete(batch, run_name(number))


def written_epochs(meta: Meta, *, upto_run: int) -> Iterator[Epoch]:
    """The epochs in `meta`, oldest first, of the runs below `upto_run`."""
    for number, fields in meta.numbered(PREFIX):
        if number >= upto_run:
            return
        yield from unpack_run(fields)


def last_run(meta: Meta) -> tuple[int, int, Callable[[], Epoch | None]]:
    """Number of the next run, the last quiet time, and a function that finds the last epoch: an
    open starts from these, and needs the epoch after a crash only."""
    found = meta.last_numbered(PREFIX)
    if found is None:
        return 0, 0, lambda: None
    number, fields = found
    domain, begin, quiet = run_head(fields)

    def last() -> Epoch:
        epochs = unpack_run(fields)
        return epochs[-1] if epochs else epoch_of(domain, begin, begin, quiet, 0, 0)

    return number + 1, quiet, last


def recovered(
    headers: Iterable[tuple[int, int, tuple[int, int]]],
    find_last: Callable[[], Epoch | None],
    *,
    upper: int,
) -> list[Epoch]:
    """The epochs that end the domains of processes that died, counted from the change index.

    `headers` are timestamp, events and changeset of every entry since the last quiet time.
    """
    ended: dict[int, Epoch] = {}
    last: Epoch | None = None
    for number, (_, events, (domain, serial)) in enumerate(headers):
        last = last if number else find_last()
        known = last is not None and domain == last.domain
        begin = last.end if known and last is not None else 0
        if domain == 0 or serial < begin:
            continue
        epoch = ended.setdefault(domain, epoch_of(domain, begin, begin, upper, 0, _QUIESCENT_ENDED))
        ended[domain] = epoch._replace(end=max(epoch.end, serial + 1), events=epoch.events + events)
    return list(ended.values())


def _end_domains(
    engine: Engine, index: ChangeIndex, *, since: int, upper: int
) -> tuple[int, list[Epoch]]:
    """End the domains that no close has ended. Returns the number of the next run, and the epochs
    that ended them."""
    meta = Meta(engine)
    run, quiet, last = last_run(meta)
    low = max(quiet - 1, since, meta.timestamp(INDEX_FLOOR), 0)
    ended = recovered(index.headers(since=low, upto=upper - 1), last, upper=upper)
    if ended:
        batch = engine.batch()
        for number, epoch in enumerate(ended, start=run):
            meta.stage(batch, run_name(number), record_of(epoch))
        engine.write(batch)
    return run + len(ended), ended


def open_domain(engine: Engine, index: ChangeIndex, *, since: int, upper: int) -> Capture:
    """Begin a domain of changesets, after ending the domains of processes that died.

    Reads the headers of the change entries since the last stored quiet time: none after a close,
    and the headers of a few thousand commits after a crash.
    """
    run, ended = _end_domains(engine, index, since=since, upper=upper)
    domain = secrets.randbelow(DOMAIN_MAX) + 1
    capture = Capture(Meta(engine), Serials(), domain=domain, run=run, quiet=upper)
    capture.recovered = ended
    index.trims.append(capture.stage_trim)
    return capture


def passive_domain(engine: Engine, *, upper: int) -> Capture:
    """The capture of a read-only store: it ends no domain and begins none."""
    meta = Meta(engine)
    run, _, _ = last_run(meta)
    return Capture(meta, Serials(), domain=DOMAIN_MAX, run=run, quiet=upper)
