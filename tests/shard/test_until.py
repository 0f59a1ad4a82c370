"""`until`: a filter over the rows of a part, in any order, finds the live rows at a time."""

from __future__ import annotations

import io
import random

import pyarrow.parquet as pq
import pytest

from kvstore.backup.shard import BatchDesc, MemoryBlob, part_names, write_batch
from kvstore.backup.shard.rows import batch_writer
from kvstore.backup.shard.rows.rules import OP_PUT
from tests.shard.rows import Row, delete, delete_range, model_state, put, versions

KEYS = [b"", b"a", b"a\x00", b"b", b"c", b"\xff"]


def parts_of(rows: list[Row], *, size: int) -> list[list[dict[str, object]]]:
    """The rows of each part, as any reader of Parquet has them."""
    blob = MemoryBlob()
    batches = versions(rows, size=size)
    written = write_batch(blob, BatchDesc(0, 99), batches, names=part_names("s"))
    data = [blob.get(part.name) or b"" for part in written.parts]
    return [pq.read_table(io.BytesIO(each)).to_pylist() for each in data]


def alive(rows: list[dict[str, object]], as_of: int) -> dict[object, object]:
    ranges = [row for row in rows if row["end_key"] is not None and row["timestamp"] <= as_of]
    return {
        row["key"]: row["value"]
        for row in rows
        if row["op"] == OP_PUT and row["timestamp"] <= as_of
        if row["until"] is None or row["until"] > as_of
        if not any(
            r["key"] <= row["key"] < r["end_key"] and r["timestamp"] > row["timestamp"]
            for r in ranges
        )
    }


def random_rows(pick: random.Random) -> list[Row]:
    points = {(pick.choice(KEYS), pick.randrange(1, 40)) for _ in range(pick.randrange(1, 40))}
    rows = [delete(k, t) if pick.random() < 0.3 else put(k, t, b"%d" % t) for k, t in points]
    for _ in range(pick.randrange(4)):
        start, end = sorted(pick.sample(KEYS, 2))
        rows.append(delete_range(start, end, pick.randrange(1, 40)))
    return rows


@pytest.mark.parametrize("seed", range(60))
def test_a_filter_gives_the_state_at_every_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pick = random.Random(seed)
    monkeypatch.setattr(batch_writer, "ROW_GROUP_ROWS_MAX", pick.choice([1, 2, 5, 100]))
    rows = random_rows(pick)
    (part,) = parts_of(rows, size=pick.choice([1, 3, 100]))
    for as_of in range(0, 41):
        assert alive(part, as_of) == model_state(rows, as_of)


def test_what_no_newer_version_replaces_has_no_until() -> None:
    rows = [put(b"a", 9), put(b"a", 5), delete(b"a", 3), delete_range(b"a", b"z", 4), put(b"b", 1)]
    (part,) = parts_of(rows, size=100)
    found = [(row["key"], row["timestamp"], row["op"], row["until"]) for row in part]
    assert found == [
        (b"a", 9, 1, None),
        (b"a", 5, 1, 9),
        (b"a", 4, 2, None),
        (b"a", 3, 0, 5),
        (b"b", 1, 1, None),
    ]
