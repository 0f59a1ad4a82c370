"""A new store, seeded by tasks.

    sort runs (mapInArrow) -> merge, files for each span (mapInArrow) -> the driver takes the files

Invariants
1. The store appears by a rename, whole: see `bulk.places`.
2. No two attempts write under one name. Files that no result names are removed with the directory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame

from bulk.places import appearing
from bulk.seed import SeedRows, seed_files
from bulk.sort import Run, cuts, merged, sorted_runs
from kvstore.errors.system import storage_errors
from kvstore.opening import building
from kvstore.span import Span
from spark_connector.loading.results import RESULT, as_batches, results, spans_of
from spark_connector.seeding.rows import COLUMNS

_Task: TypeAlias = "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]"


class SeedTimes(NamedTuple):
    """The times that rows may have, `[since, upto]`."""

    since: int
    upto: int


class SortedRuns(NamedTuple):
    """The runs of one task, and the newest time in them."""

    runs: Sequence[Run]
    newest: int


def seed_store(rows: DataFrame, path: Path, times: SeedTimes, count: int) -> int:
    """Build a store at `path` by up to `count` tasks. Returns its newest time."""
    spark = rows.sparkSession
    with appearing(path, task="seed") as directory:
        found: list[SortedRuns] = results(
            directory, rows.mapInArrow(sorter(directory, times), RESULT), "sorting rows in"
        )
        runs = [run for each in found for run in each.runs]
        newest = max((each.newest for each in found), default=times.since)
        spans = spans_of(cuts(runs, count)) if runs else []
        numbers = spark.range(0, len(spans), 1, max(len(spans), 1))
        built = numbers.mapInArrow(merger(directory, runs, spans), RESULT)
        files = results(directory, built, "building files in")
        with building(directory / "store", since=times.since, newest=newest) as builder:
            for file in files:
                builder.add([file], [])
    return newest


def sorter(directory: Path, times: SeedTimes) -> _Task:
    """The task that sorts the rows of one partition into runs."""

    def sort(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def work() -> list[SortedRuns]:
            rows = SeedRows(COLUMNS, since=times.since, upto=times.upto)
            runs = sorted_runs(rows.entries(batches), directory / "runs")
            return [SortedRuns(runs, rows.newest)]

        return as_batches(work, directory)

    return sort


def merger(directory: Path, runs: Sequence[Run], spans: Sequence[Span]) -> _Task:
    """The task that writes the rows of all runs in one span as sorted files.

    Its input is the number of the span.
    """

    def written(span: Span) -> list[Path]:
        place = directory / f"files-{secrets.token_hex(8)}"
        with storage_errors(str(place)):
            place.mkdir()
        return list(seed_files(place, merged(runs, span), "drop one: df.dropDuplicates"))

    def merge(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in chain.from_iterable(batch.column(0).to_pylist() for batch in numbers):
            yield from as_batches(partial(written, spans[number]), directory)

    return merge
