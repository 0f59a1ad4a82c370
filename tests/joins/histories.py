"""Random histories for joins, the labels of a test, and the answer by the history of a key."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvstore import ManualClock, Store, bulk
from kvstore.mvcc.key_history import newest_at

KEYS = [b"", b"a", b"a\x00", b"a\x00\x01", b"ab", b"b", b"b\xff", b"c"]
NS = pa.timestamp("ns", "UTC")


def table(labels: list[tuple[bytes, int]], **more: Any) -> pa.Table:
    keys, times = [key for key, _ in labels], [time for _, time in labels]
    columns = {"id": pa.array(keys, pa.binary()), "ts": pa.array(times, pa.int64()).cast(NS)}
    return pa.table({**columns, "row": list(range(len(labels))), **more})


def pairs(reader: pa.RecordBatchReader) -> list[tuple[bytes | None, int | None]]:
    joined = reader.read_all()
    times = joined["value_timestamp"].cast(pa.int64()).to_pylist()
    return list(zip(joined["value"].to_pylist(), times, strict=True))


def known(
    store: Store, key: bytes, as_of: int, age_max: int | None = None
) -> tuple[bytes | None, int | None]:
    """The answer to a label, by the history of its key."""
    versions = [(version.timestamp, version.value) for version in store.history(key)]
    newest = newest_at(versions, as_of)
    is_shown = newest is not None and newest[1] is not None
    if newest is None or not is_shown or (age_max is not None and as_of - newest[0] > age_max):
        return None, None
    return newest[1], int(newest[0])


def write_at_random(
    store: Store,
    clock: ManualClock,
    staging: Path,
    pick: random.Random,
    after: Callable[[], object] = lambda: None,
) -> list[int]:
    """Make a history of writes of every kind and of garbage collections, and call `after` after
    each; returns the times of the writes."""
    imports: list[int] = []
    times = [int(store.upper) - 1]
    for step in range(60):
        action = pick.choice(["put"] * 6 + ["delete", "range", "import", "revert", "gc"])
        keys = sorted(pick.sample(KEYS, 3))
        clock.advance(10_000)
        if action == "put":
            store.put(keys[0], b"%d" % step)
        elif action == "delete":
            store.delete(keys[0])
        elif action == "range":
            store.delete_range(keys[0], keys[2])
        elif action == "import":
            # The entries of imports sort by their ids, so the seed draws the ids too.
            made = bulk.Import.create(staging / str(step), import_id=pick.randrange(1, 1 << 63))
            with made.writer() as writer:
                for key in keys:
                    writer.put(key, b"i%d" % step)
            made.seal()
            bulk.ingest(store, made.staging)
            imports.append(made.import_id)
        elif action == "revert" and imports:
            taken = store.imports.get(imports[-1])
            assert taken is not None
            if taken.added is not None and taken.added > store.since:
                store.revert_import(imports.pop())
        elif action == "gc" and pick.random() < 0.3:
            store.gc(before=max(store.upper - pick.randrange(1, 200_000), 0))
        times.append(int(store.upper) - 1)
        after()
    return times
