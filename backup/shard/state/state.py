"""The state of a shard: all its facts and frontiers as one immutable value, and its commands.

A *command* is a method. It decides, without touching anything, and returns the next state with an
answer; `log.StateLog` makes the next state last. It answers in one of two ways, named as in
Materialize's persist. *Continue* returns a new version to be committed, even where only the
sequence number has changed (so that the answer is linearised). *Break* returns the state itself,
and nothing is committed. A command is given the present time where that matters.

A *frontier* is one integer: how far a shard is complete (`upper`), or has forgotten (`since`).
Timestamps reach from 0 to 2**63 - 1. The *empty* frontier, 2**63, is above every timestamp: an
empty `upper` says that no more will be written, an empty `since` that all is forgotten. So
frontiers are compared as integers, and the meet of frontiers is the least. Bounds are half-open:
`[lower, upper)`.

Invariants of a state (`problem` walks them)
1. `batches` are adjacent: they cover `[0, upper)` without gap or overlap, ascending.
2. No batch was compacted further than `since`; no merge slot has an edge inside a batch.
3. `since` is never above the time that a reader or a critical hold keeps, unless the reader or the
   hold came later.
4. Every rollup named is at or below `seqno`.
5. Every kept instant is below `upper`. Each was readable when it became kept.

Invariants of commands
6. `since` and `upper` never move back.
7. A refused write has left nothing in the state.
8. A tombstone breaks every command except the ones that remove its own rollups.

Source of the rules: Materialize's persist (design documents and releases up to 2026).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from kvstore.backup.shard.state.trace import (
    ShardBatch,
    Slot,
    add_slot,
    batches_of,
    covering,
    input_names,
    plan_merge,
    widened,
)
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from kvstore.limits import ROLLUP_EVERY

EMPTY: Final = TIMESTAMP_MAX + 1
"""The empty frontier: finished. Above every timestamp."""

OPAQUE_INITIAL: Final = bytes(8)
"""The token of a critical hold that nobody has moved yet."""

RULE: Final = "versions"
"""The name of the rules of a shard's rows (`rows.rules`), in its state and in each part."""

STATE_VERSION: Final = 1
"""The version of the machine that wrote a state. A newer one in a state is refused."""

_ANONYMOUS = re.compile(r"w-[0-9a-f]{16}")
"""Names that `Shard.writer` makes. Nobody uses such a name again after its call."""


@dataclass(frozen=True, slots=True)
class LeasedReader:
    """A reader that is forgotten when it stops renewing. `seqno` holds back collection of blobs."""

    seqno: int
    since: int
    heartbeat_ns: int
    lease_ns: int

    def lapsed(self, now_ns: int) -> bool:
        """True once the lease has run out."""
        return self.heartbeat_ns + self.lease_ns < now_ns


@dataclass(frozen=True, slots=True)
class CriticalHold:
    """A hold that never expires; moving it takes its `opaque` token."""

    since: int
    opaque: bytes


@dataclass(frozen=True, slots=True)
class LastAppend:
    """The last append of a writer, kept to recognise a retry."""

    token: str
    upper: int
    heartbeat_ns: int


# -- answers ---------------------------------------------------------------------------------


class Appended(NamedTuple):
    """The batch is committed; `merges` are new slots."""

    upper: int
    merges: tuple[Slot, ...] = ()


class AlreadyCommitted(NamedTuple):
    """This writer's last append carried the same token. `upper` is the shard's current one."""

    upper: int


class UpperMismatch(NamedTuple):
    """The batch does not join the shard. `writer_upper`: where this writer's last append ended."""

    upper: int
    writer_upper: int | None


class OpaqueMismatch(NamedTuple):
    """The hold carries another owner's token."""

    opaque: bytes
    since: int


class Kept(NamedTuple):
    """`done`: the command was carried out. `instant`: the instant that has the label, if any."""

    done: bool
    instant: int | None = None


class MergeOutcome(enum.Enum):
    """The outcome of a merge."""

    APPLIED_EXACT = "filled its slot"
    APPLIED_SUBSET = "filled a part of a larger slot"
    ALREADY_APPLIED = "this very output is in place"
    NO_MATCH = "the batches it replaces are no longer there"
    INVALID_SINCE = "compacted further than the shard allows"
    TOO_MANY_UPDATES = "more rows than its inputs"

    @property
    def applied(self) -> bool:
        """True if the output is in the state."""
        return self in (self.APPLIED_EXACT, self.APPLIED_SUBSET, self.ALREADY_APPLIED)


class Finalised(NamedTuple):
    """`done`: it is a tombstone. `left`: steps still to take (None: since or upper not empty)."""

    done: bool
    left: int | None


# -- the state -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardState:
    """One version of a shard. Mappings are never changed in place."""

    shard: str
    rule: str = RULE
    seqno: int = 0
    version: int = STATE_VERSION
    walltime_ns: int = 0
    hostname: str = ""
    last_gc: int = 0
    tombstone_seqno: int = 0
    since: int = 0
    upper: int = 0
    batches: tuple[ShardBatch, ...] = ()
    slots: tuple[Slot, ...] = ()
    rollups: Mapping[int, str] = field(default_factory=dict)
    leased: Mapping[str, LeasedReader] = field(default_factory=dict)
    critical: Mapping[str, CriticalHold] = field(default_factory=dict)
    writers: Mapping[str, LastAppend] = field(default_factory=dict)
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Instants that stay readable when `since` passes them, each with its labels."""
    step_digest: str = field(default="", compare=False)
    """The digest of the step that led here. Each step names the digest of the step before, so this
    one covers all steps."""

    def _next(self, **changes: Any) -> ShardState:
        """The following version, with `changes` made."""
        return replace(self, seqno=self.seqno + 1, **changes)

    # -- looking -----------------------------------------------------------------------------

    @property
    def seqno_since(self) -> int:
        """The oldest version that a leased reader may still need; the current one without readers.

        It only grows: a new reader holds the version it was registered in.
        """
        return min((reader.seqno for reader in self.leased.values()), default=self.seqno)

    @property
    def rollup(self) -> tuple[int, str]:
        """The newest rollup: its version and blob name."""
        seqno = max(self.rollups)
        return seqno, self.rollups[seqno]

    @property
    def is_tombstone(self) -> bool:
        """True once the shard is finished and its data has been given up."""
        return self.tombstone_seqno > 0

    @property
    def gc_target(self) -> int | None:
        """The version to collect up to, once that removes as many versions as a rollup covers; else
        None."""
        target = self.seqno_since
        return target if target - self.last_gc >= ROLLUP_EVERY and not self.is_tombstone else None

    def snapshot(self, as_of: int) -> tuple[ShardBatch, ...]:
        """The batches that make up the shard at `as_of`; some have later updates too.

        Raises `HistoryGoneError` below `since`, except at kept instants, and `NotYetWrittenError`
        at or above `upper` (wait).
        """
        if as_of < self.since and as_of not in self.kept:
            raise HistoryGoneError(as_of=as_of, since=self.since)
        if as_of >= self.upper:
            raise NotYetWrittenError(as_of=as_of, upper=self.upper)
        return tuple(batch for batch in self.batches if batch.lower <= as_of)

    def kept_below(self, since: int) -> tuple[int, ...]:
        """The kept instants below a time, ascending."""
        return tuple(sorted(time for time in self.kept if time < since))

    def lapsed_readers(self, now_ns: int) -> set[str]:
        """The readers whose lease has run out."""
        return {name for name, reader in self.leased.items() if reader.lapsed(now_ns)}

    def idle_writers(self, before_ns: int) -> set[str]:
        """The writers without a name of their own whose last append was before `before_ns`."""
        return {
            name
            for name, writer in self.writers.items()
            if _ANONYMOUS.fullmatch(name) and writer.heartbeat_ns < before_ns
        }

    def blobs(self) -> Iterator[str]:
        """Every blob this version needs: parts and rollups."""
        for batch in self.batches:
            yield from batch.names()
        yield from self.rollups.values()

    def problem(self) -> str | None:
        """The first invariant of the module that does not hold, in words. O(batches)."""
        edge = 0
        edges = {0}
        for batch in self.batches:
            if not batch.lower == edge < batch.upper:
                return f"batch [{batch.lower}, {batch.upper}) does not join the one to {edge}"
            if batch.since > self.since:
                return f"a batch is compacted to {batch.since}, above since {self.since}"
            edge = batch.upper
            edges.add(edge)
        if edge != self.upper:
            return f"its batches end at {edge}, and upper is {self.upper}"
        if not all({low, high} <= edges and low < high for low, high in self.slots):
            return f"the slots {self.slots} are not between batches"
        if any(not 0 <= time < self.upper for time in self.kept):
            return f"it keeps an instant at or above {self.upper}"
        if not 0 <= self.since <= EMPTY:
            return f"since is {self.since}"
        if any(seqno > self.seqno for seqno in self.rollups):
            return f"a rollup is newer than v{self.seqno}"
        return None

    # -- writing -----------------------------------------------------------------------------

    def compare_and_append(
        self, batch: ShardBatch, *, writer: str, token: str, now_ns: int
    ) -> tuple[ShardState, Appended | AlreadyCommitted | UpperMismatch]:
        """Append `batch` if the shard's upper is its lower. `token` makes a retry recognisable.

        An empty batch is progress, and one whose bounds are equal a heartbeat. Raises `UsageError`
        for bounds that make no sense.
        """
        if self.is_tombstone:
            return self, UpperMismatch(EMPTY, EMPTY)
        _require_bounds(batch)
        last = self.writers.get(writer)
        if last is not None and last.token == token:
            return self, AlreadyCommitted(self.upper)
        if self.upper != batch.lower:
            return self, UpperMismatch(self.upper, None if last is None else last.upper)
        writers = {**self.writers, writer: LastAppend(token, batch.upper, now_ns)}
        if batch.lower == batch.upper:
            return self._next(writers=writers), Appended(self.upper)
        batches = (*self.batches, batch)
        if self._is_lengthened_by(batch):
            batches = (*self.batches[:-1], replace(self.batches[-1], upper=batch.upper))
        slot = plan_merge(batches, self.slots)
        slots = self.slots if slot is None else add_slot(self.slots, slot)
        merges = () if slot is None or slots == self.slots else (slot,)
        after = self._next(upper=batch.upper, batches=batches, slots=slots, writers=writers)
        return after, Appended(batch.upper, merges)

    def _is_lengthened_by(self, batch: ShardBatch) -> bool:
        """Whether the newest batch and the one behind it are both empty, and no merge reads it."""
        if not self.batches:
            return False
        last = self.batches[-1]
        is_bare = not (batch.parts or last.parts or batch.meta or last.meta)
        return is_bare and covering(self.slots, (last.lower, last.upper)) is None

    def expire_idle_writers(self, before_ns: int) -> tuple[ShardState, int]:
        """Forget the anonymous writers whose last append was before `before_ns`, their tokens
        included. Returns how many."""
        idle = self.idle_writers(before_ns)
        if not idle or self.is_tombstone:
            return self, 0
        writers = {name: writer for name, writer in self.writers.items() if name not in idle}
        return self._next(writers=writers), len(idle)

    # -- holding history ---------------------------------------------------------------------
    # A leased reader holds `since` and a version until it stops renewing. A critical hold keeps
    # `since` and never expires. The shard's `since` is the least that any of them holds.

    def register_leased(
        self, name: str, *, now_ns: int, lease_ns: int
    ) -> tuple[ShardState, LeasedReader]:
        """Hold `since`, and the version that this makes, for a reader."""
        if self.is_tombstone:
            return self, LeasedReader(self.seqno, EMPTY, now_ns, lease_ns)
        reader = LeasedReader(self.seqno + 1, self.since, now_ns, lease_ns)
        return self._next(leased={**self.leased, name: reader}), reader

    def downgrade_since(
        self, name: str, since: int, *, outstanding: int | None, now_ns: int
    ) -> tuple[ShardState, int]:
        """Have a leased reader give up history below `since`, and versions below `outstanding`
        (None: no version is in use). Renews its lease.

        Returns the reader's since; `EMPTY` for a reader that the shard does not know.
        """
        reader = self.leased.get(name)
        if reader is None or self.is_tombstone:
            return self, EMPTY
        now = self.seqno + 1
        outstanding = now if outstanding is None else min(outstanding, now)
        moved = replace(
            reader,
            seqno=max(reader.seqno, outstanding),
            since=max(reader.since, since),
            heartbeat_ns=max(reader.heartbeat_ns, now_ns),
        )
        after = self._next(leased={**self.leased, name: moved})
        return (after._meet() if since > reader.since else after), moved.since

    def expire_leased(self, name: str) -> tuple[ShardState, int]:
        """Forget a leased reader. The shard's `since` stays until the next downgrade. Returns how
        many were known."""
        if self.is_tombstone:
            return self, 0
        leased = {each: reader for each, reader in self.leased.items() if each != name}
        return self._next(leased=leased), len(self.leased) - len(leased)

    def expire_lapsed(self, now_ns: int) -> tuple[ShardState, int]:
        """Forget all readers whose lease has run out, in one step. Returns how many."""
        lapsed = self.lapsed_readers(now_ns)
        if not lapsed or self.is_tombstone:
            return self, 0
        leased = {name: reader for name, reader in self.leased.items() if name not in lapsed}
        return self._next(leased=leased), len(lapsed)

    def register_critical(self, name: str) -> tuple[ShardState, CriticalHold]:
        """Begin a hold that never expires; an existing one is kept as it is."""
        if self.is_tombstone:
            return self, CriticalHold(EMPTY, OPAQUE_INITIAL)
        hold = self.critical.get(name) or CriticalHold(self.since, OPAQUE_INITIAL)
        return self._next(critical={**self.critical, name: hold}), hold

    def compare_and_downgrade(
        self, name: str, since: int, *, expected: bytes, opaque: bytes
    ) -> tuple[ShardState, int | OpaqueMismatch]:
        """Move a critical hold if its token is `expected`, and leave the token `opaque`. Returns
        the hold's since.

        A `since` that is behind leaves the hold's where it is. Raises `UsageError` for a hold that
        is not registered, or a token of another length.
        """
        if len(opaque) != len(OPAQUE_INITIAL):
            raise UsageError(
                f"an opaque token has {len(OPAQUE_INITIAL)} bytes",
                "pass the token that the holder was given",
            )
        if self.is_tombstone:
            return self, EMPTY
        hold = self.critical.get(name)
        if hold is None:
            raise UsageError(f"critical hold {name!r} is not registered", "register it first")
        if hold.opaque != expected:
            return self._next(), OpaqueMismatch(hold.opaque, hold.since)
        moved = CriticalHold(max(hold.since, since), opaque)
        after = self._next(critical={**self.critical, name: moved})
        return (after._meet() if since >= hold.since else after), moved.since

    def _meet(self) -> ShardState:
        """Move the shard's since up to the least that anyone holds. Never back."""
        held = [r.since for r in self.leased.values()] + [h.since for h in self.critical.values()]
        return replace(self, since=max(self.since, min(held))) if held else self

    # -- keeping instants --------------------------------------------------------------------
    # Only a readable instant becomes kept. The rows that it needs are there at that moment, and
    # merges leave them from then on. An instant that loses its last label stays until a policy
    # chooses others. Then a merge of all batches is asked for: a `since` that does not move asks
    # for none.

    def keep_instants(self, instants: tuple[int, ...]) -> tuple[ShardState, Kept]:
        """Keep the readable ones of these instants. Other instants without a label are kept no
        more."""
        if self.is_tombstone:
            return self, Kept(False)
        chosen: dict[int, tuple[str, ...]] = {t: () for t in instants if self._is_readable(t)}
        kept = chosen | {time: labels for time, labels in self.kept.items() if labels}
        if kept == self.kept:
            return self, Kept(True)
        slots = self.slots
        if self.batches and any(time < self.since for time in self.kept.keys() - kept.keys()):
            slots = add_slot(slots, widened(slots, (0, self.upper)))
        return self._next(kept=kept, slots=slots), Kept(True)

    def label_instant(self, label: str, instant: int) -> tuple[ShardState, Kept]:
        """Keep a readable instant, and give it the label, unless another one has the label."""
        found = self._labelled(label)
        if found is not None:
            return self, Kept(found == instant, found)
        if self.is_tombstone or not self._is_readable(instant):
            return self, Kept(False)
        labels = tuple(sorted((*self.kept.get(instant, ()), label)))
        return self._next(kept={**self.kept, instant: labels}), Kept(True, instant)

    def drop_label(self, label: str) -> tuple[ShardState, Kept]:
        """Take the label from its instant, which is kept until other instants are chosen."""
        found = self._labelled(label)
        if found is None:
            return self, Kept(False)
        labels = tuple(each for each in self.kept[found] if each != label)
        return self._next(kept={**self.kept, found: labels}), Kept(True, found)

    def _is_readable(self, time: int) -> bool:
        """Whether the state at a time can be read: from `since` on, or at a kept instant."""
        return time < self.upper and (time >= self.since or time in self.kept)

    def _labelled(self, label: str) -> int | None:
        """The instant that has a label."""
        return next((time for time, labels in self.kept.items() if label in labels), None)

    # -- merging -----------------------------------------------------------------------------

    def request_merge(self, lower: int, upper: int) -> tuple[ShardState, Slot | None]:
        """Ask for the batches of `[lower, upper)` to become one. Returns the slot to fill; None if
        the bounds are no edges, or a merge would change nothing."""
        if self.is_tombstone:
            return self, None
        slot = widened(self.slots, (lower, upper))
        if slot in self.slots:
            return self, slot
        found = batches_of(self.batches, slot)
        is_one_run = len(found) == 1 and len({part.run for part in found[0].parts}) <= 1
        if not found or (is_one_run and found[0].since >= self.since):
            return self, None
        return self._next(slots=add_slot(self.slots, slot)), slot

    def apply_merge(
        self, output: ShardBatch, inputs: frozenset[str]
    ) -> tuple[ShardState, MergeOutcome]:
        """Put `output` in the place of the batches whose parts are exactly `inputs`, if they are
        still there."""
        bounds = (output.lower, output.upper)
        found = batches_of(self.batches, bounds)
        if found == (output,):
            return self, MergeOutcome.ALREADY_APPLIED
        slot = covering(self.slots, bounds)
        if slot is None or not found or input_names(found) != inputs:
            return self, MergeOutcome.NO_MATCH
        if output.since > self.since or output.since < max(batch.since for batch in found):
            return self, MergeOutcome.INVALID_SINCE
        if output.rows > sum(batch.rows for batch in found):
            return self, MergeOutcome.TOO_MANY_UPDATES
        first = self.batches.index(found[0])
        batches = (*self.batches[:first], output, *self.batches[first + len(found) :])
        if slot == bounds:
            slots = tuple(each for each in self.slots if each != slot)
            return self._next(batches=batches, slots=slots), MergeOutcome.APPLIED_EXACT
        return self._next(batches=batches), MergeOutcome.APPLIED_SUBSET

    # -- rollups, collection, the end --------------------------------------------------------

    def add_rollup(self, seqno: int, name: str) -> tuple[ShardState, bool]:
        """Name the blob that holds version `seqno` whole. False if that version has another rollup
        already."""
        if self.is_tombstone and max(self.rollups) >= self.tombstone_seqno:
            return self, False
        existing = self.rollups.get(seqno)
        if existing is not None:
            return self._next(), existing == name
        return self._next(rollups={**self.rollups, seqno: name}), True

    def remove_rollups(self, going: Mapping[int, str]) -> tuple[ShardState, tuple[int, ...]]:
        """Stop naming these rollups, but never the newest. Returns the versions whose rollups were
        named and are no longer."""
        newest = max(self.rollups, default=0)
        gone = tuple(s for s, name in going.items() if self.rollups.get(s) == name and s != newest)
        if not gone:
            return self, ()
        rollups = {seqno: name for seqno, name in self.rollups.items() if seqno not in gone}
        return self._next(rollups=rollups), gone

    def request_gc(self) -> tuple[ShardState, int | None]:
        """Claim the collection that is due, so that only one process is told to collect. Returns
        the version to collect up to; None: not now."""
        target = self.gc_target
        return (self if target is None else self._next(last_gc=target)), target

    def finalise(self) -> tuple[ShardState, Finalised]:
        """One step towards the tombstone of a shard whose since and upper are empty: clear the
        handles, then blank one batch a step. So no version is ever too large to write."""
        if self.is_tombstone:
            return self, Finalised(True, 0)
        if self.since != EMPTY or self.upper != EMPTY:
            return self, Finalised(False, None)
        full = [i for i, batch in enumerate(self.batches) if batch.parts or batch.meta]
        if self.leased or self.critical or self.writers or self.slots or self.kept:
            cleared = self._next(leased={}, critical={}, writers={}, slots=(), kept={})
            return cleared, Finalised(False, len(full) + 1)
        if full:
            blank = replace(self.batches[full[0]], parts=(), meta=())
            batches = (*self.batches[: full[0]], blank, *self.batches[full[0] + 1 :])
            return self._next(batches=batches), Finalised(False, len(full))
        after = self._next(batches=(ShardBatch(0, EMPTY, EMPTY),), tombstone_seqno=self.seqno + 1)
        return after, Finalised(True, 0)


def _require_bounds(batch: ShardBatch) -> None:
    if batch.upper < batch.lower:
        raise UsageError(
            f"a batch cannot reach from {batch.lower} back to {batch.upper}",
            "let its upper lie at or above its lower",
        )
    if batch.upper == batch.lower and batch.parts:
        raise UsageError(
            f"a batch with rows needs time: both bounds are {batch.lower}",
            "let its upper lie above its lower",
        )


def require_frontier(value: int, *, name: str) -> int:
    """Return `value` if it is a timestamp or `EMPTY`; raises `UsageError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= EMPTY:
        raise UsageError(f"{name} {value!r} is not a frontier", "pass 0..2**63 - 1, or EMPTY")
    return int(value)


def frontier_text(value: int) -> str:
    """Render a frontier for a message."""
    return "[]" if value == EMPTY else str(value)
