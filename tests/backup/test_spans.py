"""The first live rows of spans in versions: against a look at every version, and on their own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import kvstore
from kvstore import ManualClock, Span
from kvstore.backup import Collection
from kvstore.backup.reading import SpanLabels, first_rows
from kvstore.backup.shard import OP_DELETE, OP_DELETE_RANGE, OP_PUT
from kvstore.errors import HistoryGoneError
from kvstore.mvcc import Fragments
from tests.harness.seeds import seeded

KEYS = [bytes([a, b]) for a in b"abc" for b in b"stuvw"]


def test_first_rows_are_the_rows_that_a_look_at_every_version_finds() -> None:
    pick = seeded()
    for _ in range(150):
        rows = {
            (pick.choice(KEYS), pick.randrange(1, 9)): pick.choice((OP_PUT, OP_PUT, OP_DELETE))
            for _ in range(pick.randrange(30))
        }
        ranges = [
            (*sorted(pick.sample(KEYS, 2)), pick.randrange(1, 9)) for _ in range(pick.randrange(3))
        ]
        asked = sorted(
            (key, bytes([key[0] + 1]), pick.randrange(10)) for key in pick.choices(KEYS, k=12)
        )
        every = [(key, -time, op) for (key, time), op in rows.items()]
        every += [(start, -time, OP_DELETE_RANGE) for start, _, time in ranges]
        every.sort()
        size = pick.randrange(1, 5)

        def versions(
            span: Span, every: list[tuple[bytes, int, int]] = every, size: int = size
        ) -> Iterator[pa.RecordBatch]:
            inside = [row for row in every if span.start <= row[0] < (span.end or b"z")]
            yield batch([])
            for at in range(0, len(inside), size):
                yield batch(inside[at : at + size])

        starts, ends, times = zip(*asked, strict=True)
        labels = SpanLabels(starts, ends, np.array(times, np.int64))
        found = first_rows(versions, Fragments.of(ranges), labels, bytes_max=1 << 20)
        assert found is not None
        for (start, end, time), row in zip(asked, found, strict=True):
            alive = [
                (key, newest)
                for key in KEYS
                if start <= key < end
                and (newest := max((t for k, t in rows if k == key and t <= time), default=0))
                and rows[key, newest] == OP_PUT
                and not any(a <= key < b and newest < t <= time for a, b, t in ranges)
            ]
            assert (row and (row.key, row.timestamp)) == (alive[0] if alive else None)
        if sum(row is not None for row in found) > 1:
            assert first_rows(versions, Fragments.of(ranges), labels, bytes_max=1) is None


def batch(rows: list[tuple[bytes, int, int]]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([key for key, _, _ in rows], pa.binary()),
            "timestamp": pa.array([-time for _, time, _ in rows], pa.int64()),
            "op": pa.array([op for _, _, op in rows], pa.uint8()),
            "value": pa.array([b"v" if op == OP_PUT else None for _, _, op in rows], pa.binary()),
        }
    )


def test_neighbours_share_a_batch_and_distant_labels_read_what_lies_at_them() -> None:
    every = [(bytes([a, b]), -1, OP_PUT) for a in range(200) for b in range(100)]
    reads: list[int] = []

    def versions(span: Span) -> Iterator[pa.RecordBatch]:
        first = next(at for at, row in enumerate(every) if row[0] >= span.start)
        for at in range(first, len(every), 50):
            reads.append(at)
            yield batch(every[at : at + 50])

    starts = [b"\x05\x01", b"\x05\x02", b"\xc0\x00"]
    ends = [b"\x06", b"\x06", b"\xc1"]
    labels = SpanLabels(starts, ends, np.array([1, 1, 1]))
    found = first_rows(versions, Fragments(), labels, bytes_max=100)
    assert [row and row.key for row in found or []] == starts
    assert reads == [501, 19200]


def test_a_label_below_the_history_of_a_collection_is_named(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000 * 10**9)
    schema = pa.schema([("device", pa.string()), ("ts", pa.timestamp("us", "UTC"))])
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        seen = store.table("seen", schema, key=["device"], event_time="ts")
        first = seen.put({"device": "a", "ts": kvstore.Timestamp(10**18).to_datetime()})
        clock.advance(10**12)
        store.gc(keep=timedelta(0))
        Collection(tmp_path / "backups").backup(store)
    labels = pa.table({"device": ["a", "a"], "ts": pa.array([10**18, 10**18 + 1])})
    with Collection(tmp_path / "backups").open() as reader:
        table = reader.table("seen")
        assert table.join(labels, "device").read_all()["row_timestamp"].null_count == 0
        with pytest.raises(HistoryGoneError, match="row 0, key"):
            table.join(labels, "device", known_at=first).read_all()
