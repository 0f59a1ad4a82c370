"""Building an import of a DataFrame in Spark's workers.

    sort runs (mapInArrow) -> merge, one SST per span of keys (mapInArrow) -> manifest

The workers build runs and SSTs in the staging directory. Each run comes with samples, from which
the driver cuts the key space: one span for each SST. So Spark neither shuffles and sorts whole rows
nor passes over the input to look for borders. Only if an order decides between repeated keys does
Spark partition and sort, because that order is one of its values.

The driver writes the manifest from the results that the tasks return. Failed and repeated tasks
leave runs and parts that no result names. Such a file is never read.

Machines that share nothing but a bucket cannot pass runs to each other. There Spark's own shuffle
partitions and sorts the rows, and each task writes one SST to its local disk and sends it:

    shuffle to ranges of keys -> one SST per range, sent to the bucket (mapInArrow) -> manifest

Spark computes a DataFrame once, and a part of it again if a task is retried; with `order_by`, and
for a bucket, it computes it twice, because it samples first. If the rows change between two runs
(`rand()`, `current_timestamp()`), the import has some rows of each run.
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
from bulk.bucket import BucketUrl
from bulk.manifest import Manifest
from bulk.part import Part, PartWriter
from bulk.sort import Run, cuts, merged, sorted_runs
from bulk.stages import StageTimes, TimedItems, timed
from bulk.staging import discard
from bulk.uploading import scratch_directory, send
from kvstore.span import Span
from kvstore.storage.address import public_address
from spark_connector.loading.progress import Progress, watched
from spark_connector.loading.results import RESULT, as_batches, results, spans_of
from spark_connector.loading.rows import Encoder, ImportRows, raise_refusals, without_repeats

_SCRATCH: Final = "sorting-"
"""The folder of the sorted runs in the staging directory, which take as much room as the rows. A
random name follows, so a machine that sees it sees the driver's staging directory."""

Seconds: TypeAlias = "dict[str, float]"
"""The seconds of the stages of one task."""

Made: TypeAlias = "tuple[Part | None, Seconds]"
"""The part that a task has made, None if it had no rows."""

_Task: TypeAlias = "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]"


def build_import(
    rows: ImportRows,
    place: Path | BucketUrl,
    import_id: int | None,
    progress: Progress | None,
    max_bytes: int | None = None,
    times: StageTimes | None = None,
) -> Manifest:
    """Build an import of `rows` at `place`; see `stage_import`. Discards it after a failure.

    `times` takes the seconds of tasks by stage, summed over tasks.
    """
    rows.require_order()
    rows.require_size(max_bytes)
    times = times or StageTimes()
    if isinstance(place, Path):
        manifest = _in_directory(rows, place, import_id, progress, times)
    else:
        manifest = _in_bucket(rows, place, import_id, progress, times)
    return manifest


def _in_bucket(
    rows: ImportRows,
    place: BucketUrl,
    import_id: int | None,
    progress: Progress | None,
    times: StageTimes,
) -> Manifest:
    """Build an import whose tasks share nothing but a bucket."""
    ordered = rows.by_key()
    where = public_address(place.url)
    staged = bulk.Import.create(
        place.url, import_id=import_id, options=place.options, patience=place.patience_s
    )
    try:
        with watched(rows.df.sparkSession, progress):
            build = sender(
                place,
                staged.import_id,
                keeps_first=rows.order_by is not None,
                is_encoded=rows.encoder is not None,
            )
            sent = results(where, ordered.mapInArrow(build, RESULT), "building files in")
        return staged.seal(_parts(sent, times), tables=rows.tables)
    except BaseException:
        staged.discard()
        raise


def _parts(made: Iterable[Made], times: StageTimes) -> list[Part]:
    """The parts that tasks have made. Adds the seconds of the tasks to `times`."""
    parts = []
    for part, seconds in made:
        for stage, spent in seconds.items():
            times.add(stage, spent)
        if part is not None:
            parts.append(part)
    return parts


def _in_directory(
    rows: ImportRows,
    directory: Path,
    import_id: int | None,
    progress: Progress | None,
    times: StageTimes,
) -> Manifest:
    """Build an import in a directory that all tasks see."""
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
                runs = _runs(results(directory, sort, "sorting rows in"), times)
                borders = cuts(runs, count) if rows.splits is None else rows.splits
                build = merger(scratch, staged.import_id, runs, spans_of(borders))
                spans = len(borders) + 1 if runs else 0
                tasks = spark.range(0, spans, 1, max(spans, 1))
            else:
                build = builder(scratch, staged.import_id)
                tasks = rows.by_key()
            made = results(directory, tasks.mapInArrow(build, RESULT), "building files in")
        shutil.rmtree(scratch, ignore_errors=True)
        return staged.seal(_parts(made, times), tables=rows.tables)
    except BaseException:
        discard(directory)
        raise


def _runs(made: Iterable[tuple[list[Run], Seconds]], times: StageTimes) -> list[Run]:
    runs: list[Run] = []
    for found, seconds in made:
        runs += found
        for stage, spent in seconds.items():
            times.add(stage, spent)
    return runs


def sorter(scratch: Path, encoder: Encoder | None = None) -> _Task:
    """The task that sorts the rows of one partition into runs."""

    def sort(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def work() -> list[tuple[list[Run], Seconds]]:
            waiting = TimedItems(batches if encoder is None else encoder(batches))
            runs, took = timed(lambda: sorted_runs(waiting, scratch))
            return [(runs, {"compute": waiting.seconds, "sort": took - waiting.seconds})]

        return as_batches(work, scratch)

    return sort


def merger(scratch: Path, import_id: int, runs: Sequence[Run], spans: Sequence[Span]) -> _Task:
    """The task that merges the rows of all runs in one span into one part.

    Its input is the number of the span.
    """

    def merge(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in chain.from_iterable(batch.column(0).to_pylist() for batch in numbers):
            rows = merged(runs, spans[number])
            yield from as_batches(
                partial(_written, scratch.parent, import_id, rows, "sort"), scratch
            )

    return merge


def builder(scratch: Path, import_id: int) -> _Task:
    """The task that writes the first row of each key of sorted rows into one part."""

    def build(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = without_repeats(batches)
        return as_batches(partial(_written, scratch.parent, import_id, rows, "compute"), scratch)

    return build


def sender(
    place: BucketUrl, import_id: int, *, keeps_first: bool = False, is_encoded: bool = False
) -> _Task:
    """The task that writes sorted rows into one part on its local disk, and sends the part.

    With `keeps_first` it writes the first row of each key. Otherwise a key that comes twice is
    refused. Rows that are `is_encoded` may carry a refusal.
    """

    def build(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = without_repeats(batches) if keeps_first else batches
        if is_encoded:
            rows = raise_refusals(rows)
        return as_batches(partial(sent_part, place, import_id, rows))

    return build


def sent_part(
    place: BucketUrl, import_id: int, rows: Iterable[pa.RecordBatch], compression: str = "lz4"
) -> list[Made]:
    """Write sorted rows into one part on the local disk, and send it. The local disk needs room
    for this part, and memory for a few pieces of it."""
    scratch = scratch_directory()
    try:
        [(part, seconds)] = _written(scratch, import_id, rows, "compute", compression)
        if part is None:
            return [(part, seconds)]
        _, took = timed(lambda: send(place.open(), part, scratch))
        return [(part, {**seconds, "upload": took})]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _written(
    staging: Path,
    import_id: int,
    rows: Iterable[pa.RecordBatch],
    waits_for: str,
    compression: str = "lz4",
) -> list[Made]:
    """The part of some rows, and the seconds of the stages: `waits_for` made the rows."""
    waiting = TimedItems(rows)

    def write() -> Part | None:
        with PartWriter(staging, import_id, compression=compression) as writer:
            for batch in waiting:
                writer.write(batch)
            return writer.finish()

    part, took = timed(write)
    return [(part, {waits_for: waiting.seconds, "write": took - waiting.seconds})]
