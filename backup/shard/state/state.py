"""The state of a shard: all its facts and frontiers, as one immutable value.

The machine (`machine.py`) makes the next state from a state and a command; `codec.py` turns a
state into bytes. A state has no rows: it names the parts that have them.

A *frontier* is one integer: how far a shard is complete (`upper`), or has forgotten (`since`).
Timestamps reach from 0 to 2**63 - 1. The *empty* frontier, 2**63, is above every timestamp: an
empty `upper` says that no more will be written, an empty `since` that all is forgotten. So
frontiers are compared as integers, and the meet of frontiers is the least. Bounds are half-open:
`[lower, upper)`.

Invariants (`ShardState.check` walks them)
1. `batches` are adjacent: they cover `[0, upper)` without gap or overlap, ascending.
2. No batch was compacted further than `since`; no merge slot has an edge inside a batch.
3. `since` is never above the time that a reader or a critical hold keeps, unless the reader or the
   hold came later.
4. Every rollup named is at or below `seqno`.
5. Every kept instant is below `upper`. Each was readable when it became kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from kvstore.errors import UsageError
from kvstore.limits import ROLLUP_EVERY
from kvstore.timestamp import TIMESTAMP_MAX

EMPTY: Final = TIMESTAMP_MAX + 1
"""The empty frontier: finished. Above every timestamp."""
_ANONYMOUS = re.compile(r"w-[0-9a-f]{16}")

STATE_VERSION = 1
"""The version of the machine that wrote a state. A newer one in a state is refused."""


_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One sorted Parquet file of a batch: a blob, or bytes kept in the state (`inline`).

    `key_min` and `key_max` bound every key that the part touches, ends of range tombstones
    included. Both are inclusive and rounded outwards (`key_max` None: unbounded). Parts of one
    `run` follow each other in order; parts of different runs may interleave. Rows before
    `drop_below` do not count. `checksum` is a digest of `kvstore.digest`. `diff_sum` is the sum of
    the diff column; None where the rule has no such column, or where some rows do not count.
    """

    name: str
    rows: int
    size: int
    checksum: str
    key_min: bytes
    key_max: bytes | None
    time_min: int
    time_max: int
    run: int = 0
    ranges: int = 0
    diff_sum: int | None = None
    drop_below: int = 0
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """The updates of `[lower, upper)`; compaction advances their times to `since`.

    `meta` is the caller's: a few short strings that travel with the batch until it is merged.
    """

    lower: int
    upper: int
    since: int = 0
    parts: tuple[ShardPart, ...] = ()
    meta: tuple[tuple[str, str], ...] = ()

    @property
    def rows(self) -> int:
        """The number of rows in the parts; an upper bound where some rows no longer count."""
        return sum(part.rows for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the parts as stored."""
        return sum(part.size for part in self.parts)

    @property
    def diff_sum(self) -> int | None:
        """The sum of all diffs; None where a part does not know its own."""
        sums = [part.diff_sum for part in self.parts]
        return None if None in sums else sum(s for s in sums if s is not None)

    def names(self) -> frozenset[str]:
        """The blobs that the batch needs."""
        return frozenset(part.name for part in self.parts if part.inline is None)


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


def is_anonymous(writer: str) -> bool:
    """Whether `Shard.writer` made this name. Nobody uses such a name again after its call."""
    return _ANONYMOUS.fullmatch(writer) is not None


@dataclass(frozen=True, slots=True)
class LastAppend:
    """The last append of a writer, kept to recognise a retry."""

    token: str
    upper: int
    heartbeat_ns: int


@dataclass(frozen=True, slots=True)
class SchemaColumn:
    """One column of a registered schema: its name, Arrow type as text, and nullability."""

    name: str
    type: str
    nullable: bool


@dataclass(frozen=True, slots=True)
class ShardState:
    """One version of a shard. Mappings are never changed in place."""

    shard: str
    rule: str
    seqno: int = 0
    version: int = STATE_VERSION
    walltime_ns: int = 0
    hostname: str = ""
    last_gc: int = 0
    tombstone_seqno: int = 0
    since: int = 0
    upper: int = 0
    batches: tuple[ShardBatch, ...] = ()
    slots: tuple[tuple[int, int], ...] = ()
    rollups: Mapping[int, str] = field(default_factory=dict)
    leased: Mapping[str, LeasedReader] = field(default_factory=dict)
    critical: Mapping[str, CriticalHold] = field(default_factory=dict)
    writers: Mapping[str, LastAppend] = field(default_factory=dict)
    schemas: Mapping[int, tuple[SchemaColumn, ...]] = field(default_factory=dict)
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Instants that stay readable when `since` passes them, each with its labels."""
    chain: str = field(default="", compare=False)
    """The digest of the step that led here. Each step names the digest of the step before, so this
    one covers all steps. Empty in shards whose steps name no digests."""

    def next(self, **changes: Any) -> ShardState:
        """The following version, with `changes` made."""
        return replace(self, seqno=self.seqno + 1, **changes)

    @property
    def seqno_since(self) -> int:
        """The oldest version that a leased reader may still need; the current one without readers.

        It only grows: a new reader holds the version it was registered in.
        """
        return min((reader.seqno for reader in self.leased.values()), default=self.seqno)

    def is_readable(self, time: int) -> bool:
        """Whether the state at a time can be read: from `since` on, or at a kept instant."""
        return time < self.upper and (time >= self.since or time in self.kept)

    def kept_below(self, since: int) -> tuple[int, ...]:
        """The kept instants below a time, ascending."""
        return tuple(sorted(time for time in self.kept if time < since))

    @property
    def gc_target(self) -> int | None:
        """The version to collect up to, once that removes as many versions as a rollup covers; else
        None."""
        target = self.seqno_since
        return target if target - self.last_gc >= ROLLUP_EVERY and not self.is_tombstone else None

    def lapsed_readers(self, now_ns: int) -> set[str]:
        """The readers whose lease has run out."""
        return {name for name, reader in self.leased.items() if reader.lapsed(now_ns)}

    def idle_writers(self, before_ns: int) -> set[str]:
        """The writers without a name of their own whose last append was before `before_ns`."""
        return {
            name
            for name, writer in self.writers.items()
            if is_anonymous(name) and writer.heartbeat_ns < before_ns
        }

    @property
    def rollup(self) -> tuple[int, str]:
        """The newest rollup: its version and blob name."""
        seqno = max(self.rollups)
        return seqno, self.rollups[seqno]

    @property
    def is_tombstone(self) -> bool:
        """True once the shard is finished and its data has been given up."""
        return self.tombstone_seqno > 0

    def inline_bytes(self) -> int:
        """Bytes of parts kept in the state itself."""
        return sum(len(p.inline) for b in self.batches for p in b.parts if p.inline is not None)

    def blobs(self) -> Iterator[str]:
        """Every blob this version needs: parts and rollups."""
        for batch in self.batches:
            yield from batch.names()
        yield from self.rollups.values()

    def check(self) -> None:
        """Assert the module's invariants. O(batches)."""
        problem = self.problem()
        assert problem is None, (self.shard, problem)

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


def require_frontier(value: int, *, name: str) -> int:
    """Return `value` if it is a timestamp or `EMPTY`; raises `UsageError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= EMPTY:
        raise UsageError(f"{name} {value!r} is not a frontier", "pass 0..2**63 - 1, or EMPTY")
    return int(value)


def frontier_text(value: int) -> str:
    """Render a frontier for a message."""
    return "[]" if value == EMPTY else str(value)


def with_entry(mapping: Mapping[_K, _V], key: _K, value: _V) -> dict[_K, _V]:
    """A copy of `mapping` in which `key` has `value`."""
    return {**mapping, key: value}


def without_entry(mapping: Mapping[_K, _V], key: _K) -> dict[_K, _V]:
    """A copy of `mapping` without `key`."""
    return {k: v for k, v in mapping.items() if k != key}
