"""Rows in any order become a push: each lies in the shard of its key, sorted in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.bulk.pushes.pushes import send_rows
from kvstore.errors import UsageError
from kvstore.mvcc.arrow import rows_schema
from kvstore.storage.memory_storage import MemoryBlob
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded
from tests.pushes.made import drain

SHARDS = 3
IN_MEMORY = {"RUN_BYTES_MAX": 1 << 20}
SPILLED = {"RUN_BYTES_MAX": 2_000}


def batches(rows: list[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(rows), 50):
        keys, values = zip(*rows[first : first + 50], strict=True)
        columns = [pa.array(column, pa.binary()) for column in (keys, values)]
        yield pa.RecordBatch.from_arrays(columns, schema=rows_schema())


@pytest.mark.parametrize("limits", [IN_MEMORY, SPILLED], ids=["in memory", "spilled"])
def test_each_row_reaches_the_store_of_its_shard(limits: dict[str, int]) -> None:
    pick = seeded()
    rows = [(b"%05d" % pick.randrange(500), b"%d" % number) for number in range(1_000)]
    pushes = Pushes.over(MemoryBlob(), "memory")
    with bounds(limits), pushes.begin(SHARDS) as building:
        push = send_rows(building, batches(rows), "last")
    last = dict(rows)
    assert push.rows == len(last)
    for shard in range(SHARDS):
        with kvstore.open(None, engine="memory") as store:
            drain(Puller(store, pushes, name="one", shard=shard))
            expected = {key: last[key] for key in last if bulk.shard_of(key, SHARDS) == shard}
            assert dict(store.scan()) == expected


@pytest.mark.parametrize("limits", [IN_MEMORY, SPILLED], ids=["in memory", "spilled"])
def test_a_key_that_comes_twice_is_refused_by_name(limits: dict[str, int]) -> None:
    rows = [(b"%05d" % (number % 199), b"value") for number in range(200)]
    pushes = Pushes.over(MemoryBlob(), "memory")
    with (
        bounds(limits),
        pushes.begin(SHARDS) as building,
        pytest.raises(UsageError, match=r"key b'00000' came twice"),
    ):
        send_rows(building, batches(rows))
    assert pushes.list() == []
