"""Reading a shard: snapshots at a time, the leases that hold them, and splits for other processes.

A snapshot is a list of batches and a time. Its parts stay readable while a lease holds its version,
so it is used inside `with` and released. Where the lease was lost, a missing part is reported as
`LeaseExpiredError`, not as damage.

A lease holds two things until its reader stops renewing it: `since`, so that compaction keeps the
history that the reader wants, and the version of its oldest open snapshot, so that collection keeps
the parts. Every downgrade renews the lease, and so does taking the rows of a snapshot, now and
then. Calls after the lease has run out raise `LeaseExpiredError`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import pyarrow as pa

from kvstore.backup.shard.rows.batch_reader import read_batches
from kvstore.backup.shard.rows.part_reader import MissingPartError, OpenedPart, open_part
from kvstore.backup.shard.rows.rules import AsOf, View, Window
from kvstore.backup.shard.rows.search import FindBounds, Found, find_versions, range_tombstones
from kvstore.backup.shard.state import codec
from kvstore.backup.shard.state.state import EMPTY, require_frontier
from kvstore.backup.shard.state.state_log import StateLog
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.base.forks import own
from kvstore.base.span import Span
from kvstore.codec.json import read_object
from kvstore.errors import ForkedError, LeaseExpiredError
from kvstore.limits import STATE_BYTES_MAX
from kvstore.mvcc import RangeTombstone
from kvstore.storage.contract import FAILURES, Blob
from kvstore.tables.joins import OrderedLabels

_SPLIT_FORMAT = 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of `span` in a snapshot at `as_of`. Travels as JSON to other processes.

    A process that can read the blob can read it, as long as the snapshot is held.
    """

    as_of: int
    span: Span
    batches: tuple[ShardBatch, ...]

    def read(
        self, blob: Blob, view: View | None = None, *, whole: Span | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the split's rows in order: the state at `as_of`, or another `view` of them.

        `whole` is the span that was cut: given it, each range tombstone comes with one split.
        """
        view = view or AsOf(self.as_of)
        return read_batches(blob, self.batches, view=view, span=self.span, whole=whole)

    def to_json(self) -> str:
        """The split as text; `from_json` reads it back."""
        end = None if self.span.end is None else self.span.end.hex()
        body = {
            "format": _SPLIT_FORMAT,
            "as_of": self.as_of,
            "span": [self.span.start.hex(), end],
            "batches": [codec.encode_batch(batch) for batch in self.batches],
        }
        return json.dumps(body, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Split:
        """The split in a text of `to_json`. Raises `CorruptionError` for any other text."""
        body = read_object(text.encode(), where="a split of a snapshot", bytes_max=STATE_BYTES_MAX)
        if body.integer("format") != _SPLIT_FORMAT:
            raise body.damaged("its format is of another release")
        bounds = body.field("span", list)
        if len(bounds) != 2:
            raise body.damaged("its span has no two ends")
        start, end = (None if end is None else body.unhexed(end, name="span") for end in bounds)
        if start is None or (end is not None and start >= end):
            raise body.damaged("its span is empty")
        batches = tuple(codec.decode_batch(batch) for batch in body.objects("batches"))
        return cls(body.integer("as_of"), Span(start, end), batches)


class ShardSnapshot:
    """The shard at `as_of`, readable any number of times until it is closed."""

    def __init__(
        self,
        blob: Blob,
        *,
        as_of: int,
        batches: tuple[ShardBatch, ...],
        explain: Callable[[MissingPartError], Exception],
        release: Callable[[], None],
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self.as_of = as_of
        self.batches = batches
        self._blob = blob
        self._explain = explain
        self._release = release
        self._renew = renew
        own(self, f"a snapshot of a shard at {as_of}")

    def __enter__(self) -> ShardSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the snapshot. Closing twice does nothing more."""
        self._release()

    def renew(self) -> None:
        """Renew the lease, if that is due.

        `read` and `view` do so. A caller that reads the parts itself calls this now and then.
        """
        self._renew()

    def read(self, span: Span | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the state at `as_of` in order, in bounded memory.

        Raises `LeaseExpiredError` if the lease was lost and parts are gone.
        """
        return self.view(AsOf(self.as_of), span)

    def view(self, view: View, span: Span | None = None) -> Iterator[pa.RecordBatch]:
        """Yield another view of the same batches, such as `Window(-1, as_of)`: all versions.

        The lease is renewed while rows are taken, however long that lasts.
        """
        rows_of = read_batches(self._blob, self.batches, view=view, span=span)
        for rows in _explained(rows_of, self._explain):
            yield rows
            self._renew()

    def find(
        self,
        labels: OrderedLabels,
        *,
        age_max: int,
        bytes_max: int,
        opened: Callable[[ShardPart], OpenedPart] | None = None,
    ) -> Found | None:
        """The version that each label has at its own time, at most `as_of`. See
        `search.find_versions`.

        Raises `LeaseExpiredError` if the lease was lost and parts are gone.
        """
        bounds = FindBounds(age_max, bytes_max)
        try:
            return find_versions(
                self._blob, self.batches, labels, bounds, renew=self._renew, opened=opened
            )
        except MissingPartError as error:
            raise self._explain(error) from error

    def range_tombstones(
        self, view: Window, span: Span, *, opened: Callable[[ShardPart], OpenedPart] | None = None
    ) -> Iterator[RangeTombstone]:
        """The range tombstones of a window that reach into `span`. See `search.range_tombstones`.

        Raises `LeaseExpiredError` if the lease was lost and parts are gone.
        """
        open_one = opened or partial(OpenedPart, self._blob, by_block=True)
        return _explained(range_tombstones(self.batches, view, span, open_one), self._explain)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise `LeaseExpiredError` for a part that another reader of this snapshot has missed,
        where the lease was lost."""
        try:
            yield
        except MissingPartError as error:
            raise self._explain(error) from error

    def splits(self, count: int, span: Span | None = None) -> list[Split]:
        """Cut the snapshot by key into at most `count` splits of about equal rows, in order.

        Where there are too few parts to cut between, the footers of the largest parts are read.
        """
        spans = split_batches(self._blob, self.batches, count, span=span)
        return [Split(self.as_of, each, self.batches) for each in spans]


class ReadLease:
    """A lease: it holds `since`, and the versions of its open snapshots. For a `with` statement."""

    def __init__(self, log: StateLog, *, lease_ns: int) -> None:
        """Register it. It must be renewed within `lease_ns`."""
        name = self.name = f"r-{secrets.token_hex(8)}"
        now_ns = log.clock.wall_ns()
        registered = log.apply(
            lambda state: state.register_leased(name, now_ns=now_ns, lease_ns=lease_ns)
        )
        self.since = registered.outcome.since
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
        batches = state.snapshot(as_of)
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
            as_of=as_of,
            batches=batches,
            explain=self._explain,
            release=release,
            renew=self.renew_if_due,
        )

    def downgrade_since(self, since: int) -> int:
        """Give up history below `since` and renew the lease; returns the `since` of this lease.

        Raises `LeaseExpiredError` if the shard has forgotten it.
        """
        require_frontier(since, name="since")
        outstanding = min(self._in_use, default=None)
        now_ns = self._log.clock.wall_ns()
        after = self._log.apply(
            lambda state: state.downgrade_since(
                self.name, since, outstanding=outstanding, now_ns=now_ns
            )
        ).outcome
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
        self._log.apply(lambda state: state.expire_leased(self.name))

    def leave(self) -> None:
        """End the lease if the storage takes the write; otherwise it runs out by itself.

        Does nothing in a forked child.
        """
        with suppress(*FAILURES, ForkedError):
            self.expire()

    def _explain(self, error: MissingPartError) -> Exception:
        """The error for a missing part: damage, unless this lease has run out."""
        if self.name in self._log.refresh().leased:
            return error
        return LeaseExpiredError(self.name)


def snapshot_unheld(log: StateLog, as_of: int) -> ShardSnapshot:
    """The shard at `as_of`, held by nobody. Raises as `Shard.snapshot`."""
    return ShardSnapshot(
        log.blob,
        as_of=as_of,
        batches=log.refresh().snapshot(as_of),
        explain=lambda error: error,
        release=lambda: None,
    )


def split_batches(
    blob: Blob, batches: Sequence[ShardBatch], count: int, *, span: Span | None = None
) -> list[Span]:
    """Cut `span` into at most `count` spans in which batches have about equal rows, in order."""
    span = span or Span()
    cuts = _cuts(_fences(blob, batches, count, span), count)
    bounds = [span.start, *(cut for cut in cuts if cut > span.start and cut in span), span.end]
    return [Span(low or b"", high) for low, high in pairwise(bounds)]


def _fences(
    blob: Blob, batches: Sequence[ShardBatch], count: int, span: Span
) -> list[tuple[bytes, int]]:
    """Keys where parts or their row groups begin, each with the rows that follow it."""
    parts = [part for batch in batches for part in batch.parts]
    share = sum(part.rows for part in parts) // max(count, 1)
    fences: list[tuple[bytes, int]] = []
    for part in parts:
        if part.rows <= share:
            fences.append((part.key_min, part.rows))
            continue
        metadata = open_part(blob, part).metadata
        for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
            statistics = group.column(0).statistics
            known = statistics is not None and statistics.has_min_max
            fences.append((statistics.min if known else part.key_min, group.num_rows))
    return sorted(fence for fence in fences if fence[0] in span)


def _cuts(fences: list[tuple[bytes, int]], count: int) -> list[bytes]:
    """At most `count - 1` of the fences, ascending, that divide the rows about equally."""
    total = sum(rows for _, rows in fences)
    cuts: list[bytes] = []
    passed = 0
    for key, rows in fences:
        due = passed * count >= total * (len(cuts) + 1)
        if due and len(cuts) < count - 1 and (not cuts or key > cuts[-1]):
            cuts.append(key)
        passed += rows
    return cuts


def _explained(
    rows: Iterator[_T], explain: Callable[[MissingPartError], Exception]
) -> Iterator[_T]:
    """Pass rows on. For a missing part, raise the error that `explain` returns."""
    try:
        yield from rows
    except MissingPartError as error:
        raise explain(error) from error
