"""Writing and reading batches: checks, skipped row groups, and reads of parts by other programs.

Run this file as a program to write the golden part of a new format.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvstore.backup.shard.rows import batch_writer
from kvstore.backup.shard.rows.batch_reader import read_batches
from kvstore.backup.shard.rows.batch_writer import BatchDesc, delete_batch, part_names, write_batch
from kvstore.backup.shard.rows.part_format import PART_FORMAT
from kvstore.backup.shard.rows.part_reader import MissingPartError, open_part, read_part
from kvstore.backup.shard.rows.rules import AsOf, Window
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.base.clock import ManualClock
from kvstore.base.digest import digest
from kvstore.base.span import Span
from kvstore.errors import CorruptionError, FormatVersionError, KeyOrderError, UsageError
from kvstore.limits import BOUND_BYTES_MAX, PART_BYTES_MAX, ROW_GROUP_ROWS_MAX
from kvstore.storage.local_files import FileBlob
from kvstore.storage.memory_storage import MemoryBlob
from tests.harness.bounds import bounds
from tests.harness.storage_faults import FaultRates, FaultyBlob, Weather
from tests.harness.traced import traced
from tests.shard.rows import (
    Row,
    delete,
    delete_range,
    put,
    rows_of,
    state_of,
    versions,
)

GOLDEN = Path(__file__).parent / "golden"
"""Has a part of each format, `part-vN.parquet`, with these rows."""
GOLDEN_ROWS = [
    put(b"a", 9, b"newest"),
    delete(b"a", 5),
    delete_range(b"b", b"m", 7),
    put(b"b", 7, b"kept"),
    put(b"z\x00\xff", 1, b""),
]


class CountingBlob(MemoryBlob):
    """Counts the fetched bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.bytes = 0

    def get(self, name: str) -> bytes | None:
        self.fetched.append(name)
        return super().get(name)

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        self.bytes += length
        return super().get_range(name, start=start, length=length)


def write(
    blob: MemoryBlob | FileBlob,
    rows: list[Row],
    *,
    lower: int = 0,
    upper: int = 100,
    size: int = 1000,
) -> ShardBatch:
    desc = BatchDesc(lower, upper)
    return write_batch(blob, desc, versions(rows, size=size), names=part_names("s"))


def numbered(count: int) -> list[Row]:
    return [put(f"{i:08}".encode(), 1, b"v" * 100) for i in range(count)]


def noise(count: int) -> list[bytes]:
    """Values that do not compress."""
    data = random.Random(1).randbytes(count * 32)
    return [data[i : i + 32] for i in range(0, len(data), 32)]


# -- checks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        [put(b"b", 1), put(b"a", 1)],
        [put(b"a", 1), put(b"a", 2)],
        [put(b"a", 2), delete_range(b"a", b"c", 2)],
        [put(b"a", 1), put(b"a", 1)],
        [put(b"a", 1), delete(b"a", 1)],
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_rows_out_of_order_or_twice_are_refused_and_leave_nothing(
    rows: list[Row], together: bool
) -> None:
    blob = MemoryBlob()
    single = [versions([row])[0] for row in rows]
    batches = [pa.concat_batches(single)] if together else single
    with pytest.raises(KeyOrderError):
        write_batch(blob, BatchDesc(0, 9), batches, names=part_names("s"))
    assert list(blob.list()) == []


def test_range_tombstones_of_several_ends_may_share_start_and_time() -> None:
    rows = [delete_range(b"a", b"c", 2), delete_range(b"a", b"d", 2)]
    assert write(MemoryBlob(), rows).rows == 2


@pytest.mark.parametrize("timestamp", [4, 10])
def test_times_outside_the_bounds_are_refused(timestamp: int) -> None:
    with pytest.raises(UsageError, match="outside"):
        write(MemoryBlob(), [put(b"a", timestamp)], lower=5, upper=10)


def test_another_schema_is_refused() -> None:
    rows = [versions([put(b"a", 1)])[0].select(["key", "timestamp", "op"])]
    with pytest.raises(UsageError, match="schema"):
        write_batch(MemoryBlob(), BatchDesc(0, 9), rows, names=part_names("s"))


def test_no_rows_make_a_batch_without_parts() -> None:
    assert write(MemoryBlob(), []).parts == ()


def test_a_failing_source_leaves_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_writer, "PART_BYTES_MAX", 1)
    blob = MemoryBlob()

    def failing() -> Iterator[pa.RecordBatch]:
        for start in range(0, 200_000, 50_000):
            yield versions(numbered(200_000)[start : start + 50_000])[0]
        raise RuntimeError("the store went away")

    with pytest.raises(RuntimeError):
        write_batch(blob, BatchDesc(0, 9), failing(), names=part_names("s"))
    assert list(blob.list()) == []


# -- parts -----------------------------------------------------------------------------------


def test_a_part_has_no_larger_footer_than_a_reader_believes() -> None:
    """The footer has two keys of each row group."""
    blob = MemoryBlob()
    rows = versions([put(b"%04d" % number * 1000, 1) for number in range(300)])
    with bounds(ROW_GROUP_ROWS_MAX=1):
        batch = write_batch(blob, BatchDesc(0, 9), rows, names=part_names("s"))
    found = read_batches(blob, [batch], view=AsOf(5))
    assert sum(each.num_rows for each in found) == 300
    assert len(batch.parts) == 3


def test_an_interrupt_leaves_no_parts() -> None:
    blob = MemoryBlob()

    def rows() -> Iterator[pa.RecordBatch]:
        for key in (b"a", b"b", b"c"):
            yield versions([put(key, 1, os.urandom(PART_BYTES_MAX // 2 + 1))])[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_batch(blob, BatchDesc(0, 2), rows(), names=part_names("s"))
    assert list(blob.list()) == []


def test_a_large_batch_is_cut_into_parts_and_row_groups_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_writer, "PART_BYTES_MAX", 10 << 20)
    blob = MemoryBlob()
    rows = numbered(ROW_GROUP_ROWS_MAX * 3)
    batch = write(blob, rows, size=10_000)
    assert len(batch.parts) > 1
    assert [p.key_min for p in batch.parts] == sorted(p.key_min for p in batch.parts)
    groups = open_part(blob, batch.parts[0]).metadata
    assert groups.num_row_groups > 1
    assert max(groups.row_group(i).num_rows for i in range(groups.num_row_groups)) <= (
        ROW_GROUP_ROWS_MAX
    )
    found = read_batches(blob, [batch], view=AsOf(5))
    assert sum(b.num_rows for b in found) == len(rows)


def test_large_values_make_small_row_groups() -> None:
    blob = MemoryBlob()
    rows = [put(f"{i:03}".encode(), 1, bytes([i]) * (1 << 20)) for i in range(40)]
    batch = write(blob, rows, size=7)
    groups = open_part(blob, batch.parts[0]).metadata
    assert groups.num_row_groups >= 3
    largest = max(b.nbytes for b in read_batches(blob, [batch], view=AsOf(5)))
    assert largest < 40 << 20


@pytest.mark.traces_memory
def test_a_pass_over_a_large_part_keeps_the_bytes_of_few_row_groups() -> None:
    blob = MemoryBlob()
    pick = random.Random(7)
    rows = [put(f"{i:04}".encode(), 1, pick.randbytes(10_000)) for i in range(800)]
    with bounds(ROW_GROUP_ROWS_MAX=20):
        (part,) = write(blob, rows, size=100).parts
    with traced() as memory, bounds(ROW_GROUP_BYTES_MAX=1 << 18):
        found = read_part(blob, part, span=Span(), batch_rows=20, batch_bytes=PART_BYTES_MAX)
        count = sum(batch.num_rows for batch in found)
    assert count == len(rows)
    assert part.size > 7 << 20
    assert memory.peak < 2 << 20


def test_part_bounds_are_rounded_outwards_and_cover_range_ends() -> None:
    long = b"k" * 200
    batch = write(MemoryBlob(), [put(long, 1), delete_range(long + b"x", b"z" * 300, 2)])
    (part,) = batch.parts
    assert part.key_min == long[:BOUND_BYTES_MAX]
    assert part.key_max is not None
    assert part.key_max >= b"z" * 300
    assert len(part.key_max) <= BOUND_BYTES_MAX
    assert write(MemoryBlob(), [put(b"\xff" * 100, 1)]).parts[0].key_max is None
    assert (part.ranges, part.time_min, part.time_max) == (1, 1, 2)


def test_a_span_fetches_only_the_parts_it_touches() -> None:
    blob = CountingBlob()
    batches = [write(blob, [put(f"{p}{i}".encode(), 1) for i in range(5)]) for p in "abc"]
    found = read_batches(blob, batches, view=AsOf(5), span=Span(b"b", b"c"))
    assert list(state_of(found)) == [b"b0", b"b1", b"b2", b"b3", b"b4"]
    assert blob.fetched == [batches[1].parts[0].name]


def test_a_time_fetches_only_the_parts_that_reach_into_it() -> None:
    blob = CountingBlob()
    old = write(blob, [put(b"a", 1)], lower=0, upper=5)
    new = write(blob, [put(b"a", 7)], lower=5, upper=9)
    assert rows_of(read_batches(blob, [old, new], view=Window(4, 8))) == [put(b"a", 7)]
    assert blob.fetched == [new.parts[0].name]
    list(read_batches(blob, [old, new], view=AsOf(3)))
    assert blob.fetched[1:] == [old.parts[0].name]


def test_of_a_large_part_a_span_fetches_only_some_row_groups() -> None:
    blob = CountingBlob()
    names = part_names("s")
    values = noise(ROW_GROUP_ROWS_MAX * 3)
    rows = [put(f"{i:08}".encode(), 1, value) for i, value in enumerate(values)]
    batch = write_batch(blob, BatchDesc(0, 9), versions(rows, size=60_000), names=names)
    (part,) = batch.parts
    assert part.size > 1 << 20
    span = Span(b"00000010", b"00000020")
    found = read_batches(blob, [batch], view=AsOf(5), span=span)
    assert len(state_of(found)) == 10
    assert blob.fetched == []
    assert 0 < blob.bytes < part.size // 2


@pytest.mark.parametrize("kind", ["json", "half random", "random"])
def test_a_large_part_is_about_as_small_as_level_1_of_zstd_makes_it(kind: str) -> None:
    chosen = random.Random(4)
    make = {
        "json": lambda: (
            b'{"name": "%s", "paid": %d, "day": %d}'
            % (
                chosen.choice([b"anna", b"bob"]),
                chosen.getrandbits(20),
                chosen.getrandbits(9),
            )
        ),
        "half random": lambda: chosen.randbytes(50) + b"abcdefghij" * 5,
        "random": lambda: chosen.randbytes(100),
    }[kind]
    rows = [put(b"%08d" % i, 1, make()) for i in range(ROW_GROUP_ROWS_MAX + 1)]
    blob = MemoryBlob()
    (part,) = write(blob, rows, size=30_000).parts
    data = blob.get(part.name)
    assert data is not None
    sink = io.BytesIO()
    table = pq.read_table(io.BytesIO(data))
    pq.write_table(table, sink, ROW_GROUP_ROWS_MAX, compression="zstd", compression_level=1)
    assert part.size < 1.05 * len(sink.getvalue())


def test_names_are_never_twice_the_same_and_carry_their_time() -> None:
    clock = ManualClock(wall_ns=1_700_000_000_000_000_000)
    names = part_names("s", clock)
    made = {names() for _ in range(100)}
    assert len(made) == 100
    assert all(name.startswith("s/part/01700000000000000000-") for name in made)


def test_an_upload_goes_through_faults_and_stays_one_part() -> None:
    blob = MemoryBlob()
    rates = FaultRates(refused=0.2, lost_reply=0.2, torn=0.1, delayed=0.0)
    faulty = FaultyBlob(blob, Weather(3, rates))
    batch = write_batch(faulty, BatchDesc(0, 9), versions(numbered(10)), names=part_names("s"))
    assert [info.name for info in blob.list()] == [p.name for p in batch.parts]


def test_deleting_a_batch_takes_its_parts_back() -> None:
    blob = MemoryBlob()
    batch = write(blob, numbered(3))
    delete_batch(blob, batch)
    delete_batch(blob, batch)
    assert list(blob.list()) == []


# -- damage ----------------------------------------------------------------------------------


def damaged(change: bytes | None, part: ShardPart, blob: MemoryBlob) -> MemoryBlob:
    other = MemoryBlob()
    if change is not None:
        other.put(part.name, change)
    return other


def test_a_missing_an_altered_and_a_cut_part_are_told_apart() -> None:
    blob = MemoryBlob()
    batch = write(blob, numbered(100))
    (part,) = batch.parts
    data = blob.get(part.name)
    assert data is not None
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    with pytest.raises(MissingPartError):
        read_all(damaged(None, part, blob), batch)
    for change in (bytes(flipped), data[:-1], data + b"x"):
        with pytest.raises(CorruptionError, match="checksum"):
            read_all(damaged(change, part, blob), batch)


def test_a_flipped_bit_in_a_page_of_a_large_part_is_noticed() -> None:
    blob = MemoryBlob()
    values = noise(60_000)
    batch = write(blob, [put(f"{i:08}".encode(), 1, v) for i, v in enumerate(values)], size=60_000)
    (part,) = batch.parts
    assert part.size > 1 << 20
    data = bytearray(blob.get(part.name) or b"")
    data[len(data) // 2] ^= 1
    with pytest.raises(CorruptionError):
        read_all(damaged(bytes(data), part, blob), batch)
    with pytest.raises(MissingPartError):
        read_all(damaged(None, part, blob), batch)


def read_all(blob: MemoryBlob, batch: ShardBatch) -> None:
    for _ in read_batches(blob, [batch], view=AsOf(5)):
        pass


def test_a_foreign_parquet_file_and_a_newer_format_are_refused() -> None:
    for metadata, error in (
        (None, FormatVersionError),
        ({"kvstore.part": str(int(PART_FORMAT) + 1)}, FormatVersionError),
    ):
        sink = io.BytesIO()
        table = pa.Table.from_batches(versions([put(b"a", 1)])).replace_schema_metadata(metadata)
        pq.write_table(table, sink)
        data = sink.getvalue()
        part = ShardPart("x", 1, len(data), digest(data), b"a", b"a", 1, 1)
        blob = MemoryBlob()
        blob.put("x", data)
        rows = read_part(blob, part, span=Span(), batch_rows=10, batch_bytes=100)
        with pytest.raises(error):
            list(rows)


# -- reads by other programs ----------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("part-v*.parquet")), ids=lambda path: path.stem)
def test_golden_parts_still_read(path: Path) -> None:
    data = path.read_bytes()
    part = ShardPart("g", 5, len(data), digest(data), b"", None, 0, 9, ranges=1)
    blob = MemoryBlob()
    blob.put("g", data)
    batch = ShardBatch(0, 10, parts=(part,))
    found = rows_of(read_batches(blob, [batch], view=Window(-1, 99)))
    assert found == GOLDEN_ROWS


def test_duckdb_and_pandas_read_a_part_without_this_project(tmp_path: Path) -> None:
    blob = FileBlob(tmp_path)
    batch = write(blob, GOLDEN_ROWS)
    path = tmp_path / batch.parts[0].name
    query = f"select key, timestamp, op, value, end_key from '{path}'"
    assert [Row(*row) for row in duckdb.sql(query).fetchall()] == GOLDEN_ROWS
    frame = pq.read_table(path).to_pandas()
    assert list(frame["key"]) == [row.key for row in GOLDEN_ROWS]
    assert list(frame["timestamp"]) == [row.timestamp for row in GOLDEN_ROWS]


def write_golden() -> None:
    blob = MemoryBlob()
    (part,) = write(blob, GOLDEN_ROWS, upper=10).parts
    with (GOLDEN / f"part-v{PART_FORMAT.decode()}.parquet").open("xb") as file:  # one is made once
        file.write(blob.get(part.name) or b"")


if __name__ == "__main__":
    write_golden()
