"""Blocks: what a reader of single keys fetches of a part, and how each byte of it is checked."""

from __future__ import annotations

import io
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvstore.backup.shard import OP_PUT, VERSIONS_SCHEMA, BatchDesc, MemoryBlob, part_names
from kvstore.backup.shard import ShardBatch as Batch
from kvstore.backup.shard import write_batch as write
from kvstore.backup.shard.rows.part_format import (
    TAIL_BYTES,
    footer_bytes,
    may_have,
    read_trailer,
    tail_bytes,
    xxh64,
)
from kvstore.backup.shard.rows.part_reader import OpenedPart
from kvstore.backup.shard.rows.search import FindBounds, Found, find_versions
from kvstore.backup.shard.state.trace import ShardPart
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.errors import CorruptionError
from kvstore.tables.joins import in_order
from tests.harness.bounds import bounds

COUNT = 3000


class Counting(MemoryBlob):
    """Counts the ranges that are fetched, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[int] = []

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        found = super().get_range(name, start=start, length=length)
        self.fetched.append(len(found or b""))
        return found


def key_of(number: int) -> bytes:
    return b"key%06d" % (2 * number)


def values(seed: int = 1) -> list[bytes]:
    pick = random.Random(seed)
    return [pick.randbytes(500) for _ in range(COUNT)]


def a_part(blob: MemoryBlob, *, lower: int = 1) -> Batch:
    """Some blocks of 3,000 puts, in a part that is fetched in ranges."""
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(map(key_of, range(COUNT)), pa.binary()),
            pa.array(np.arange(COUNT) + 5),
            pa.array(np.full(COUNT, OP_PUT, np.uint8)),
            pa.array(values(), pa.binary()),
            pa.nulls(COUNT, pa.binary()),
        ],
        schema=VERSIONS_SCHEMA,
    )
    with bounds(PART_BLOCK_BYTES=64 << 10):
        return write(blob, BatchDesc(lower, 10_000), [rows], names=part_names("chain"))


def found_in(blob: MemoryBlob, batch: Batch, keys: list[bytes]) -> Found:
    labels = in_order(pa.array(keys, pa.binary()), np.full(len(keys), 9_000))
    found = find_versions(
        blob,
        [batch],
        labels,
        FindBounds(TIMESTAMP_MAX, TIMESTAMP_MAX),
        opened=lambda part: OpenedPart(blob, part, by_block=True),
    )
    assert found is not None
    return found


def test_xxh64_gives_the_numbers_of_its_specification() -> None:
    for text, expected in (
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Call me Ishmael. Some years ago--never mind how long precisely-", 0x02A2E85470D6FD96),
    ):
        assert xxh64(text) == expected


def test_a_filter_has_every_key_of_its_row_group_and_few_others() -> None:
    blob = MemoryBlob()
    (part,) = a_part(blob).parts
    opened = OpenedPart(blob, part, by_block=True)
    misses = 0
    for group in range(opened.file.num_row_groups):
        keys = opened.file.read_row_group(group, columns=["key"])["key"].to_pylist()
        assert all(opened.may_have(group, key) for key in keys)
        misses += sum(opened.may_have(group, b"key%06d" % (2 * n + 1)) for n in range(200))
    assert opened.file.num_row_groups > 10
    assert misses < 0.05 * 200 * opened.file.num_row_groups


def test_a_filter_that_is_no_filter_is_refused() -> None:
    for data in (b"", b"\x00", b"\x15\x40" * 9):
        with pytest.raises(ValueError):
            may_have(data, b"key")


def test_one_key_costs_the_tail_and_one_block_and_an_absent_one_the_tail() -> None:
    blob = Counting()
    batch = a_part(blob)
    for number in (0, 1, 700, COUNT - 1):
        blob.fetched.clear()
        assert found_in(blob, batch, [key_of(number)]).values.to_pylist() == [values()[number]]
        assert len(blob.fetched) == 2
        assert sum(blob.fetched) < 200 << 10
    blob.fetched.clear()
    absent = [key_of(number) + b"x" for number in range(0, COUNT, 300)]
    assert found_in(blob, batch, absent).values.null_count == len(absent)
    assert len(blob.fetched) <= 2  # a filter may be wrong about one


def test_the_lowest_part_has_no_filters() -> None:
    blob = MemoryBlob()
    (part,) = a_part(blob, lower=0).parts
    opened = OpenedPart(blob, part, by_block=True)
    assert opened.may_have(0, b"no key")


def test_a_tail_longer_than_the_first_fetch_is_fetched_whole() -> None:
    blob = Counting()
    batch = a_part(blob)
    with bounds(PART_TAIL_BYTES=64):
        assert found_in(blob, batch, [key_of(5)]).values.to_pylist() == [values()[5]]
    assert 3 <= len(blob.fetched) <= 4


def test_each_flipped_bit_of_the_tail_and_of_a_block_is_found() -> None:
    blob = MemoryBlob()
    (part,) = a_part(blob).parts
    whole = blob.get(part.name)
    assert whole is not None
    tail = tail_bytes(whole, size=len(whole))
    assert tail is not None
    first = read_trailer(whole[-tail:], size=len(whole)).blocks[0]
    pick = random.Random(3)
    places = [pick.randrange(len(whole) - tail, len(whole)) for _ in range(150)]
    places += range(
        len(whole) - footer_bytes(whole[-TAIL_BYTES:], size=len(whole)) - 40, len(whole)
    )
    places += [pick.randrange(first.start, first.end) for _ in range(100)]
    for place in places[::3] + places[-150:]:
        damaged = MemoryBlob()
        data = bytearray(whole)
        data[place] ^= 1 << pick.randrange(8)
        damaged.put(part.name, bytes(data))
        with pytest.raises(CorruptionError, match=part.name):
            found_in(damaged, batch_of(part), [key_of(0)])


def test_a_part_that_is_cut_short_or_without_its_trailer_is_refused() -> None:
    blob = MemoryBlob()
    (part,) = a_part(blob).parts
    whole = blob.get(part.name)
    assert whole is not None
    tail = tail_bytes(whole, size=len(whole))
    assert tail is not None
    footer = footer_bytes(whole[-TAIL_BYTES:], size=len(whole)) + TAIL_BYTES
    for data in (
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:-footer][:-32] + bytes(32) + whole[-footer:],
    ):
        cut = MemoryBlob()
        cut.put(part.name, data)
        with pytest.raises(CorruptionError, match=part.name):
            found_in(cut, batch_of(part), [key_of(0)])


def test_parquets_reader_sees_neither_trailer_nor_filters() -> None:
    blob = MemoryBlob()
    (part,) = a_part(blob).parts
    data = blob.get(part.name)
    table = pq.read_table(io.BytesIO(data))
    assert table["value"].to_pylist() == values()


def batch_of(part: ShardPart) -> Batch:
    return Batch(1, 10_000, parts=(part,))
