"""Commands and their outcomes: every change of a shard, as plain values.

`machine.apply(state, command)` decides; `log.StateLog` makes the decision last. A command carries
the present time where that matters, so the machine needs no clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from backup.shard.state.state import ShardBatch

# -- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompareAndAppend:
    """Append `batch` if the shard's upper is its lower. `token` makes a retry recognisable."""

    batch: ShardBatch
    writer: str
    token: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class Append:
    """Append the part of `batch` above the upper, for replicas that write identical data."""

    batch: ShardBatch


@dataclass(frozen=True, slots=True)
class ExpireWriter:
    """Forget a writer, its last token included."""

    writer: str


@dataclass(frozen=True, slots=True)
class ExpireIdleWriters:
    """Forget the anonymous writers whose last append was before `before_ns`."""

    before_ns: int


@dataclass(frozen=True, slots=True)
class Appended:
    """The batch is committed; `merges` are new slots."""

    upper: int
    merges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """This writer's last append carried the same token. `upper` is the shard's current one."""

    upper: int


@dataclass(frozen=True, slots=True)
class AlreadyWritten:
    """All of the batch lies below the shard's upper: another replica was faster."""

    upper: int


@dataclass(frozen=True, slots=True)
class UpperMismatch:
    """The batch does not join the shard. `writer_upper`: where this writer's last append ended."""

    upper: int
    writer_upper: int | None


@dataclass(frozen=True, slots=True)
class InvalidBounds:
    """The batch's upper is below its lower."""

    lower: int
    upper: int


@dataclass(frozen=True, slots=True)
class InvalidEmptyInterval:
    """The batch has rows, but no time for them: its bounds are equal."""

    at: int


@dataclass(frozen=True, slots=True)
class InlineBackpressure:
    """The state holds too many inline bytes already: write the parts as blobs."""

    held: int


# -- reading and holding ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterLeasedReader:
    """Hold this version and `since`; with `from_critical` the least critical hold's `since`."""

    reader: str
    now_ns: int
    lease_ns: int
    from_critical: bool = False


@dataclass(frozen=True, slots=True)
class DowngradeSince:
    """Give up history below `since`, and versions below `outstanding` (None: no version is in use).

    Renews the lease.
    """

    reader: str
    since: int
    outstanding: int | None
    now_ns: int


@dataclass(frozen=True, slots=True)
class ExpireLeasedReader:
    """Forget a reader. The shard's `since` stays until the next downgrade."""

    reader: str


@dataclass(frozen=True, slots=True)
class ExpireLapsed:
    """Forget all readers whose lease has run out, in one step."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class RegisterCritical:
    """Begin a hold that never expires; an existing one is kept as it is."""

    reader: str


@dataclass(frozen=True, slots=True)
class CompareAndDowngrade:
    """Move a critical hold if its token is `expected`, and leave the token `opaque`."""

    reader: str
    expected: bytes
    opaque: bytes
    since: int


@dataclass(frozen=True, slots=True)
class ExpireCritical:
    """Forget a critical hold."""

    reader: str


@dataclass(frozen=True, slots=True)
class KeepInstants:
    """Keep the readable ones of these instants. Other instants without a label are kept no more."""

    instants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelInstant:
    """Keep an instant, and give it the label."""

    label: str
    instant: int


@dataclass(frozen=True, slots=True)
class DropLabel:
    """Take the label from its instant, which is kept until other instants are chosen."""

    label: str


@dataclass(frozen=True, slots=True)
class Kept:
    """`done`: the command was carried out. `instant`: the instant that has the label, if any."""

    done: bool
    instant: int | None = None


@dataclass(frozen=True, slots=True)
class ReaderRegistered:
    """The `since` at which the reader starts, and the version that it holds."""

    since: int
    seqno: int


@dataclass(frozen=True, slots=True)
class Downgraded:
    """The reader's since now; `EMPTY` for a reader the shard does not know (its lease is gone)."""

    since: int


@dataclass(frozen=True, slots=True)
class CriticalRegistered:
    """The hold as it stands."""

    since: int
    opaque: bytes


@dataclass(frozen=True, slots=True)
class OpaqueMismatch:
    """The hold carries another owner's token."""

    opaque: bytes
    since: int


@dataclass(frozen=True, slots=True)
class Expired:
    """How many readers, holds or writers were known and are now forgotten."""

    count: int


# -- maintenance -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestMerge:
    """Ask for the batches of `[lower, upper)`, both existing edges, to become one."""

    lower: int
    upper: int


@dataclass(frozen=True, slots=True)
class ApplyMerge:
    """Put `output` in the place of the batches whose parts are exactly `inputs`."""

    output: ShardBatch
    inputs: frozenset[str]


class MergeOutcome(enum.Enum):
    """The outcome of a merge."""

    APPLIED_EXACT = "filled its slot"
    APPLIED_SUBSET = "filled a part of a larger slot"
    ALREADY_APPLIED = "this very output is in place"
    NO_MATCH = "the batches it replaces are no longer there"
    INVALID_SINCE = "compacted further than the shard allows"
    TOO_MANY_UPDATES = "more rows than its inputs"
    DIFF_SUM_CHANGED = "another sum of diffs than its inputs"

    @property
    def applied(self) -> bool:
        """True if the output is in the state."""
        return self in (self.APPLIED_EXACT, self.APPLIED_SUBSET, self.ALREADY_APPLIED)


@dataclass(frozen=True, slots=True)
class MergeRequested:
    """The slot to fill; None if the bounds are no edges, or one batch fills them already."""

    slot: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class AddRollup:
    """Name the blob that holds version `seqno` whole."""

    seqno: int
    name: str


@dataclass(frozen=True, slots=True)
class RollupAdded:
    """False if that version has another rollup already."""

    added: bool


@dataclass(frozen=True, slots=True)
class RemoveRollups:
    """Stop naming these rollups."""

    rollups: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class RollupsRemoved:
    """The versions whose rollups were named and are no longer."""

    seqnos: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestGc:
    """Ask whether there is enough to collect; at most one asker is told to collect."""


@dataclass(frozen=True, slots=True)
class GcRequested:
    """Collect up to here; None: not now."""

    seqno: int | None


@dataclass(frozen=True, slots=True)
class Finalise:
    """One step towards the tombstone of a shard whose since and upper are empty."""


@dataclass(frozen=True, slots=True)
class Finalised:
    """`done`: it is a tombstone. `left`: steps still to take (None: since or upper not empty)."""

    done: bool
    left: int | None


Command = (
    CompareAndAppend
    | Append
    | ExpireWriter
    | ExpireIdleWriters
    | RegisterLeasedReader
    | DowngradeSince
    | ExpireLeasedReader
    | ExpireLapsed
    | RegisterCritical
    | CompareAndDowngrade
    | ExpireCritical
    | KeepInstants
    | LabelInstant
    | DropLabel
    | RequestMerge
    | ApplyMerge
    | AddRollup
    | RemoveRollups
    | RequestGc
    | Finalise
)
