"""Reading batches: the rows of any number of batches, merged in order, in bounded memory.

Parts and row groups are skipped by their bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import pyarrow as pa

from kvstore.backup.shard.rows.beside import ahead
from kvstore.backup.shard.rows.covers import lower_bound
from kvstore.backup.shard.rows.merge import ONE_ROW, Quota, merge_sorted
from kvstore.backup.shard.rows.part_reader import read_part, touches
from kvstore.backup.shard.rows.rules import AsOf, View, Window, fold
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
