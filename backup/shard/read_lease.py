"""Read leases: a reader holds the history that it reads, until it stops renewing its lease.

A lease holds two things: `since`, so that compaction keeps the history that the reader wants, and
the version of its oldest open snapshot, so that collection keeps the parts. Every downgrade and
every poll renews the lease, and so does taking the rows of a snapshot, now and then. Calls after
the lease has run out raise `LeaseExpiredError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from backup.shard.rows.batch_reader import read_batches
from backup.shard.rows.part_bytes import MissingPartError
from backup.shard.rows.rules import RULES
from backup.shard.snapshot import ListenBatch, ShardSnapshot, explained, listen_window
from backup.shard.state import commands as c
from backup.shard.state import machine
from backup.shard.state.log import StateLog
from backup.shard.state.state import EMPTY, require_frontier
from kvstore.errors import ForkedError, HistoryGoneError, LeaseExpiredError
from kvstore.storage.contract import FAILURES


class ReadLease:
    """A lease: it holds `since`, and the versions of its open snapshots."""

    def __init__(
        self, log: StateLog, name: str, registered: c.ReaderRegistered, *, lease_ns: int
    ) -> None:
        self.name = name
        self.since = registered.since
        self._log = log
        self._in_use: list[int] = []
        self._lease_ns = lease_ns
        self._renewed_ns = log.clock.wall_ns()

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ForkedError):  # the lease is the parent's
            self.expire()

    def snapshot(
        self, as_of: int, *, on_release: Callable[[], None] | None = None
    ) -> ShardSnapshot:
        """The shard at `as_of`, readable until it is closed. Raises as `Shard.snapshot`."""
        state = self._log.refresh()
        batches = machine.snapshot(state, as_of)
        self._in_use.append(state.seqno)
        open_ = [True]

        def release() -> None:
            if open_:
                open_.clear()
                self._in_use.remove(state.seqno)
                if on_release is not None:
                    on_release()

        return ShardSnapshot(
            self._log.blob,
            rule=state.rule,
            as_of=as_of,
            batches=batches,
            explain=self.explain,
            release=release,
            renew=self.renew_if_due,
        )

    def listen(self, as_of: int) -> Listen:
        """Follow the updates after `as_of`, each once; -1 is before the first.

        Raises `HistoryGoneError` if some of it may be gone.
        """
        if as_of < self.since and not as_of == -1 == self.since - 1:
            raise HistoryGoneError(as_of=as_of, since=self.since)
        return Listen(self._log, self, as_of + 1)

    def downgrade_since(self, since: int) -> int:
        """Give up history below `since` and renew the lease; returns the `since` of this lease.

        Raises `LeaseExpiredError` if the shard has forgotten it.
        """
        require_frontier(since, name="since")
        outstanding = min(self._in_use, default=None)
        now_ns = self._log.clock.wall_ns()
        command = c.DowngradeSince(self.name, since, outstanding, now_ns)
        after: int = self._log.apply(command).outcome.since
        if after == EMPTY and since != EMPTY and self.since != EMPTY:
            raise LeaseExpiredError(self.name)
        self.since = after
        return after

    def heartbeat(self) -> None:
        """Renew the lease. Raises `LeaseExpiredError`."""
        self.downgrade_since(self.since)

    def renew_if_due(self) -> None:
        """Renew the lease once a third of it has passed.

        A failure is tried again later: reading works until the parts are gone.
        """
        now_ns = self._log.clock.wall_ns()
        if now_ns - self._renewed_ns < self._lease_ns // 3:
            return
        self._renewed_ns = now_ns
        with suppress(*FAILURES, LeaseExpiredError):
            self.heartbeat()

    def expire(self) -> None:
        """End the lease. Ending it twice does nothing more."""
        self._log.apply(c.ExpireLeasedReader(self.name))

    def leave(self) -> None:
        """End the lease if the storage takes the write; otherwise it runs out by itself.

        Does nothing in a forked child.
        """
        with suppress(*FAILURES, ForkedError):
            self.expire()

    def explain(self, error: MissingPartError) -> Exception:
        """The error for a missing part: damage, unless this lease has run out."""
        if self.name in self._log.refresh().leased:
            return error
        return LeaseExpiredError(self.name)


def snapshot_unheld(log: StateLog, as_of: int) -> ShardSnapshot:
    """The shard at `as_of`, held by nobody. Raises as `Shard.snapshot`."""
    state = log.refresh()
    return ShardSnapshot(
        log.blob,
        rule=state.rule,
        as_of=as_of,
        batches=machine.snapshot(state, as_of),
        explain=lambda error: error,
        release=lambda: None,
    )


class Listen:
    """Follows a shard from a frontier on. Each `poll` gives the next stretch, or None: wait."""

    def __init__(self, log: StateLog, reader: ReadLease, frontier: int) -> None:
        self.frontier = frontier
        self._log = log
        self._reader = reader

    def poll(self) -> ListenBatch | None:
        """The next stretch of time that is complete, with its rows; None if there is none yet.

        Moves the frontier and the reader's since; rows of an earlier poll must be read by then.
        """
        if self.frontier == EMPTY:
            return None
        self._reader.downgrade_since(max(self.frontier - 1, 0))
        batch = machine.next_listen_batch(self._log.refresh(), self.frontier)
        if batch is None:
            return None
        rows = read_batches(
            self._log.blob,
            [batch],
            rule=RULES[self._log.state.rule],
            view=listen_window(batch, self.frontier),
        )
        lower, self.frontier = self.frontier, batch.upper
        return ListenBatch(lower, batch.upper, explained(rows, self._reader.explain))

    def follow(self, wait: Callable[[], bool]) -> Iterator[ListenBatch]:
        """Yield stretch after stretch until the shard is finished or `wait()` says False."""
        while self.frontier != EMPTY:
            found = self.poll()
            if found is not None:
                yield found
            elif not wait():
                return
