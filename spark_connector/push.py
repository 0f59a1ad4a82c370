"""A DataFrame as a push: one job builds a shard for each group of stores, in a bucket.

    shuffle to ranges of (shard, key) -> one file for each shard in a range, sent -> one log entry

Each store takes the push by itself (`bulk.pull`), so the job needs no store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it

from kvstore.base.timestamp import TimeLike
from kvstore.bulk.bucket import BucketUrl
from kvstore.bulk.part import Part
from kvstore.bulk.progress import StageTimes
from kvstore.bulk.pushes import Push, Pushes, StoreStatus
from kvstore.bulk.pushes.push_log import ADD, ModeName, import_path, mode_of
from kvstore.bulk.pushes.pushes import SHARD, BuildingPush, import_id_of
from kvstore.bulk.sort import Duplicates
from kvstore.errors import UsageError
from kvstore.spark.access import Access, Address, staging_at
from kvstore.spark.load import (
    KEY,
    RESULT,
    Columns,
    ImportRows,
    Made,
    Progress,
    as_batches,
    raise_refusals,
    require_typed,
    results,
    rows_once,
    sent_part,
    table_rows,
    watched,
    without_repeats,
)
from kvstore.tables import Table, TableCodec


@dataclass(frozen=True, slots=True)
class PushReport:
    """The result of one push. `stages` has the seconds of compute, write and upload, summed over
    tasks, of seal in this process, and of spark: the rest of `build_seconds`, in which Spark
    starts, plans, shuffles and waits. So the stages sum to `build_seconds`, or to more where tasks
    ran at once. `stores` has what each store has done, if the job waited."""

    push: Push
    build_seconds: float
    wait_seconds: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict, compare=False)
    stores: tuple[StoreStatus, ...] = ()

    @property
    def number(self) -> int:
        """The number of the push."""
        return self.push.number

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return self.push.rows


def shard_of(key: Column | str, shards: int) -> Column:
    """The shard of each key, as `bulk.shard_of` tells it: a column of integers."""
    column = F.col(key) if isinstance(key, str) else key
    return (F.crc32(column.cast("binary")) % F.lit(shards)).cast("int")


def push(
    df: DataFrame,
    url: Address,
    *,
    key: Columns | None = None,
    value: Column | str | None = None,
    table: Table | None = None,
    shards: int = 1,
    mode: ModeName = ADD,
    prefix: bytes | None = None,
    keep_newer: bool = False,
    built_at: TimeLike | None = None,
    wait_for: Collection[str] = (),
    timeout: float | None = None,
    op: Column | str | None = None,
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    expires: Column | str | None = None,
    partitions: int | None = None,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> PushReport:
    """Push `df` to all stores that pull from `url`: a URL that backups take, or a path that Spark's
    machines and the stores share. Returns a report with the number of the push.

    For rows of a table (`table=store.table("trips")`, of any store with the definition that the
    serving ones have) `df` has columns of the table, as in `bulk_import`, and no `key` and `value`
    are given. A store whose table has another definition refuses the push.

    With several `shards`, each store takes one: `shard_of` tells which keys it gets. `mode`,
    `prefix`, `keep_newer` and `built_at` are as in `Pushes.begin`; a row outside of the span that
    the push replaces fails the job. The job waits until the stores `wait_for` have added the push;
    see `Pushes.wait` for what it raises then. The other parameters are as in `stage_import`.
    Nothing is pushed if the job fails or is killed; the files of a killed job stay until
    `Pushes.expire` removes them.
    """
    codec = None if table is None else table.codec()
    keyed = key, value, op, duplicates, order_by
    rows = _rows_of(df, table, codec, shards, partitions, expires, *keyed)
    rows.require_size(max_bytes)
    place = _root(url)
    pushes = Pushes(place)
    began, times = time.perf_counter(), StageTimes()
    how = mode_of(mode, prefix, codec, keep_newer=keep_newer, built_at=built_at)
    with BuildingPush(pushes, shards, max_bytes, how, codec=codec) as building:
        with watched(df.sparkSession, progress), rows_once(codec):
            ordered = _by_shard(rows, shards).mapInArrow(_sender(place, building.job, rows), RESULT)
            made = results(pushes.where, ordered, "building a push in")
        parts = _parts(made, shards, times)
        with times.stage("seal"):
            pushed = building.seal(parts)
    return _reported(pushes, pushed, began, times, wait_for, timeout)


def _rows_of(
    df: DataFrame,
    table: Table | None,
    codec: TableCodec | None,
    shards: int,
    partitions: int | None,
    expires: Column | str | None,
    key: Columns | None,
    value: Column | str | None,
    op: Column | str | None,
    duplicates: Duplicates,
    order_by: Column | str | None,
) -> ImportRows:
    """The rows of a table, if one is given, or keys and values. Raises `UsageError`."""
    if table is not None and codec is not None:
        require_typed(table, duplicates, key=key, value=value, op=op, order_by=order_by)
        return table_rows(df, codec, expires=expires, partitions=partitions, shards=shards)
    if key is None or value is None:
        raise UsageError("None is no column of keys or values", "pass both, or push a table")
    rows = ImportRows(df, key, value, op, partitions, None, duplicates, order_by, expires)
    rows.require_order()
    return rows


def _reported(
    pushes: Pushes,
    pushed: Push,
    began: float,
    times: StageTimes,
    wait_for: Collection[str],
    timeout: float | None,
) -> PushReport:
    """Wait for the stores that the job waits for, and report. The build ends with this call."""
    built = time.perf_counter()
    times.add_rest("spark", built - began)
    waited = pushes.wait(pushed.number, wait_for, timeout=timeout) if wait_for else None
    return PushReport(
        pushed,
        round(built - began, 3),
        round(time.perf_counter() - built, 3),
        {stage: round(spent, 3) for stage, spent in times.seconds.items()},
        () if waited is None else waited.stores,
    )


def _root(url: Address) -> BucketUrl:
    place = staging_at(url)
    if isinstance(place, BucketUrl):
        return place
    return BucketUrl(str(place), url.bucket_options() if isinstance(url, Access) else {})


def _by_shard(rows: ImportRows, shards: int) -> DataFrame:
    """The rows with their shard, partitioned by ranges of (shard, key), and sorted so."""
    chosen = rows.encoded()
    if rows.encoder is None:
        chosen = chosen.withColumn(SHARD, shard_of(KEY, shards))
    parted = chosen.repartitionByRange(rows.file_count(), SHARD, KEY)
    return parted.sortWithinPartitions(SHARD, KEY, *rows.last_first()).drop(*rows.order_columns())


def _sender(
    place: BucketUrl, job: str, pushed: ImportRows
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The task that writes the rows of each shard in its range into one part, and sends it."""
    keeps_first, is_encoded = pushed.order_by is not None, pushed.encoder is not None

    def build(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def work() -> list[tuple[int, Made]]:
            found = []
            for shard, rows in _shards(raise_refusals(batches) if is_encoded else iter(batches)):
                kept = without_repeats(rows) if keeps_first else rows
                target = place.below(import_path(job, shard))
                [made] = sent_part(target, import_id_of(job, shard), kept)
                found.append((shard, made))
            return found

        return as_batches(work)

    return build


def _shards(
    batches: Iterator[pa.RecordBatch],
) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
    """The rows of each shard, without the column of the shard. Each must be read to its end before
    the next."""
    left: list[pa.RecordBatch] = []

    def rows_of(shard: int) -> Iterator[pa.RecordBatch]:
        for batch in chain(left[:1], batches):
            left.clear()
            shards = batch.column(SHARD)
            count = pc.sum(pc.equal(shards, shard)).as_py() or 0
            if count:
                yield batch.slice(0, count).drop_columns([SHARD])
            if count < batch.num_rows:
                left.append(batch.slice(count))
                return

    while True:
        if not left:
            first = next((batch for batch in batches if batch.num_rows), None)
            if first is None:
                return
            left.append(first)
        shard = left[0].column(SHARD)[0].as_py()
        yield shard, rows_of(shard)


def _parts(
    made: Iterable[tuple[int, Made]], shards: int, times: StageTimes
) -> Sequence[Sequence[Part]]:
    """The parts of each shard. Adds the seconds of the tasks to `times`."""
    parts: list[list[Part]] = [[] for _ in range(shards)]
    for shard, (part, seconds) in made:
        for stage, spent in seconds.items():
            times.add(stage, spent)
        if part is not None:
            parts[shard].append(part)
    return parts
