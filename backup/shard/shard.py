"""Shard: a durable collection of updates over time, on any blob and consensus.

    with Shard.open(blob, consensus, "orders", rule=VERSIONS) as shard:
        batch = shard.write_batch(BatchDesc(shard.upper, t), record_batches)
        shard.writer("backup").compare_and_append(batch, token=token)
        with shard.snapshot(t - 1) as snapshot:
            for rows in snapshot.read(): ...

Any number of processes may use one shard; each makes its own handle. A handle is for one thread.

What this file adds to the machine: it waits and tries again, holds what its readers use, and
turns outcomes into errors sorted by what the caller should do.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType

import pyarrow as pa

from backup.shard import commands as c
from backup.shard import compact, gc, machine, scrub
from backup.shard.batch import (
    BatchDesc,
    part_names,
    put_retrying,
    read_batches,
    write_batch,
)
from backup.shard.blob import Blob
from backup.shard.consensus import Consensus
from backup.shard.frontier import EMPTY, frontier_text, require_frontier
from backup.shard.log import StateLog
from backup.shard.part import MissingPartError
from backup.shard.read import ListenBatch, Snapshot, explained, listen_window
from backup.shard.rules import VERSIONS, Rule
from backup.shard.state import Batch, State
from kvstore.clock import Clock, WallClock
from kvstore.errors import (
    FencedError,
    HistoryGoneError,
    IndeterminateError,
    LeaseExpiredError,
    OpaqueMismatchError,
    UpperMismatchError,
    UsageError,
)
from kvstore.limits import LEASE_NS

_PAUSE_SECONDS_MAX = 0.25
_TAKE_OVER_ATTEMPTS = 8


def pause_with_backoff(attempt: int) -> None:
    """Sleep before retry number `attempt`: 1 ms doubling to a quarter second, with jitter."""
    limit = min(0.001 * 2 ** min(attempt, 10), _PAUSE_SECONDS_MAX)
    time.sleep(limit * random.uniform(0.5, 1.0))


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
        pause: Callable[[int], None] = pause_with_backoff,
        inline_bytes_max: int = 0,
    ) -> Shard:
        """Open `shard`, creating it if need be.

        `inline_bytes_max`: parts up to this size are kept in the state, which saves a blob each
        but hides them from other programs. Raises `UsageError` if the shard is of another rule,
        or is missing and `create` is false.
        """
        log = StateLog(blob, consensus, shard, clock=clock or Clock(), pause=pause)
        log.open(rule=rule.name, create=create)
        return cls(log, rule, inline_bytes_max=inline_bytes_max)

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A handle holds nothing open: its readers are closed on their own."""

    # -- looking -----------------------------------------------------------------------------

    @property
    def blob(self) -> Blob:
        """Where its parts are."""
        return self.log.blob

    @property
    def state(self) -> State:
        """The newest state this handle has seen; `refresh` looks for a newer one."""
        return self.log.state

    def refresh(self) -> State:
        """Look for what others have written."""
        return self.log.refresh()

    @property
    def since(self) -> int:
        """History below it may be gone (as this handle last saw it)."""
        return self.state.since

    @property
    def upper(self) -> int:
        """Complete below it (as this handle last saw it)."""
        return self.state.upper

    # -- writing -----------------------------------------------------------------------------

    def write_batch(self, desc: BatchDesc, batches: Iterable[pa.RecordBatch]) -> Batch:
        """Upload sorted record batches, to be appended; see `batch.write_batch`."""
        return write_batch(
            self.blob,
            desc,
            batches,
            rule=self.rule,
            names=part_names(self.log.shard, self.log.clock),
            inline_bytes_max=self._inline_bytes_max,
        )

    def writer(self, name: str | None = None) -> Writer:
        """A writer. One `name` is used by one process at a time; keep it to retry after a crash."""
        return Writer(self, name or f"w-{secrets.token_hex(8)}")

    # -- reading and holding -----------------------------------------------------------------

    def reader(self, *, lease_ns: int = LEASE_NS, from_critical: bool = False) -> Reader:
        """Register a leased reader. Use it with `with`; renew it within `lease_ns`."""
        name = f"r-{secrets.token_hex(8)}"
        now_ns = self.log.clock.wall_ns()
        command = c.RegisterLeasedReader(name, now_ns, lease_ns, from_critical)
        return Reader(self, name, self.log.apply(command).outcome)

    def snapshot(self, as_of: int) -> Snapshot:
        """The shard at `as_of`, held by a reader of its own until it is closed.

        Raises `HistoryGoneError` below `since`, `NotYetWrittenError` at or above `upper`.
        """
        reader = self.reader()
        try:
            return reader.snapshot(as_of, on_release=reader.expire)
        except BaseException:
            reader.expire()
            raise

    def critical(self, name: str) -> Critical:
        """Register, or take up, the hold `name`, which never expires.

        Write `name` down durably before: a hold nobody remembers keeps history for ever.
        """
        registered = self.log.apply(c.RegisterCritical(name)).outcome
        return Critical(self, name, since=registered.since, opaque=registered.opaque)

    # -- maintenance -------------------------------------------------------------------------

    def compact(self, *, full: bool = False) -> list[c.MergeOutcome]:
        """Merge what is pending; `full`: everything into one batch, so that what `since` has
        passed is truly gone from the newest version (`gc` then frees its bytes)."""
        if full:
            compact.request(self.log)
        return compact.merge_pending(self.log)

    def gc(self) -> gc.Collected:
        """Delete all that no version and no reader needs any more."""
        gc.prepare(self.log)
        return gc.collect(self.log)

    def maintain(self) -> None:
        """What every user of a shard should do now and then: expire, compact, collect if due."""
        self.log.apply(c.ExpireLapsed(self.log.clock.wall_ns()))
        compact.merge_pending(self.log)
        gc.collect_if_due(self.log)

    def scrub(
        self, *, checksums: bool = False, delete_orphans_before_ns: int | None = None
    ) -> scrub.ScrubReport:
        """Compare names with blobs; see `scrub.scrub`."""
        return scrub.scrub(
            self.log, checksums=checksums, delete_orphans_before_ns=delete_orphans_before_ns
        )

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


class Writer:
    """Appends batches under one name, which the shard remembers with the last token."""

    def __init__(self, shard: Shard, name: str) -> None:
        self.name = name
        self._shard = shard

    def compare_and_append(
        self,
        batch: Batch,
        *,
        token: str | None = None,
        expected_upper: int | None = None,
        retrying: bool = False,
    ) -> c.Appended:
        """Append `batch` if the shard's upper is its lower (`expected_upper`, if given, says so).

        `token` names this append; after a crash, make it again with the same token and
        `retrying=True`: it is done once. Where it was done before, the shard's current upper is
        reported. Raises `UpperMismatchError` (surely not appended: another writer was here),
        `IndeterminateError` (cannot be told any more), `UsageError` for bounds that make no
        sense or a token used twice.
        """
        if expected_upper is not None and expected_upper != batch.lower:
            raise UsageError(f"the batch begins at {batch.lower}, not at {expected_upper}")
        token = token or secrets.token_hex(16)
        log = self._shard.log
        command = c.CompareAndAppend(batch, self.name, token, log.clock.wall_ns())
        outcome, _, unsure = log.apply(command)
        if isinstance(outcome, c.InlineBackpressure):
            command = replace(command, batch=self._as_blobs(batch))
            outcome, _, unsure = log.apply(command)
        return self._done(outcome, batch, retried=unsure or retrying)

    def _done(self, outcome: object, batch: Batch, *, retried: bool) -> c.Appended:
        match outcome:
            case c.Appended():
                return outcome
            case c.AlreadyCommitted(upper) if retried:
                return c.Appended(upper)
            case c.AlreadyCommitted():
                raise UsageError(f"writer {self.name} used the token of its last append again")
            case c.UpperMismatch(upper, writer_upper):
                if retried and writer_upper is not None and writer_upper >= batch.upper:
                    raise IndeterminateError(
                        f"the append of [{batch.lower}, {batch.upper})",
                        f"the shard is at {frontier_text(upper)}, this writer's newer appends too",
                    )
                raise UpperMismatchError(
                    expected=batch.lower, upper=upper, writer_upper=writer_upper
                )
        raise _bounds_error(outcome)

    def append(self, batch: Batch) -> c.Appended:
        """Append what of `batch` the shard lacks, where replicas write identical data.

        What lies below the shard's upper is dropped; the rest must join it, else
        `UpperMismatchError`. Idempotent.
        """
        outcome = self._shard.log.apply(c.Append(batch)).outcome
        match outcome:
            case c.Appended():
                return outcome
            case c.AlreadyWritten(upper):
                return c.Appended(upper)
            case c.UpperMismatch(upper, _):
                raise UpperMismatchError(expected=batch.lower, upper=upper)
        raise _bounds_error(outcome)

    def progress(self, upper: int) -> c.Appended:
        """Say that nothing was written in `[shard.upper, upper)`."""
        require_frontier(upper, name="upper")
        return self.compare_and_append(Batch(self._shard.upper, upper))

    def heartbeat(self) -> c.Appended:
        """Say that this writer lives, at the shard's present upper."""
        at = self._shard.refresh().upper
        return self.compare_and_append(Batch(at, at))

    def expire(self) -> None:
        """Forget this writer; a later retry of its last append is answered as a mismatch."""
        self._shard.log.apply(c.ExpireWriter(self.name))

    def _as_blobs(self, batch: Batch) -> Batch:
        """The batch with its inline parts uploaded after all."""
        names = part_names(self._shard.log.shard, self._shard.log.clock)
        parts = []
        for part in batch.parts:
            if part.inline is not None:
                name = names()
                put_retrying(self._shard.blob, name, part.inline)
                part = replace(part, name=name, inline=None)
            parts.append(part)
        return replace(batch, parts=tuple(parts))


def _bounds_error(outcome: object) -> UsageError:
    match outcome:
        case c.InvalidBounds(lower, upper):
            return UsageError(f"a batch cannot reach from {lower} back to {upper}")
        case c.InvalidEmptyInterval(at):
            return UsageError(f"a batch with rows needs time: both bounds are {at}")
    raise AssertionError(outcome)


class Reader:
    """A leased reader: holds `since`, and the versions its open snapshots use."""

    def __init__(self, shard: Shard, name: str, registered: c.ReaderRegistered) -> None:
        self.name = name
        self.since = registered.since
        self._shard = shard
        self._in_use: list[int] = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.expire()

    def snapshot(self, as_of: int, *, on_release: Callable[[], None] | None = None) -> Snapshot:
        """The shard at `as_of`, readable until it is closed. Raises as `Shard.snapshot`."""
        state = self._shard.refresh()
        batches = machine.snapshot(state, as_of)
        self._in_use.append(state.seqno)
        open_ = [True]

        def release() -> None:
            if open_:
                open_.clear()
                self._in_use.remove(state.seqno)
                if on_release is not None:
                    on_release()

        return Snapshot(
            self._shard.blob,
            rule=state.rule,
            as_of=as_of,
            batches=batches,
            explain=self._explain,
            release=release,
        )

    def listen(self, as_of: int) -> Listen:
        """Follow what is written after `as_of`, each update once; -1: from the beginning.

        Raises `HistoryGoneError` if some of it may be gone.
        """
        if as_of < self.since and not as_of == -1 == self.since - 1:
            raise HistoryGoneError(as_of=as_of, since=self.since)
        return Listen(self._shard, self, as_of + 1)

    def downgrade_since(self, since: int) -> int:
        """Let history below `since` go, renew the lease; where this reader's since is now.

        Raises `LeaseExpiredError` if the shard has forgotten it.
        """
        require_frontier(since, name="since")
        outstanding = min(self._in_use, default=None)
        now_ns = self._shard.log.clock.wall_ns()
        command = c.DowngradeSince(self.name, since, outstanding, now_ns)
        after: int = self._shard.log.apply(command).outcome.since
        if after == EMPTY and since != EMPTY and self.since != EMPTY:
            raise LeaseExpiredError(self.name)
        self.since = after
        return after

    def heartbeat(self) -> None:
        """Renew the lease. Raises `LeaseExpiredError`."""
        self.downgrade_since(self.since)

    def expire(self) -> None:
        """Stop holding anything. Doing it twice does nothing more."""
        self._shard.log.apply(c.ExpireLeasedReader(self.name))

    def _explain(self, error: MissingPartError) -> Exception:
        if self.name in self._shard.refresh().leased:
            return error
        return LeaseExpiredError(self.name)


class Listen:
    """Follows a shard from a frontier on. Each `poll` gives the next stretch, or None: wait."""

    def __init__(self, shard: Shard, reader: Reader, frontier: int) -> None:
        self.frontier = frontier
        self._shard = shard
        self._reader = reader

    def poll(self) -> ListenBatch | None:
        """The next stretch of time that is complete, with its rows; None if there is none yet.

        Moves the frontier and the reader's since; rows of an earlier poll must be read by then.
        """
        if self.frontier == EMPTY:
            return None
        self._reader.downgrade_since(max(self.frontier - 1, 0))
        batch = machine.next_listen_batch(self._shard.refresh(), self.frontier)
        if batch is None:
            return None
        rows = read_batches(
            self._shard.blob,
            [batch],
            rule=self._shard.rule,
            view=listen_window(batch, self.frontier),
        )
        lower, self.frontier = self.frontier, batch.upper
        return ListenBatch(lower, batch.upper, explained(rows, self._reader._explain))

    def follow(self, wait: Callable[[], bool]) -> Iterator[ListenBatch]:
        """Yield stretch after stretch until the shard is finished or `wait()` says False."""
        while self.frontier != EMPTY:
            found = self.poll()
            if found is not None:
                yield found
            elif not wait():
                return


class Critical:
    """A hold that never expires, moved only by who knows its token."""

    def __init__(self, shard: Shard, name: str, *, since: int, opaque: bytes) -> None:
        self.name = name
        self.since = since
        self.opaque = opaque
        self._shard = shard

    def downgrade(self, since: int, *, opaque: bytes | None = None) -> int:
        """Let history below `since` go and leave `opaque` (default: the same); where it is now.

        Raises `OpaqueMismatchError` if another owner has put its own token: step down.
        """
        require_frontier(since, name="since")
        new = self.opaque if opaque is None else opaque
        command = c.CompareAndDowngrade(self.name, self.opaque, new, since)
        outcome, _, unsure = self._shard.log.apply(command)
        # A mismatch with our own token: done by an attempt whose reply was lost.
        refused = isinstance(outcome, c.OpaqueMismatch)
        if refused and not (unsure and outcome.opaque == new and outcome.since >= since):
            raise OpaqueMismatchError(self.name, opaque=outcome.opaque, since=outcome.since)
        self.since = outcome.since
        self.opaque = new
        return self.since

    def take_over(self) -> None:
        """Fence the present owner: leave a token of our own. Its next move is refused."""
        if not any(self._try_take_over() for _ in range(_TAKE_OVER_ATTEMPTS)):
            raise FencedError(self.name, "several owners are taking over at once: settle on one")

    def _try_take_over(self) -> bool:
        try:
            self.downgrade(0, opaque=secrets.token_bytes(8))
        except OpaqueMismatchError as error:
            self.opaque = error.opaque
            return False
        return True

    def expire(self) -> None:
        """End the hold."""
        self._shard.log.apply(c.ExpireCritical(self.name))
