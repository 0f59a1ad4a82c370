"""Changesets and epochs: tags of changes that belong together, and sealed stretches with the number
of their events.

Capture tags each commit with its changeset. The sequencer has two epochs, one that drains and one
that accepts. The audit compares events with the counts of the epochs that were closed.
"""

from __future__ import annotations

import base64
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar, Token
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.changes.index import CODEC, ChangeIndex, unpack_block
from kvstore.codec.json import JsonObject
from kvstore.engine.api import Engine, WriteBatch
from kvstore.errors import ClosedError, EventsMissingError
from kvstore.limits import EPOCH_EVENTS_PENDING_MAX, EPOCHS_PENDING_MAX
from kvstore.loops.serials import QuietEpochs, Serials
from kvstore.mvcc.meta import INDEX_FLOOR, Meta, timestamp_of

# --------------------------------------------------------------------------------------------------
# Changesets: tags that group related changes which are not atomic.
#
# A bulk update of ten million rows cannot be one commit. A changeset tags its commits, so that a
# consumer can wait until all of them have come. The scope is ambient: code called inside the `with`
# block takes part without an argument, and a commit outside any block is a changeset of its own.
#
#     id     := | domain 63 bits | serial u64 |
#     serial := seconds since the epoch, 32.32 fixed point, the low 7 bits a counter
#
# Invariants
# 1. The domain is random for each open of a store; ids of two domains cannot be compared.
# 2. In one domain serials strictly increase, even where the clock stands still or goes back: then
#    the next serial is the last one plus one (128 of them fit between two ticks of 30 ns).
# 3. No serial is 0. Serials are compared modulo 2^64, a horizon of 68 years.
#
# Source: Backtrace's batch ids, in change-data capture for a single process.

DOMAIN_MAX: Final = (1 << 63) - 1


class ChangesetId(NamedTuple):
    """The changeset of a change. A restored or replicated change has domain 0 and no changeset."""

    domain: int
    serial: int


class Changeset:
    """An open changeset: commits made inside its `with` block, in this context, carry its id.

    Blocks nest, and the innermost one tags. `id` is set on entry; `events` counts the changes.
    Threads start with an empty context: run them in `contextvars.copy_context()` to take part.
    """

    def __init__(
        self,
        owner: object,
        begin: Callable[[Changeset], None],
        finish: Callable[[Changeset], None],
    ) -> None:
        self.owner = owner
        self.name = ""
        """The name by which a server knows it; empty in the process of the store."""
        self.id: ChangesetId | None = None
        self.epoch = 0
        self.counted = (0, 0)
        """The number of its changes so far, and the `upper` above the newest of their commits. One
        assignment changes both, so an interrupt finds both or neither."""
        self.is_open = False
        self.outer: Changeset | None = None
        self._begin = begin
        self._finish = finish
        self._token: Token[Changeset | None] | None = None

    @property
    def events(self) -> int:
        """The number of its changes so far."""
        return self.counted[0]

    def __enter__(self) -> Changeset:
        if self._token is not None:
            raise ClosedError("the changeset")
        self.outer = _AMBIENT.get()
        try:
            self._begin(self)
            self.is_open = True
            self._token = _AMBIENT.set(self)
        except BaseException:  # an interrupt here would leave it open for ever
            self._finish(self)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the block. Its commits stay, even if it raised an error."""
        try:
            assert self._token is not None
            self.is_open = False
            _AMBIENT.reset(self._token)
            self._finish(self)
        except BaseException:  # an interrupt here would leave it open for ever
            self.is_open = False
            self._finish(self)
            raise


_AMBIENT: Final[ContextVar[Changeset | None]] = ContextVar("kvstore_changeset", default=None)


def ambient(owner: object) -> Changeset | None:
    """The innermost open changeset of `owner` in this context, None where there is none."""
    changeset = _AMBIENT.get()
    while changeset is not None and not (changeset.owner is owner and changeset.is_open):
        changeset = changeset.outer
    return changeset


# --------------------------------------------------------------------------------------------------
# Epochs: sealed stretches of a domain's changesets, with the number of their events.
#
# A consumer that received as many events as the epochs count, without a gap between epochs, has all
# events. At a quiescent epoch no changeset was half done.
#
#     epochs/<run, 16 hex> := domain, begin, count, quiet, columns      one record per run of epochs
#     columns := base64 of | raw bytes u32 | lz4 of columns: ends, closing times, events, flags |
#     column  := count i64, as differences, byte-shuffled: first bytes of all, then second ...
#     flags   := bit 0: quiescent | bit 1: ended (the domain ended; its open changesets were cut)
#
# A bare put closes two epochs: its own, and an empty one that shows quiescence. Differences between
# neighbours are small, and the shuffle puts their zero bytes together: the pair takes about 10
# bytes.
#
# Invariants
# 1. In a run the first epoch begins at `begin`, and each other epoch begins where the one before
#    ended.
# 2. Runs are numbered in the order of time; `quiet` is the last time at which no changeset was
#    open.

PREFIX: Final = "epochs/"
FLAG_QUIESCENT: Final = 1
FLAG_ENDED: Final = 2
FIELDS: Final = 4
"""Numbers per epoch: end, closing time, events, flags."""

FEW: Final = 4
"""Runs of at most this many epochs are not compressed: four epochs take 130 bytes, and 80 bytes
with compression."""

_RAW_BYTES = struct.Struct("<I")
_DOMAIN_DIGITS = 16
_LENGTH_FULL = 15
_SERIAL_END_MAX = (1 << 64) - 1


class Epoch(NamedTuple):
    """The serials `[begin, end)` of a domain, complete with `events` change events.

    The timestamps of the events lie below `closed_at`. `quiescent`: no changeset was open then, so
    no changeset is half done in the state at `closed_at - 1`. `ended`: the store was closed or its
    process died, and this epoch holds the events of the changesets that were still open.
    """

    domain: int
    begin: int
    end: int
    events: int
    closed_at: Timestamp
    quiescent: bool
    ended: bool = False


def run_name(number: int) -> str:
    """The name of a run's record in `meta`."""
    return f"{PREFIX}{number:016x}"


def pack_run(domain: int, begin: int, numbers: Sequence[int], *, quiet: int) -> dict[str, Any]:
    """The record of a run; `numbers` has `FIELDS` items per epoch."""
    count = len(numbers) // FIELDS
    packed = _few_columns(numbers) if count <= FEW else _columns(numbers)
    return {
        "domain": f"{domain:016x}",
        "begin": begin,
        "count": count,
        "quiet": quiet,
        "columns": base64.b64encode(_RAW_BYTES.pack(len(numbers) * 8) + packed).decode(),
    }


def _columns(numbers: Sequence[int]) -> bytes:
    table = np.array(numbers, dtype=np.uint64).view(np.int64).reshape(-1, FIELDS)
    steps = np.diff(table, axis=0, prepend=np.zeros((1, FIELDS), np.int64)).T
    raw = np.ascontiguousarray(steps).view(np.uint8).reshape(-1, 8).T.tobytes()
    packed: bytes = pa.compress(raw, codec=CODEC, asbytes=True)
    return packed


def _few_columns(numbers: Sequence[int]) -> bytes:
    """The columns without numpy and Arrow: a process that puts one key never imports them."""
    if not numbers:
        return b""
    steps = [
        (number - before) % (1 << 64)
        for field in range(FIELDS)
        for before, number in pairwise([0, *numbers[field::FIELDS]])
    ]
    raw = struct.pack(f"<{len(steps)}Q", *steps)
    return _literal_block(b"".join(raw[at::8] for at in range(8)))


def _literal_block(raw: bytes) -> bytes:
    """A block of LZ4 that holds `raw` as it is. A length from 15 on takes more bytes."""
    length = len(raw)
    if length < _LENGTH_FULL:
        return bytes([length << 4]) + raw
    more, last = divmod(length - _LENGTH_FULL, 255)
    return bytes([_LENGTH_FULL << 4, *[255] * more, last]) + raw


def _unpack_few(packed: bytes, count: int) -> list[list[int]] | None:
    """The columns that `_few_columns` has packed; None for a block of another form."""
    if not count:
        return [[] for _ in range(FIELDS)]
    numbers = count * FIELDS
    raw = packed[max(len(packed) - 8 * numbers, 0) :]
    if len(raw) != 8 * numbers or packed != _literal_block(raw):
        return None
    steps = struct.unpack(f"<{numbers}Q", b"".join(raw[at::numbers] for at in range(numbers)))
    columns = (steps[at : at + count] for at in range(0, numbers, count))
    return [[total % (1 << 64) for total in accumulate(column)] for column in columns]


def record_of(epoch: Epoch) -> dict[str, Any]:
    """The record of a run that is one epoch."""
    flags = FLAG_QUIESCENT * epoch.quiescent | FLAG_ENDED * epoch.ended
    numbers = (epoch.end, epoch.closed_at, epoch.events, flags)
    return pack_run(epoch.domain, epoch.begin, numbers, quiet=epoch.closed_at)


def unpack_run(fields: JsonObject) -> list[Epoch]:
    """The epochs of a record. Raises `CorruptionError` where the record contradicts itself."""
    domain, begin, _ = run_head(fields)
    count = fields.integer("count")
    try:
        stored = base64.b64decode(fields.field("columns", str), validate=True)
        (size,) = _RAW_BYTES.unpack_from(stored)
    except (ValueError, struct.error) as error:
        raise fields.damaged(f"not a run of epochs: {error}") from error
    if size != count * FIELDS * 8:
        raise fields.damaged(f"{size} bytes for {count} epochs")
    packed = stored[_RAW_BYTES.size :]
    columns = _unpack_few(packed, count) if count <= FEW else None
    if columns is None:
        raw = unpack_block(packed, size, where=fields.where)
        shuffled = np.frombuffer(raw, np.uint8).reshape(8, -1).T
        steps = np.ascontiguousarray(shuffled).view(np.int64).reshape(FIELDS, count)
        columns = np.cumsum(steps, axis=1).view(np.uint64).tolist()
    epochs = []
    for end, closed_at, events, flags in zip(*columns, strict=True):
        if closed_at > TIMESTAMP_MAX or flags > FLAG_QUIESCENT | FLAG_ENDED:
            raise fields.damaged(f"an epoch closed at {closed_at}, with flags {flags}")
        epochs.append(epoch_of(domain, begin, end, closed_at, events, flags))
        begin = end
    return epochs


def run_head(fields: JsonObject) -> tuple[int, int, int]:
    """Domain and first serial of a run's record, and its last quiet time."""
    domain = int.from_bytes(fields.hexed("domain"), "big")
    if len(fields["domain"]) != _DOMAIN_DIGITS or domain > DOMAIN_MAX:
        raise fields.damaged(f"no domain is {fields['domain']!r}")
    return domain, fields.integer("begin", most=_SERIAL_END_MAX), timestamp_of(fields, "quiet")


def epoch_of(domain: int, begin: int, end: int, closed_at: int, events: int, flags: int) -> Epoch:
    """An epoch from its stored numbers."""
    quiescent, ended = bool(flags & FLAG_QUIESCENT), bool(flags & FLAG_ENDED)
    return Epoch(domain, begin, end, events, Timestamp(closed_at), quiescent, ended)


# --------------------------------------------------------------------------------------------------
# The sequencer: assigns changesets to epochs, and closes an epoch when it is complete.
#
# Changesets overlap, so there is seldom a moment at which none is open. Two epochs suffice to cut
# the stream of changes nevertheless: the older epoch takes no more changesets and waits for its own
# to finish; the newer epoch takes the changesets that begin meanwhile.
#
#     quiescent --acquire--> draining(older, newer) --release--> draining | quiescent
#
# The functions are pure: they map a state and a command to a state and closed epochs. The caller
# gives serials in ascending order.
#
# Invariants
# 1. Epochs follow each other without a gap: each epoch begins where the one before ended.
# 2. A changeset that begins while no other is open has an epoch of its own, which ends at the next
#    serial. So a burst begins with an epoch of one changeset.
# 3. Two changesets can overlap in time only if they are in the same or in neighbouring epochs.
# 4. An epoch is closed once, after all its changesets; epochs close in order, empty ones too.
# 5. If an epoch leaves the state quiescent, no changeset was open when it closed.
#
# Source: Backtrace's two-epoch sequencer.


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


# --------------------------------------------------------------------------------------------------
# Capture: tags each commit with its changeset and closes the epochs of one domain.
#
# All functions here run under the commit lock. A commit outside any changeset is a changeset of its
# own, which begins and ends inside the commit: that costs 0.2 us and no write. Closed epochs wait
# in memory; a later commit writes them, or `sync` or `close` does.
#
# Invariants
# 1. A run of epochs is written with or after the commits that it counts. Batches survive a crash in
#    their order, so the events of a stored record are stored too.
# 2. After a crash one epoch, counted from the change index, replaces the epochs that were not
#    written. It ends the domain, because no changeset can be open in a process that is gone.
# 3. A close ends the domain in the same way, and cuts the changesets that are still open.

_QUIESCENT_ENDED: Final = FLAG_QUIESCENT | FLAG_ENDED

Begun: TypeAlias = "tuple[tuple[int, int], Changeset | None]"
"""A commit that has begun: the id that tags its entries, and the open changeset around it."""


class Capture(QuietEpochs):
    """The changesets and epochs of one domain. The caller holds the commit lock.

    `begin_commit` and `finish_commit` are compiled: see `kvstore/loops/serials.pyx`.
    """

    def __init__(self, meta: Meta, serials: Serials, *, domain: int, run: int, quiet: int) -> None:
        super().__init__(_AMBIENT, serials, domain, quiet)
        self._meta = meta
        self._begin = 0
        self._run = run
        self.open: set[Changeset] = set()
        self.recovered: list[Epoch] = []
        """The epochs of processes that died, which this opening ended."""

    @property
    def state(self) -> SequencerState:
        """The state of the sequencer."""
        state: SequencerState | None = self.draining
        return SequencerState(self.next_begin) if state is None else state

    @state.setter
    def state(self, state: SequencerState) -> None:
        self.next_begin, self.draining = state.end, None if state.older is None else state

    # -- commits ----------------------------------------------------------------------------

    def around(self) -> Changeset | None:
        return ambient(self)

    def count_beside(self, serial: int, events: int, upper: int) -> None:
        self.state, epoch = acquire(self.state, serial)
        self._release(epoch, events, upper)

    # -- changesets -------------------------------------------------------------------------

    def begin_changeset(self, changeset: Changeset, now_ns: int) -> None:
        """Give a changeset its id and its epoch; `now_ns` is the time."""
        serial = self.serials.next(now_ns)
        self.state, changeset.epoch = acquire(self.state, serial)
        changeset.id = ChangesetId(self.domain, serial)
        self.open.add(changeset)

    def finish_changeset(self, changeset: Changeset, upper: int) -> None:
        """End a changeset, and close the epochs that waited for it."""
        self.open.discard(changeset)
        self._release(changeset.epoch, changeset.events, upper)

    def kept(self) -> Callable[[], None]:
        """A call that takes back what happens to changesets and epochs from now on. No commit, and
        no written record, may come in between."""
        state, opened, quiet = self.state, frozenset(self.open), self.quiet
        waiting = self.waiting_count

        def take_back() -> None:
            self.state, self.open, self.quiet = state, {*opened}, quiet
            self.drop_waiting(waiting)

        return take_back

    def recount(self, counts: Iterable[tuple[Begun, int, int]], index: ChangeIndex) -> bool:
        """Count the commits `counts`, each as for `finish_commit`, after an interrupt: those that
        are stored and were not counted. All of them must be of open changesets. Returns False if
        nobody knows: a commit is of no changeset, or the interrupt lost epochs that were staged
        with its batch."""
        if self._run and self._meta.read(run_name(self._run - 1)) is None:
            return False
        for begun, events, above in counts:
            changeset = begun[1]
            if changeset is None or changeset not in self.open:
                return False
            is_stored = any(index.headers(since=above - 2, upto=above - 1))
            if is_stored and changeset.counted[1] < above:
                self.finish_commit(begun, events, above)
        return True

    def _release(self, epoch: int, events: int, upper: int) -> None:
        self.state, closed = release(self.state, epoch, events, self.serials.step())
        for each in closed:
            self._close(each, upper)

    def _close(self, closed: Closed, upper: int) -> None:
        flags = FLAG_QUIESCENT if closed.quiescent else 0
        self.close_epoch(closed.end, upper, closed.events, flags)
        if closed.quiescent:
            self.quiet = upper

    @property
    def is_quiescent(self) -> bool:
        """Whether no changeset is open."""
        return self.draining is None

    # -- records ----------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether enough epochs wait for the next commit to write them."""
        return self.waiting_count >= EPOCHS_PENDING_MAX or self.events >= EPOCH_EVENTS_PENDING_MAX

    @property
    def has_pending(self) -> bool:
        """Whether closed epochs wait to be written."""
        return self.waiting_count > 0

    def stage(self, batch: WriteBatch) -> None:
        """Add the waiting epochs to an engine batch. From here on they count as written."""
        numbers = self.waiting()
        if not numbers:
            return
        record = pack_run(self.domain, self._begin, numbers, quiet=self.quiet)
        self._meta.stage(batch, run_name(self._run), record)
        self._run += 1
        self._begin = numbers[-FIELDS]
        self.drop_waiting()

    def end(self, batch: WriteBatch, upper: int) -> None:
        """End the domain, in which no commit will follow. Cuts the open changesets."""
        state = self.state
        if state.older is not None and state.newer is not None:
            events = state.older.events + state.newer.events + sum(c.events for c in self.open)
            last = max(self.serials.step(), state.newer.begin + 1)
            self.close_epoch(last, upper, events, _QUIESCENT_ENDED)
            self.state = SequencerState(last)
            self.open.clear()
        self.quiet = upper
        record = pack_run(self.domain, self._begin, self.waiting(), quiet=upper)
        self._meta.stage(batch, run_name(self._run), record)
        self._run += 1
        self.drop_waiting()

    def begin_anew(self, engine: Engine, index: ChangeIndex, *, since: int, upper: int) -> None:
        """End the domain as a crash ends it, and begin another: its counts may lack a commit, or
        have one twice. No changeset is open."""
        run, ended = _end_domains(engine, index, since=since, upper=upper)
        self.recovered += ended
        self.domain = secrets.randbelow(DOMAIN_MAX) + 1
        self.state, self._begin = SequencerState(0), 0
        self.drop_waiting()
        self._run, self.quiet = run, upper

    def reload(self) -> None:
        """Take the number of the next run from the stored runs: another process writes them."""
        self._run, _, _ = last_run(self._meta)

    def pending(self) -> tuple[int, list[Epoch]]:
        """The number of the next run, and the epochs that will be in it."""
        begin, epochs = self._begin, []
        numbers = self.waiting()
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


# --------------------------------------------------------------------------------------------------
# The audit: compares change events with the epochs that count them.
#
# The audit is pure: its caller passes in events and epochs, in the order of time. A reader stops at
# the first problem; a verification lists all problems.
#
# Invariants
# 1. The epochs of a domain follow each other without a gap, and the first one begins at 0.
# 2. An epoch holds as many events as it counts, and at a quiescent epoch no event is left over.
# 3. Restored and replicated changes have no domain, and no epoch counts them: each of their commits
#    is atomic.


class Audit:
    """An audit that begins after a quiescent epoch or at the beginning of a domain."""

    def __init__(self, *, after: Epoch | None = None) -> None:
        self._domain = 0 if after is None else after.domain
        self._edge = 0 if after is None else after.end
        self._waiting: dict[tuple[int, int], int] = {}

    def add(self, changeset: tuple[int, int], events: int) -> None:
        """Count `events` of a changeset."""
        if changeset[0]:
            self._waiting[changeset] = self._waiting.get(changeset, 0) + events

    def over(
        self, epochs: Iterable[Epoch], headers: Iterator[tuple[int, int, tuple[int, int]]]
    ) -> Iterator[Epoch]:
        """Yield each epoch after adding the events before its close; at the end add the other
        events. `headers` come from `ChangeIndex.headers`."""
        header = next(headers, None)
        for epoch in epochs:
            while header is not None and header[0] < epoch.closed_at:
                self.add(header[2], header[1])
                header = next(headers, None)
            yield epoch
        while header is not None:
            self.add(header[2], header[1])
            header = next(headers, None)

    def close(self, epoch: Epoch) -> None:
        """Close an epoch whose events are all added. Raises `EventsMissingError` on a mismatch."""
        for where, problem in self.judge(epoch):
            raise EventsMissingError(where, problem)

    def judge(self, epoch: Epoch) -> Iterator[tuple[str, str]]:
        """Close an epoch; yields each mismatch as (where, problem). A caller that takes all of them
        can continue with the next epoch."""
        gap = gap_before(epoch, domain=self._domain, edge=self._edge)
        if gap is not None:
            yield gap
        members = [
            changeset
            for changeset in self._waiting
            if changeset[0] == epoch.domain and epoch.begin <= changeset[1] < epoch.end
        ]
        found = sum(self._waiting.pop(changeset) for changeset in members)
        if found != epoch.events:
            yield (
                f"epoch [{epoch.begin}, {epoch.end}) of domain {epoch.domain:016x}",
                f"it counts {epoch.events} events, {found} are there",
            )
        if epoch.quiescent and self._waiting:
            left = len(self._waiting)
            self._waiting.clear()
            yield f"changes below {epoch.closed_at}", f"{left} changesets are in no epoch"
        self._domain, self._edge = epoch.domain, epoch.end

    def left_over(self, domain: int) -> int:
        """How many changesets are in no epoch and never will be.

        Changesets may still be open in `domain`; changesets that it began after its last epoch are
        not counted.
        """
        edge = self._edge if domain == self._domain else 0
        return sum(owner != domain or serial < edge for owner, serial in self._waiting)


def gap_before(epoch: Epoch, *, domain: int, edge: int) -> tuple[str, str] | None:
    """The problem before an epoch, if the epoch before it ended at `edge` of `domain`."""
    expected = edge if epoch.domain == domain else 0
    if epoch.begin == expected:
        return None
    return (
        f"domain {epoch.domain:016x}",
        f"an epoch begins at {epoch.begin}, the one before ended at {expected}",
    )


class Anchor(NamedTuple):
    """The begin of counting: after a quiescent epoch, or (None) at the beginning of the index."""

    after: Epoch | None

    @property
    def since(self) -> int:
        """All events after this time are counted."""
        return 0 if self.after is None else self.after.closed_at - 1


def find_anchor(epochs: Iterator[Epoch], *, floor: int, upto: int) -> Anchor | None:
    """The last anchor at or below the time `upto`, else the first anchor above it; None: no anchor
    yet.

    Counting from an anchor must see every event. In an index that was trimmed, or begins with a
    restore, the first anchor is therefore the first quiescent epoch above its `floor`.
    """
    found, is_whole = Anchor(None), floor == 0
    for number, epoch in enumerate(epochs):
        is_whole = is_whole and (number > 0 or epoch.begin == 0)
        if epoch.quiescent:
            at = epoch.closed_at - 1
            if is_whole and at > upto:
                break
            found, is_whole = Anchor(epoch), at >= floor
    return found if is_whole else None
