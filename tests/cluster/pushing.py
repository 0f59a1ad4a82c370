"""Pushes of a driver on a cluster whose processes share a bucket, and nothing else.

The generation of a push is its number, so that a driver that is run again continues where the
killed one was. Two stores take a shard each.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.spark import bulk_import, push
from tests.cluster.killing import WAIT_S, has_tasks, killing

BUCKET: Final = "pushes"
URL: Final = f"s3://{BUCKET}/root"
STAGING_URL: Final = f"s3://{BUCKET}/staging"
COLLECTION_URL: Final = f"s3://{BUCKET}/backups"
STRAGGLED_URL: Final = f"s3://{BUCKET}/straggled"
SHARDS: Final = 2
NAMES: Final = tuple(f"store-{shard}" for shard in range(SHARDS))
ROWS: Final = 2000
PUSHES: Final = 3
REVERTED: Final = 2
_STEP: Final = 500
_DIGESTS: Final = 160
"""Digests in each value of `nights`: 10 KB, so a part is larger than one piece of an upload."""


def generation(spark: SparkSession, number: int, digests: int = 0) -> DataFrame:
    """The rows of push `number`, each with a value that ends in some digests. A quarter of the keys
    of the next push are new."""
    start = number * _STEP
    value = f"CONCAT('v{number}-', id"
    if digests:
        each = f"transform(sequence(1, {digests}), i -> sha2(CONCAT(id, '/', i), 256))"
        value += f", ' ', array_join({each}, '')"
    return spark.range(start, start + ROWS, 1, 6).selectExpr(
        "printf('k%06d', id) AS key", f"{value}) AS value"
    )


def model(number: int) -> dict[bytes, bytes]:
    """The same rows, with the beginnings of their values."""
    start = number * _STEP
    return {b"k%06d" % id_: b"v%d-%d" % (number, id_) for id_ in range(start, start + ROWS)}


def expected(numbers: list[int], shard: int) -> dict[bytes, bytes]:
    """The rows of a shard after some pushes."""
    rows: dict[bytes, bytes] = {}
    for number in numbers:
        rows |= model(number)
    return {key: rows[key] for key in rows if bulk.shard_of(key, SHARDS) == shard}


def require_rows(found: Mapping[bytes, bytes], wanted: Mapping[bytes, bytes]) -> None:
    """Fail unless the keys are the same, and the first word of each value is the wanted one."""
    assert found.keys() == wanted.keys()
    wrong = [key for key in wanted if found[key].partition(b" ")[0] != wanted[key]]
    assert not wrong, wrong[:5]


def nights(spark: SparkSession, shared: Path, pick: random.Random) -> dict[str, Any]:
    """The pushes that are not there yet, with killed executors. Then one push is taken back."""
    pushes, kills = bulk.Pushes(URL), 0
    while (number := len(pushes.list()) + 1) <= PUSHES:
        with killing(spark, lambda: has_tasks(spark), pick) as killed:
            report = push(
                generation(spark, number, _DIGESTS),
                URL,
                key="key",
                value="value",
                shards=SHARDS,
                partitions=2,
                timeout=WAIT_S,
            )
        assert report.number == number
        kills += len(killed)
    pushes.wait(REVERTED, NAMES, timeout=WAIT_S)
    pushes.revert(REVERTED)
    pushes.wait(REVERTED, NAMES, until="reverted", timeout=WAIT_S)
    found = pushes.wait(PUSHES, NAMES, timeout=WAIT_S)
    return {"kills": kills, "states": [each.state for each in found.stores]}


def staged(spark: SparkSession, shared: Path, pick: random.Random) -> dict[str, Any]:
    """An import that is staged in the bucket, and a read of a collection there. Executors die."""
    with kvstore.open("staged-store") as store:
        with killing(spark, lambda: has_tasks(spark), pick) as loading:
            bulk_import(generation(spark, 1), store, "key", "value", staging=STAGING_URL)
        assert dict(store.scan()) == model(1)
        assert len(store.imports.all()) == 1
        Collection(COLLECTION_URL).backup(store)
    rows = spark.read.format("kvstore").option("numPartitions", "4").load(COLLECTION_URL)
    with killing(spark, lambda: has_tasks(spark), pick) as reading:
        found = [(bytes(row.key), bytes(row.value)) for row in rows.collect()]
    assert sorted(found) == sorted(model(1).items())
    return {"kills": len(loading) + len(reading)}


def straggling(spark: SparkSession, shared: Path, pick: random.Random) -> dict[str, Any]:
    """A push with speculation, of two parts: the bucket keeps the first one waiting."""
    report = push(generation(spark, 1), STRAGGLED_URL, key="key", value="value", partitions=2)
    return {"number": report.number, "rows": report.rows}
