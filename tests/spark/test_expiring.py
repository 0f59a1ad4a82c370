"""Keys that expire, as Spark's tasks read them from a checkpoint, a collection and a server."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock
from kvstore.backup import Collection
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.spark.format_options import Mode, read_options
from kvstore.spark.read import CHANGES, STATE, QueryReader

START = 1_700_000_000_000_000_000
HOUR = 3600 * 10**9


@pytest.mark.parametrize("origin", ["checkpoint", "collection", "server"])
def test_tasks_read_a_deletion_at_the_due_time_and_no_records(tmp_path: Path, origin: str) -> None:
    clock = ManualClock(START)
    place = str(tmp_path / origin)
    with ExitStack() as opened:
        store = kvstore.open(tmp_path / "store", durability="async", clock=clock)
        opened.enter_context(store)
        at = store.put(b"goes", b"v", expires=timedelta(hours=1))
        store.put(b"waits", b"v", expires=timedelta(hours=3))
        store.put(b"stays", b"v")
        clock.advance(2 * HOUR)
        store.sync()
        if origin == "checkpoint":
            store.checkpoint(place)
        elif origin == "collection":
            Collection(place).backup(store)
        else:
            running = opened.enter_context(serving(app(store), ListenAddress("127.0.0.1", 0)))
            place = running.url
        _require_no_records(place, before=str(at + HOUR - 1))


def _require_no_records(place: str, before: str) -> None:
    def rows(*columns: str, **text: str) -> list[tuple[object, ...]]:
        mode: Mode = "changes" if "readChangeFeed" in text else "state"
        schema = CHANGES if mode == "changes" else STATE
        reader = QueryReader(
            read_options({"path": str(place), **text}, mode), schema, changes=mode == "changes"
        )
        batches = [batch for piece in reader.partitions() for batch in reader.read(piece)]
        return sorted(
            row
            for batch in batches
            for row in zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
        )

    assert rows("key") == [(b"stays",), (b"waits",)]
    assert rows("key", numPartitions="5") == [(b"stays",), (b"waits",)]
    assert rows("key", timestampAsOf=before) == [(b"goes",), (b"stays",), (b"waits",)]
    window = {"readChangeFeed": "true", "startingTimestamp": before}
    assert [key for (key,) in rows("key", **window)] == [b"goes"]
