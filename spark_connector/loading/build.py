"""Building an import of a DataFrame in Spark's workers.

    sort runs (mapInArrow) -> merge, one SST per span of keys (mapInArrow) -> manifest

The workers build runs and SSTs in the staging directory. Each run comes with samples, from which
the driver cuts the key space: one span for each SST. So Spark neither shuffles and sorts whole rows
nor passes over the input to look for borders. Only if an order decides between repeated keys does
Spark partition and sort, because that order is one of its values.

The driver writes the manifest from the results that the tasks return. Failed and repeated tasks
leave runs and parts that no result names. Such a file is never read.

Spark computes a DataFrame once, and a part of it again if a task is retried; with `order_by` it
computes it twice, because it samples first. If the rows change between two runs (`rand()`,
`current_timestamp()`), the import has some rows of each run.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, TypeAlias

import pyarrow as pa

import bulk
from bulk.manifest import Manifest
from bulk.part import Part, PartWriter
from bulk.sort import Run, cuts, merged, sorted_runs
from bulk.staging import discard
from kvstore.span import Span
from spark_connector.loading.progress import Progress, watched
from spark_connector.loading.results import RESULT, as_batches, results, spans_of
from spark_connector.loading.rows import Encoder, ImportRows, without_repeats

_SCRATCH: Final = "sorting-"
"""The folder of the sorted runs in the staging directory, which take as much room as the rows. A
random name follows, so a machine that sees it sees the driver's staging directory."""

_Task: TypeAlias = "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]"


def build_import(
    rows: ImportRows, directory: Path, import_id: int | None, progress: Progress | None
) -> Manifest:
    """Build an import of `rows` in `directory`; see `stage_import`. Discards it after a failure."""
    rows.require_order()
    count = rows.file_count()
    chosen, spark = rows.chosen(), rows.df.sparkSession
    staged = bulk.Import.create(directory, import_id=import_id)
    place = directory.resolve()
    scratch = place / f"{_SCRATCH}{secrets.token_hex(8)}"
    try:
        scratch.mkdir()
        with watched(spark, progress):
            if rows.order_by is None:
                sort = chosen.mapInArrow(sorter(scratch, rows.encoder), RESULT)
                runs = results(directory, sort, "sorting rows in")
                borders = cuts(runs, count) if rows.splits is None else rows.splits
                build = merger(scratch, staged.import_id, runs, spans_of(borders))
                spans = len(borders) + 1 if runs else 0
                tasks = spark.range(0, spans, 1, max(spans, 1))
            else:
                build = builder(scratch, staged.import_id)
                tasks = rows.by_key()
            parts = results(directory, tasks.mapInArrow(build, RESULT), "building files in")
        shutil.rmtree(scratch, ignore_errors=True)
        return staged.seal(parts, tables=rows.tables)
    except BaseException:
        discard(directory)
        raise


def sorter(scratch: Path, encoder: Encoder | None = None) -> _Task:
    """The task that sorts the rows of one partition into runs."""

    def sort(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = batches if encoder is None else encoder(batches)
        return as_batches(partial(sorted_runs, rows, scratch), scratch)

    return sort


def merger(scratch: Path, import_id: int, runs: Sequence[Run], spans: Sequence[Span]) -> _Task:
    """The task that merges the rows of all runs in one span into one part.

    Its input is the number of the span.
    """

    def merge(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in chain.from_iterable(batch.column(0).to_pylist() for batch in numbers):
            rows = merged(runs, spans[number])
            yield from as_batches(partial(_written, scratch.parent, import_id, rows), scratch)

    return merge


def builder(scratch: Path, import_id: int) -> _Task:
    """The task that writes the first row of each key of sorted rows into one part."""

    def build(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = without_repeats(batches)
        return as_batches(partial(_written, scratch.parent, import_id, rows), scratch)

    return build


def _written(staging: Path, import_id: int, rows: Iterable[pa.RecordBatch]) -> list[Part]:
    with PartWriter(staging, import_id) as writer:
        for batch in rows:
            writer.write(batch)
        part = writer.finish()
    return [] if part is None else [part]
