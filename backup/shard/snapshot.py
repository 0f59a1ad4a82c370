"""Reading a shard: snapshots at a time, splits of them for other processes, and listening.

A snapshot is a list of batches and a time. Its parts stay readable while a lease holds its version,
so it is used inside `with` and released. Where the lease was lost, a missing part is reported as
`LeaseExpiredError`, not as damage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import pyarrow as pa

from backup.shard.rows.batch_reader import read_batches
from backup.shard.rows.found import FindBounds, Found, find_versions
from backup.shard.rows.part_bytes import MissingPartError
from backup.shard.rows.part_reader import OpenedPart, open_part
from backup.shard.rows.ranges import range_tombstones
from backup.shard.rows.rules import RULES, VERSIONS, AsOf, View, Window
from backup.shard.state import codec
from backup.shard.state.state import ShardBatch, ShardPart
from kvstore.codec.json import read_object
from kvstore.forks import own
from kvstore.joins.order import OrderedLabels
from kvstore.limits import STATE_BYTES_MAX
from kvstore.mvcc import RangeTombstone
from kvstore.span import Span
from kvstore.storage.contract import Blob
from kvstore.timestamp import TIMESTAMP_MAX

_SPLIT_FORMAT = 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of `span` in a snapshot at `as_of`. Travels as JSON to other processes.

    A process that can read the blob can read it, as long as the snapshot is held.
    """

    rule: str
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
        rule = RULES[self.rule]
        return read_batches(blob, self.batches, rule=rule, view=view, span=self.span, whole=whole)

    def to_json(self) -> str:
        """The split as text; `from_json` reads it back."""
        end = None if self.span.end is None else self.span.end.hex()
        body = {
            "format": _SPLIT_FORMAT,
            "rule": self.rule,
            "as_of": self.as_of,
            "span": [self.span.start.hex(), end],
            "batches": [codec.encode_batch(batch) for batch in self.batches],
        }
        return json.dumps(body, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Split:
        """The split in a text of `to_json`. Raises `CorruptionError` for any other text."""
        body = read_object(text.encode(), where="a split of a snapshot", bytes_max=STATE_BYTES_MAX)
        if body.integer("format") != _SPLIT_FORMAT or body.text("rule") not in RULES:
            raise body.damaged("its format or rule is of another release")
        bounds = body.field("span", list)
        if len(bounds) != 2:
            raise body.damaged("its span has no two ends")
        start, end = (None if end is None else body.unhexed(end, name="span") for end in bounds)
        if start is None or (end is not None and start >= end):
            raise body.damaged("its span is empty")
        batches = tuple(codec.decode_batch(batch) for batch in body.objects("batches"))
        return cls(body["rule"], body.integer("as_of"), Span(start, end), batches)


class ShardSnapshot:
    """The shard at `as_of`, readable any number of times until it is closed."""

    def __init__(
        self,
        blob: Blob,
        *,
        rule: str,
        as_of: int,
        batches: tuple[ShardBatch, ...],
        explain: Callable[[MissingPartError], Exception],
        release: Callable[[], None],
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self.as_of = as_of
        self.rule = rule
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
        rule = RULES[self.rule]
        for rows in explained(
            read_batches(self._blob, self.batches, rule=rule, view=view, span=span), self._explain
        ):
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
        """The version that each label has at its own time, at most `as_of`. See `rows.found`.

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
        """The range tombstones of a window that reach into `span`. See `rows.ranges`.

        Raises `LeaseExpiredError` if the lease was lost and parts are gone.
        """
        open_one = opened or partial(OpenedPart, self._blob, rule=VERSIONS, by_block=True)
        return explained(range_tombstones(self.batches, view, span, open_one), self._explain)

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
        spans = split_batches(self._blob, self.batches, count, rule=self.rule, span=span)
        return [Split(self.rule, self.as_of, each, self.batches) for each in spans]


def split_batches(
    blob: Blob, batches: Sequence[ShardBatch], count: int, *, rule: str, span: Span | None = None
) -> list[Span]:
    """Cut `span` into at most `count` spans in which batches have about equal rows, in order."""
    span = span or Span()
    cuts = _cuts(_fences(blob, batches, count, rule, span), count)
    bounds = [span.start, *(cut for cut in cuts if cut > span.start and cut in span), span.end]
    return [Span(low or b"", high) for low, high in pairwise(bounds)]


def _fences(
    blob: Blob, batches: Sequence[ShardBatch], count: int, rule: str, span: Span
) -> list[tuple[bytes, int]]:
    """Keys where parts or their row groups begin, each with the rows that follow it."""
    parts = [part for batch in batches for part in batch.parts]
    share = sum(part.rows for part in parts) // max(count, 1)
    fences: list[tuple[bytes, int]] = []
    for part in parts:
        if part.rows <= share:
            fences.append((part.key_min, part.rows))
            continue
        metadata = open_part(blob, part, RULES[rule]).metadata
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


def explained(rows: Iterator[_T], explain: Callable[[MissingPartError], Exception]) -> Iterator[_T]:
    """Pass rows on. For a missing part, raise the error that `explain` returns."""
    try:
        yield from rows
    except MissingPartError as error:
        raise explain(error) from error


class ListenBatch(NamedTuple):
    """The updates in `[lower, upper)`; `rows` may be read once, before the next poll."""

    lower: int
    upper: int
    rows: Iterator[pa.RecordBatch]


def listen_window(batch: ShardBatch, frontier: int) -> Window:
    """The part of `batch`, which may be merged, that a listener at `frontier` has not seen."""
    return Window(frontier - 1, min(batch.upper - 1, TIMESTAMP_MAX))
