"""Reading batches: the rows of any number of batches, merged in order, in bounded memory.

Parts and row groups are skipped by their bounds. The sorted runs of the batches are merged into
windows, in which no key is cut in two, and a fold makes the rows of a view of each window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.backup.shard.rows.part_reader import ahead, read_part, touches
from kvstore.backup.shard.rows.rules import (
    ORDER,
    AsOf,
    Bools,
    Longs,
    Sorted,
    View,
    Window,
    column_numpy,
    fold,
    lower_bound,
    same_as_previous,
)
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.base.span import Span
from kvstore.limits import (
    MERGE_BYTES_MAX,
    MERGE_ROWS_MAX,
    MERGE_SOURCE_BYTES_MIN,
    MERGE_SOURCE_ROWS_MIN,
    ROW_GROUP_BYTES_MAX,
    ROW_GROUP_ROWS_MAX,
)
from kvstore.mvcc.arrow import key_words
from kvstore.storage.contract import Blob


def read_batches(
    blob: Blob,
    batches: Iterable[ShardBatch],
    *,
    view: View,
    span: Span | None = None,
    whole: Span | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `view` over all `batches`, merged, in order, only the rows in `span`.

    Range tombstones are cut to `span`. Where `span` is one cut of a `whole`, they are cut to
    `whole` instead, and come with the cut in which they begin: all cuts together give the rows of
    the whole.

    Record batches have any size above zero; a key is never cut in two. Memory is bounded by
    `MERGE_ROWS_MAX` and `MERGE_BYTES_MAX`, however much is read. Raises `MissingPartError`,
    `CorruptionError`.
    """
    span = span or Span()
    # Newest first: the merge then finds the versions of a key in their order.
    runs = [run for batch in batches for run in _runs(batch, view, span)][::-1]
    sources = [
        (
            chain.from_iterable(
                read_part(
                    blob,
                    part,
                    span=span,
                    batch_rows=share.rows,
                    batch_bytes=share.nbytes,
                    whole=whole,
                )
                for part in run
            ),
            share if len(runs) > 1 else ONE_ROW,
        )
        for run, share in zip(runs, _shares(runs), strict=True)
    ]
    folding = fold(view)
    for window in ahead(merge_sorted(sources)):
        folded = folding(window)
        if (
            whole is not None
        ):  # range rows from before the span have covered its rows; they come with another cut
            folded = folded.slice(lower_bound(folded.column(0), span.start))
        if folded.num_rows:
            yield folded


def _shares(runs: Sequence[Sequence[ShardPart]]) -> list[Quota]:
    """The share of each run, in proportion to its size.

    All buffers then reach about as far in key order. So windows are as large as they can be, and
    few: each window costs a look at every run.
    """
    sums = [(sum(p.rows for p in run), sum(p.size for p in run)) for run in runs]
    rows, size = (max(sum(column), 1) for column in zip(*sums, strict=True)) if sums else (1, 1)
    return [  # halved: a source may hold twice its share
        Quota(
            _within(
                count * MERGE_ROWS_MAX // (2 * rows), MERGE_SOURCE_ROWS_MIN, ROW_GROUP_ROWS_MAX
            ),
            _within(
                part * MERGE_BYTES_MAX // (2 * size), MERGE_SOURCE_BYTES_MIN, ROW_GROUP_BYTES_MAX
            ),
        )
        for count, part in sums
    ]


def _within(number: int, least: int, most: int) -> int:
    return max(least, min(most, number))


def _runs(batch: ShardBatch, view: View, span: Span) -> Iterator[list[ShardPart]]:
    """The sorted runs of a batch, without the parts that have no row of the view."""
    runs: dict[int, list[ShardPart]] = {}
    for part in batch.parts:
        if touches(part, span) and _in_time(part, view):
            runs.setdefault(part.run, []).append(part)
    yield from runs.values()


def _in_time(part: ShardPart, view: View) -> bool:
    match view:
        case AsOf(as_of):
            return part.time_min <= as_of
        case Window(since, upto):
            return part.time_min <= upto and part.time_max > since
        case _:
            return True


# --------------------------------------------------------------------------------------------------
# Merging sorted sources of record batches into windows, in bounded memory and without row loops.
#
# Each source yields record batches sorted as versions are. Take the last buffered key of every
# source: all buffered rows below the least of these keys are complete. They are cut off, put in
# order and handed on as a window. So a key is never cut in two, and memory is O(buffered rows +
# versions of one key). A window is cut once each source has buffered its share of rows or bytes, or
# all of its rest. So a window takes at least the share of the source with the least key. Where
# shares are in proportion to the sizes of the sources, a window takes most of all buffers, and the
# look at every source for each window costs little.
#
# Ordering a window costs little more than reading it. The first eight bytes after the window's
# common prefix become integers. A merge sort (timsort, which finds the sorted runs) orders these,
# and only tied rows go through Arrow's comparison of all columns.


class Quota(NamedTuple):
    """How much a source buffers: a number of rows, or fewer rows with a number of bytes."""

    rows: int
    nbytes: int


ONE_ROW: Final = Quota(1, 1)


def merge_sorted(sources: Sequence[tuple[Iterator[pa.RecordBatch], Quota]]) -> Iterator[Sorted]:
    """Yield the rows of all sources, in order, in windows that hold whole keys.

    A source buffers its share, and the rest of the batch that completes it; or all rows of one key
    if they are more. The order of the sources decides nothing but the cost: see
    `_are_versions_in_order`.
    """
    pending = [_Source(source, share) for source, share in sources]
    while True:
        for source in pending:
            source.fill()
        pending = [source for source in pending if source.chunks]
        if not pending:
            return
        bounds = [source.last for source in pending if not source.done]
        bound = min(bounds, default=None)
        taken = [source.take_below(bound) for source in pending]
        found = [chunks for chunks in taken if chunks]
        if len(found) == 1:
            yield from map(Sorted, _whole_keys(found[0]))
        else:
            yield ordered([chunk for chunks in found for chunk in chunks])


class _Source:
    """The buffer of one source: chunks in order, none empty."""

    def __init__(self, batches: Iterator[pa.RecordBatch], share: Quota) -> None:
        self._batches = batches
        self._share = share
        self.chunks: list[pa.RecordBatch] = []
        self._rows = self._nbytes = 0
        self.done = False

    @property
    def last(self) -> bytes:
        return _key(self.chunks[-1], -1)

    def fill(self) -> None:
        """Read until the share and two keys are buffered, or to the end.

        The second key shows that the first is complete.
        """
        while not self.done and (not self._has_share() or _key(self.chunks[0], 0) == self.last):
            batch = next(self._batches, None)
            if batch is None:
                self.done = True
            elif batch.num_rows:
                self.chunks.append(batch)
                self._rows += batch.num_rows
                self._nbytes += batch.nbytes

    def _has_share(self) -> bool:
        return self._rows >= self._share.rows or self._nbytes >= self._share.nbytes

    def take_below(self, bound: bytes | None) -> list[pa.RecordBatch]:
        """Cut off the rows below `bound`; all of them if it is None."""
        taken: list[pa.RecordBatch] = []
        while self.chunks:
            chunk = self.chunks[0]
            count = chunk.num_rows if bound is None else lower_bound(chunk.column(0), bound)
            if count:
                taken.append(chunk.slice(0, count))
            if count < chunk.num_rows:
                self.chunks[0] = chunk.slice(count)
                break
            del self.chunks[0]
        # Here and not for each fill: `nbytes` of a slice takes 10 us.
        self._rows = sum(int(chunk.num_rows) for chunk in self.chunks)
        self._nbytes = sum(int(chunk.nbytes) for chunk in self.chunks)
        return taken


def ordered(chunks: Sequence[pa.RecordBatch]) -> Sorted:
    """The rows of `chunks`, each sorted, in the order of versions."""
    batch = pa.concat_batches(chunks)
    keys = batch.column(0)
    low = min(_key(chunk, 0) for chunk in chunks)
    high = max(_key(chunk, -1) for chunk in chunks)
    words = key_words(keys, skip=_shared(low, high))
    order: Longs = np.argsort(words, kind="stable")
    sorted_words = words[order]
    same = sorted_words[1:] == sorted_words[:-1]
    if same.any():
        order = _break_ties(batch, order, same)
    if (order[1:] > order[:-1]).all():
        return Sorted(batch)
    return Sorted(batch, order)


def _shared(low: bytes, high: bytes) -> int:
    """The length of the common prefix of `low` and `high`, and so of all keys between them."""
    pairs = enumerate(zip(low, high, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(low), len(high)))


def _break_ties(batch: pa.RecordBatch, order: Longs, same: Bools) -> Longs:
    """Order the rows whose words are equal by all sort columns. O(t log t) for t tied rows."""
    tied = np.zeros(len(order), dtype=np.bool_)
    tied[1:] |= same
    tied[:-1] |= same
    places = np.flatnonzero(tied)
    rows = order[places]
    if _are_versions_in_order(batch, rows, same[places[1:] - 1]):
        return order
    columns = batch.select([name for name, _ in ORDER]).take(pa.array(rows))
    order[places] = rows[pc.sort_indices(columns, sort_keys=list(ORDER)).to_numpy()]
    return order


def _are_versions_in_order(batch: pa.RecordBatch, rows: Longs, is_tied: Bools) -> bool:
    """Whether each of `rows` that is tied with the row before it is an older version of its key.

    That is so where the sources come newest first, and keys differ within eight bytes of their
    common prefix. The look takes a third of the time of the sort.
    """
    times = column_numpy(batch, "timestamp")[rows]
    if not (times[1:] < times[:-1])[is_tied].all():
        return False
    keys = batch.column(0).take(pa.array(rows))
    return bool(same_as_previous(keys)[1:][is_tied].all())


def _whole_keys(chunks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Chunks of one source as windows, uncopied; chunks that share a key are joined."""
    held: list[pa.RecordBatch] = []
    for chunk in chunks:
        if held and _key(held[-1], -1) != _key(chunk, 0):
            yield pa.concat_batches(held) if len(held) > 1 else held[0]
            held = []
        held.append(chunk)
    if held:
        yield pa.concat_batches(held) if len(held) > 1 else held[0]


def _key(batch: pa.RecordBatch, row: int) -> bytes:
    key: bytes = batch.column(0)[row].as_py()
    return key
