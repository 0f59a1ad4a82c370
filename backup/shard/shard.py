"""Shard: a durable collection of updates over time, on any blob and consensus.

    with Shard.open(blob, consensus, "orders", rule=VERSIONS) as shard:
        batch = shard.write_batch(BatchDesc(shard.upper, t), record_batches)
        shard.writer("backup").compare_and_append(batch, token=token)
        with shard.snapshot(t - 1) as snapshot:
            for rows in snapshot.read(): ...

Any number of processes may use one shard; each makes its own handle. A handle is for one thread.

The handle adds three things to the machine of the state: it waits and tries again, it holds the
history that its readers use, and it turns outcomes into errors sorted by what the caller should do.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Set

import pyarrow as pa

from backup.shard import compact, gc, scrub
from backup.shard.critical import Critical
from backup.shard.read_lease import ReadLease, snapshot_unheld
from backup.shard.rows.batch_writer import BatchDesc, OnFull, part_names, write_batch
from backup.shard.rows.rules import VERSIONS, Rule
from backup.shard.rows.tally import OnProgress, Tally
from backup.shard.snapshot import ShardSnapshot
from backup.shard.state import commands as c
from backup.shard.state import witness
from backup.shard.state.log import StateLog
from backup.shard.state.state import ShardBatch, ShardState, frontier_text
from backup.shard.writer import Writer
from kvstore.clock import Clock, WallClock
from kvstore.errors import AccessDeniedError, OutOfSpaceError, UsageError
from kvstore.limits import LEASE_NS
from kvstore.storage.contract import Blob, Consensus
from kvstore.storage.patience import Patience


class Shard:
    """A handle on one shard. See the module."""

    def __init__(self, log: StateLog, rule: Rule, *, inline_bytes_max: int) -> None:
        self.log = log
        self.rule = rule
        self._inline_bytes_max = inline_bytes_max

    @classmethod
    def open(
        cls,
        blob: Blob,
        consensus: Consensus,
        shard: str,
        *,
        rule: Rule = VERSIONS,
        create: bool = True,
        clock: WallClock | None = None,
        patience: Patience | None = None,
        inline_bytes_max: int = 0,
        known: ShardState | None = None,
    ) -> Shard:
        """Open `shard`, creating it if need be. With a `known` state only newer versions are read.

        `patience` is the blob's unless it is given. Parts of at most `inline_bytes_max` bytes are
        kept in the state: that saves a blob each, but hides them from other programs. Raises
        `UsageError` if the shard has another rule, or if it is missing and `create` is false.
        """
        time = clock or Clock()
        log = StateLog(blob, consensus, shard, clock=time, patience=patience, known=known)
        log.open(rule=rule.name, create=create)
        return cls(log, rule, inline_bytes_max=inline_bytes_max)

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open in a handle: its read leases end on their own."""

    # -- looking -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The shard's name."""
        return self.log.shard

    @property
    def blob(self) -> Blob:
        """The blob that holds the parts."""
        return self.log.blob

    @property
    def state(self) -> ShardState:
        """The newest state this handle has seen; `refresh` looks for a newer one."""
        return self.log.state

    def refresh(self) -> ShardState:
        """Read the versions that others have written since."""
        return self.log.refresh()

    @property
    def since(self) -> int:
        """The frontier below which history may be gone, as of the last refresh."""
        return self.state.since

    @property
    def upper(self) -> int:
        """The frontier below which history is complete, as of the last refresh."""
        return self.state.upper

    @property
    def kept(self) -> Mapping[int, tuple[str, ...]]:
        """The instants that stay readable below `since`, each with its labels, as of the last
        refresh."""
        return self.state.kept

    # -- writing -----------------------------------------------------------------------------

    def write_batch(
        self,
        desc: BatchDesc,
        batches: Iterable[pa.RecordBatch],
        *,
        on_full: OnFull | None = None,
    ) -> ShardBatch:
        """Upload sorted record batches, to be appended; see `batch.write_batch`."""
        return write_batch(
            self.blob,
            desc,
            batches,
            rule=self.rule,
            names=part_names(self.log.shard, self.log.clock),
            inline_bytes_max=self._inline_bytes_max,
            on_full=on_full,
        )

    def writer(self, name: str | None = None) -> Writer:
        """A writer. Only one process at a time may use a `name`; keep it to retry after a crash.

        A writer without a name is forgotten some days after its last append.
        """
        return Writer(self.log, name or f"w-{secrets.token_hex(8)}")

    # -- reading and holding -----------------------------------------------------------------

    def reader(self, *, lease_ns: int | None = None, from_critical: bool = False) -> ReadLease:
        """Register a leased reader, for a `with` statement.

        The lease must be renewed within `lease_ns`; reading the rows of its snapshots does that.
        """
        lease_ns = LEASE_NS if lease_ns is None else lease_ns
        name = f"r-{secrets.token_hex(8)}"
        now_ns = self.log.clock.wall_ns()
        command = c.RegisterLeasedReader(name, now_ns, lease_ns, from_critical)
        return ReadLease(self.log, name, self.log.apply(command).outcome, lease_ns=lease_ns)

    def snapshot(self, as_of: int) -> ShardSnapshot:
        """The shard at `as_of`, held by a lease of its own until the snapshot is closed.

        A storage that takes no writes (read-only, or full) takes no lease: if another process
        compacts the parts away meanwhile, reading raises `MissingPartError`. Raises
        `HistoryGoneError` below `since`, `NotYetWrittenError` at or above `upper`.
        """
        try:
            reader = self.reader()
        except (AccessDeniedError, OutOfSpaceError):
            return snapshot_unheld(self.log, as_of)
        try:
            return reader.snapshot(as_of, on_release=reader.leave)
        except BaseException:
            reader.leave()
            raise

    def critical(self, name: str) -> Critical:
        """Register the hold `name`, which never expires, or take it up again.

        Write `name` down durably before: a hold that nobody remembers keeps history for ever.
        """
        registered = self.log.apply(c.RegisterCritical(name)).outcome
        return Critical(self.log, name, since=registered.since, opaque=registered.opaque)

    def keep_instants(self, instants: Iterable[int]) -> None:
        """Keep these instants readable when `since` passes them, and the labelled ones; give up the
        others that were kept. Instants that are not readable are left out."""
        self.log.apply(c.KeepInstants(tuple(sorted({int(instant) for instant in instants}))))

    def label(self, label: str, instant: int) -> c.Kept:
        """Keep `instant`, and give it a label, which one instant of the shard has."""
        found: c.Kept = self.log.apply(c.LabelInstant(label, int(instant))).outcome
        return found

    def drop_label(self, label: str) -> c.Kept:
        """Take a label away. Its instant is kept until `keep_instants` chooses others."""
        found: c.Kept = self.log.apply(c.DropLabel(label)).outcome
        return found

    # -- maintenance -------------------------------------------------------------------------

    def compact(
        self,
        *,
        full: bool = False,
        merge: compact.Merge = compact.merge_here,
        progress: OnProgress | None = None,
    ) -> list[c.MergeOutcome]:
        """Do the pending merges; with `full`, merge everything into one batch.

        A full merge removes all history that `since` has passed from the newest version; `gc` then
        frees its bytes. `progress` is called with the rows written so far; an exception from it
        calls the merge off.
        """
        if full:
            compact.request_all(self.log)
        return compact.merge_pending(self.log, merge=merge, progress=progress)

    def gc(self) -> gc.Collected:
        """Delete all blobs that no version and no reader needs any more."""
        gc.prepare(self.log)
        return gc.collect(self.log)

    def expire_lapsed(self) -> None:
        """Forget the readers whose lease has run out: they would hold `since` back."""
        gc.expire_lapsed(self.log)

    def collect_if_due(self) -> None:
        """Run `gc` if enough versions have piled up; asking costs nothing."""
        state = self.state
        if state.gc_target is not None or state.lapsed_readers(self.log.clock.wall_ns()):
            gc.collect_if_due(self.log)

    def maintain(self) -> None:
        """Expire, merge and collect as far as due. Every user should call this now and then."""
        gc.expire_lapsed(self.log)
        compact.merge_pending(self.log)
        gc.collect_if_due(self.log)

    def scrub(
        self,
        *,
        checksums: bool = False,
        delete_orphans_before_ns: int | None = None,
        pending: Set[str] = frozenset(),
        tally: Tally | None = None,
    ) -> scrub.ScrubReport:
        """Compare names with blobs; see `scrub.scrub`."""
        return scrub.scrub(
            self.log,
            checksums=checksums,
            delete_orphans_before_ns=delete_orphans_before_ns,
            pending=pending,
            tally=tally,
        )

    def leave_witness(self) -> None:
        """Note beside the parts that the newest state was there; see `witness`."""
        witness.leave(self.log)

    def require_newest(self) -> None:
        """Raise `StatesLostError` if the newest states are gone: see `witness`."""
        witness.require(self.log)

    def finalise(self) -> None:
        """Make the shard a tombstone and delete its data. Needs `since` and `upper` empty.

        Raises `UsageError` if they are not. Safe to call again after a crash.
        """
        while True:
            outcome = self.log.apply(c.Finalise()).outcome
            if outcome.done:
                break
            if outcome.left is None:
                since, upper = frontier_text(self.since), frontier_text(self.upper)
                raise UsageError(
                    f"shard {self.log.shard} is not finished: since {since}, upper {upper}",
                    "append up to EMPTY and downgrade every hold to EMPTY first",
                )
        self.log.write_rollup()
        gc.collect(self.log)
        witness.remove(self.blob, self.log.shard)
