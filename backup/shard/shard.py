"""Shard: a durable collection of updates over time, on any blob and consensus.

    with Shard.open(blob, consensus, "orders") as shard:
        batch = shard.write_batch(BatchDesc(shard.upper, t), record_batches)
        shard.writer("backup").compare_and_append(batch, token=token)
        with shard.snapshot(t - 1) as snapshot:
            for rows in snapshot.read(): ...

Any number of processes may use one shard; each makes its own handle. A handle is for one thread.

The handles add three things to the commands of the state: they wait and try again, they hold the
history that their readers use, and they turn answers into errors sorted by what the caller should
do.

* `Writer` appends. The outcome of an append is always known, except where a newer append of the
  same writer hides it: then the caller gets `IndeterminateError`, and nothing is guessed.
* `Critical` keeps history for an owner that may be away for long, and never expires. It carries an
  8-byte token of its present owner. Moving it is compare-and-set on this token, so an owner that
  was replaced while it slept cannot move it any more.
* `ReadLease` (in `shard_snapshot`) holds history that is being read.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Set

import pyarrow as pa

from kvstore.backup.shard import blob_gc, scrub, slot_compaction
from kvstore.backup.shard.rows.batch_writer import BatchDesc, OnFull, part_names, write_batch
from kvstore.backup.shard.shard_snapshot import ReadLease, ShardSnapshot, snapshot_unheld
from kvstore.backup.shard.state import witness
from kvstore.backup.shard.state.state import (
    AlreadyCommitted,
    Appended,
    Kept,
    MergeOutcome,
    OpaqueMismatch,
    ShardState,
    UpperMismatch,
    frontier_text,
    require_frontier,
)
from kvstore.backup.shard.state.state_log import StateLog
from kvstore.backup.shard.state.trace import ShardBatch
from kvstore.base.clock import Clock, WallClock
from kvstore.base.meters import OnProgress, Tally
from kvstore.errors import (
    AccessDeniedError,
    IndeterminateError,
    OpaqueMismatchError,
    OutOfSpaceError,
    UpperMismatchError,
    UsageError,
)
from kvstore.limits import LEASE_NS
from kvstore.storage.contract import Blob, Consensus
from kvstore.storage.patience import Patience


class Shard:
    """A handle on one shard. See the module."""

    def __init__(self, log: StateLog) -> None:
        self.log = log

    @classmethod
    def open(
        cls,
        blob: Blob,
        consensus: Consensus,
        shard: str,
        *,
        create: bool = True,
        clock: WallClock | None = None,
        patience: Patience | None = None,
        known: ShardState | None = None,
    ) -> Shard:
        """Open `shard`, creating it if need be. With a `known` state only newer versions are read.

        `patience` is the blob's unless it is given. Raises `MissingShardError` if the shard is
        missing and `create` is false.
        """
        time = clock or Clock()
        log = StateLog(blob, consensus, shard, clock=time, patience=patience, known=known)
        log.open(create=create)
        return cls(log)

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
        """Upload sorted record batches, to be appended; see `batch_writer.write_batch`."""
        return write_batch(
            self.blob,
            desc,
            batches,
            names=part_names(self.log.shard, self.log.clock),
            on_full=on_full,
        )

    def writer(self, name: str | None = None) -> Writer:
        """A writer. Only one process at a time may use a `name`; keep it to retry after a crash.

        A writer without a name is forgotten some days after its last append.
        """
        return Writer(self.log, name or f"w-{secrets.token_hex(8)}")

    # -- reading and holding -----------------------------------------------------------------

    def reader(self, *, lease_ns: int | None = None) -> ReadLease:
        """Register a leased reader, for a `with` statement.

        The lease must be renewed within `lease_ns`; reading the rows of its snapshots does that.
        """
        return ReadLease(self.log, lease_ns=LEASE_NS if lease_ns is None else lease_ns)

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
        hold = self.log.apply(lambda state: state.register_critical(name)).outcome
        return Critical(self.log, name, since=hold.since, opaque=hold.opaque)

    def keep_instants(self, instants: Iterable[int]) -> None:
        """Keep these instants readable when `since` passes them, and the labelled ones; give up the
        others that were kept. Instants that are not readable are left out."""
        chosen = tuple(sorted({int(instant) for instant in instants}))
        self.log.apply(lambda state: state.keep_instants(chosen))

    def label(self, label: str, instant: int) -> Kept:
        """Keep `instant`, and give it a label, which one instant of the shard has."""
        return self.log.apply(lambda state: state.label_instant(label, int(instant))).outcome

    def drop_label(self, label: str) -> Kept:
        """Take a label away. Its instant is kept until `keep_instants` chooses others."""
        return self.log.apply(lambda state: state.drop_label(label)).outcome

    # -- maintenance -------------------------------------------------------------------------

    def compact(
        self,
        *,
        full: bool = False,
        merge: slot_compaction.Merge = slot_compaction.merge_here,
        progress: OnProgress | None = None,
    ) -> list[MergeOutcome]:
        """Do the pending merges; with `full`, merge everything into one batch.

        A full merge removes all history that `since` has passed from the newest version; `gc` then
        frees its bytes. `progress` is called with the rows written so far; an exception from it
        calls the merge off.
        """
        if full:
            slot_compaction.request_all(self.log)
        return slot_compaction.merge_pending(self.log, merge=merge, progress=progress)

    def gc(self) -> blob_gc.Collected:
        """Delete all blobs that no version and no reader needs any more."""
        blob_gc.prepare(self.log)
        return blob_gc.collect(self.log)

    def expire_lapsed(self) -> None:
        """Forget the readers whose lease has run out: they would hold `since` back."""
        blob_gc.expire_lapsed(self.log)

    def collect_if_due(self) -> None:
        """Run `gc` if enough versions have piled up; asking costs nothing."""
        state = self.state
        if state.gc_target is not None or state.lapsed_readers(self.log.clock.wall_ns()):
            blob_gc.collect_if_due(self.log)

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
            outcome = self.log.apply(lambda state: state.finalise()).outcome
            if outcome.done:
                break
            if outcome.left is None:
                since, upper = frontier_text(self.since), frontier_text(self.upper)
                raise UsageError(
                    f"shard {self.log.shard} is not finished: since {since}, upper {upper}",
                    "append up to EMPTY and downgrade every hold to EMPTY first",
                )
        self.log.write_rollup()
        blob_gc.collect(self.log)
        witness.remove(self.blob, self.log.shard)


class Writer:
    """Appends batches under one name, which the shard remembers with the last token."""

    def __init__(self, log: StateLog, name: str) -> None:
        self.name = name
        self._log = log

    def compare_and_append(
        self,
        batch: ShardBatch,
        *,
        token: str | None = None,
        expected_upper: int | None = None,
        retrying: bool = False,
    ) -> Appended:
        """Append `batch` if the shard's upper is its lower (`expected_upper`, if given, says so).

        `token` names this append. After a crash, repeat it with the same token and `retrying=True`:
        it is done once. If an earlier attempt has succeeded, the result is the shard's current
        upper. Raises `UpperMismatchError` (surely not appended: another writer was faster),
        `IndeterminateError` (the outcome cannot be told any more), `UsageError` for bounds that
        make no sense or a token that was used before.
        """
        if expected_upper is not None and expected_upper != batch.lower:
            raise UsageError(
                f"the batch begins at {batch.lower}, not at {expected_upper}",
                "build the batch from the expected upper on",
            )
        token = token or secrets.token_hex(16)
        now_ns = self._log.clock.wall_ns()
        applied = self._log.apply(
            lambda state: state.compare_and_append(
                batch, writer=self.name, token=token, now_ns=now_ns
            )
        )
        is_retried = applied.unsure or retrying
        match applied.outcome:
            case Appended():
                return applied.outcome
            case AlreadyCommitted(upper) if is_retried:
                return Appended(upper)
            case AlreadyCommitted():
                raise UsageError(
                    f"writer {self.name} used the token of its last append again",
                    "name each append by a token of its own",
                )
            case UpperMismatch(upper, writer_upper):
                if is_retried and writer_upper is not None and writer_upper >= batch.upper:
                    raise IndeterminateError(
                        f"the append of [{batch.lower}, {batch.upper})",
                        f"the shard is at {frontier_text(upper)}, this writer's newer appends too",
                    )
                raise UpperMismatchError(
                    expected=batch.lower, upper=upper, writer_upper=writer_upper
                )

    def progress(self, upper: int) -> Appended:
        """Say that nothing was written in `[shard.upper, upper)`."""
        require_frontier(upper, name="upper")
        return self.compare_and_append(ShardBatch(self._log.state.upper, upper))


class Critical:
    """A hold that never expires. Moving it takes its token."""

    def __init__(self, log: StateLog, name: str, *, since: int, opaque: bytes) -> None:
        self.name = name
        self.since = since
        self.opaque = opaque
        self._log = log

    def downgrade(self, since: int, *, opaque: bytes | None = None) -> int:
        """Give up history below `since`, and put the token `opaque` (default: the same) on the
        hold.

        Returns the hold's `since`.

        Raises `OpaqueMismatchError` if another owner has put its own token: step down.
        """
        require_frontier(since, name="since")
        new = self.opaque if opaque is None else opaque
        applied = self._log.apply(
            lambda state: state.compare_and_downgrade(
                self.name, since, expected=self.opaque, opaque=new
            )
        )
        after = applied.outcome
        if isinstance(after, OpaqueMismatch):
            # With our own token: an attempt whose reply was lost has moved the hold.
            if not (applied.unsure and after.opaque == new and after.since >= since):
                raise OpaqueMismatchError(self.name, opaque=after.opaque, since=after.since)
            after = after.since
        self.since = after
        self.opaque = new
        return self.since
