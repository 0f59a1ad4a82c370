"""A process of its own, with little memory, that reads hostile parts: `python -m ... SEED COUNT`.

Prints a line for each part whose reading ends in a way that is not documented. If the last line is
missing, the process crashed.
"""

from __future__ import annotations

import io
import random
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvstore.backup.shard.rows.batch_reader import read_batches
from kvstore.backup.shard.rows.batch_writer import BatchDesc, part_names, write_batch
from kvstore.backup.shard.rows.part_format import PART_SCHEMA
from kvstore.backup.shard.rows.part_reader import open_part, require_part, translated
from kvstore.backup.shard.rows.rules import OP_DELETE_RANGE, OP_PUT, VERSIONS_SCHEMA, Window
from kvstore.backup.shard.rows.search import FindBounds, find_versions
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.base.digest import digest
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.tables.joins import in_order
from tests.harness.bounds import bounds
from tests.shard import thrift

MEMORY_BYTES = 2 << 30
"""More memory than pyarrow's own threads and arenas need, and less than bombs ask for."""
END = "done"


def rows(count: int, *, width: int = 20) -> Iterator[pa.RecordBatch]:
    rng = random.Random(5)
    keys = [b"%06d" % number for number in range(count)]
    columns = [
        pa.array(keys, pa.binary()),
        pa.array(rng.choices(range(1, 90), k=count), pa.int64()),
        pa.array([OP_PUT] * count, pa.uint8()),
        pa.array([rng.randbytes(width) for _ in keys], pa.binary()),
        pa.nulls(count, pa.binary()),
    ]
    yield pa.RecordBatch.from_arrays(columns, schema=VERSIONS_SCHEMA)
    ends = [pa.array([None], pa.binary()), pa.array([b"z"], pa.binary())]
    columns = [pa.array([b"9"]), pa.array([7]), pa.array([OP_DELETE_RANGE], pa.uint8()), *ends]
    yield pa.RecordBatch.from_arrays(columns, schema=VERSIONS_SCHEMA)


def written(count: int, *, width: int = 20) -> tuple[bytes, ShardPart]:
    """A sound part; with more than 65,536 rows it has more than one row group."""
    blob = MemoryBlob()
    names = part_names("s")
    batch = write_batch(blob, BatchDesc(0, 100), rows(count, width=width), names=names)
    (part,) = batch.parts
    data = blob.get(part.name)
    assert data is not None
    return data, part


def read(data: bytes, part: ShardPart) -> pa.Table:
    """Read all rows of a part with these bytes, by each way in which parts are read."""
    blob = MemoryBlob()
    part = replace(part, size=len(data), checksum=digest(data))
    blob.put(part.name, data)
    require_part(blob, part)
    file = open_part(blob, part)
    for number in range(file.num_row_groups):
        with translated(part):
            file.read_row_group(number)
    window = Window(-1, TIMESTAMP_MAX)
    batch = ShardBatch(0, 100, parts=(part,))
    batches = list(read_batches(blob, [batch], view=window))
    return pa.Table.from_batches(batches, VERSIONS_SCHEMA)


def join(data: bytes, part: ShardPart) -> None:
    """Look labels up in a part, as a join with a collection does. It reads only the row groups and
    pages that it needs."""
    blob = MemoryBlob()
    part = replace(part, size=len(data), checksum=digest(data))
    blob.put(part.name, data)
    batch = ShardBatch(0, 100, parts=(part,))
    keys = pa.array([b"%06d" % number for number in range(0, 70_000, 7)], pa.binary())
    labels = in_order(keys, np.full(len(keys), 95))
    assert find_versions(blob, [batch], labels, FindBounds(TIMESTAMP_MAX, 1 << 30)) is not None


def footer(data: bytes) -> tuple[thrift.Struct, bytes]:
    """The footer of a part, and the bytes before it."""
    length = int.from_bytes(data[-8:-4], "little")
    return thrift.read(data[-8 - length : -8])[0], data[: -8 - length]


def with_footer(fields: thrift.Struct, before: bytes) -> bytes:
    """The part with this footer."""
    written = thrift.write(fields)
    return before + written + len(written).to_bytes(4, "little") + b"PAR1"


def with_page(data: bytes, rng: random.Random) -> bytes:
    """A lie in the header of a page, with a footer that has the new length of the header."""
    fields, before = footer(data)
    columns = thrift.get(fields, 4, 0, 1).items
    chosen = rng.randrange(len(columns))
    starts = [thrift.get(column, 3, 9) for column in columns]
    with_dictionary = [
        [field.value for field in thrift.get(column, 3) if field.number == 11] for column in columns
    ]
    start = min(starts[chosen], *with_dictionary[chosen], starts[chosen])
    header, end = thrift.read(before, start)
    thrift.lie(header, rng)
    lied = thrift.write(header)
    longer = len(lied) - (end - start)
    for column in columns:
        for field in thrift.get(column, 3):
            if field.number in (9, 11) and field.value > start:
                field.value += longer
    thrift.put(columns[chosen], thrift.get(columns[chosen], 3, 7) + longer, 3, 7)
    return with_footer(fields, before[:start] + lied + before[end:])


def with_flips(data: bytes, rng: random.Random) -> bytes:
    """Some bytes are replaced."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def with_lie(data: bytes, rng: random.Random) -> bytes:
    """A lie in the footer."""
    fields, before = footer(data)
    thrift.lie(fields, rng)
    return with_footer(fields, before)


DICTIONARY_BOMB = "one value of 80 kB for each row"


def bombs() -> Iterator[tuple[str, bytes, ShardPart]]:
    """Small parts that ask for much memory."""
    data, part = written(50)
    count = 65_536
    value = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [bytes(80 << 10)])
    keys = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [b"k"])
    columns = [
        keys,
        pa.array([1] * count),
        pa.array([1] * count, pa.uint8()),
        value,
        pa.nulls(count, pa.binary()),
        pa.nulls(count, pa.int64()),
    ]
    schema = pa.schema(
        field.with_type(column.type) for field, column in zip(PART_SCHEMA, columns, strict=True)
    )
    sink = io.BytesIO()
    how = {"compression": "zstd", "store_schema": False, "write_page_checksum": True}
    with pq.ParquetWriter(sink, schema, **how) as writer:
        writer.write_table(pa.table(columns, schema=schema))
        writer.add_key_value_metadata(PART_SCHEMA.metadata)
    yield DICTIONARY_BOMB, sink.getvalue(), replace(part, rows=count)
    for path in ((3, 6), (3, 7), (3, 5)):
        fields, before = footer(data)
        for column in thrift.get(fields, 4, 0, 1).items:
            thrift.put(column, 5 << 30, *path)
        yield f"column field {path[-1]} of 5 GiB", with_footer(fields, before), part
    for path in ((3,), (4, 0, 2), (4, 0, 3)):
        fields, before = footer(data)
        thrift.put(fields, 2**40, *path)
        yield f"field {path} of 2**40", with_footer(fields, before), part
    fields, before = footer(data)
    thrift.put(fields, 2**40, 3)
    thrift.put(fields, 2**40, 4, 0, 3)
    yield "2**40 rows, as the state says", with_footer(fields, before), replace(part, rows=2**40)
    for path in ((2,), (4,), (4, 0, 1), (5,)):
        fields, before = footer(data)
        thrift.get(fields, *path).claimed = 2**31 - 1
        yield f"a list at {path} of 2**31", with_footer(fields, before), part
    for size in (2**20, 2**30, 2**31 - 1):
        fields, before = footer(data)
        column = thrift.get(fields, 4, 0, 1, 3)  # the values
        start = thrift.get(column, 3, 9)
        header, end = thrift.read(before, start)
        thrift.put(header, size, 2)
        grown = thrift.write(header)
        yield (
            f"a page of {size} bytes",
            with_footer(fields, before[:start] + grown + before[end:]),
            part,
        )


def wrong_end(data: bytes, part: ShardPart, wanted: pa.Table | None) -> str | None:
    """The outcome of reading a part, if it is neither the documented error nor the `wanted`
    rows."""
    try:
        join(data, part)
    except (CorruptionError, FormatVersionError):
        pass
    except BaseException as error:  # noqa: BLE001  (each other error is wrong)
        return f"a join: {type(error).__name__} {error}"
    try:
        found = read(data, part)
    except (CorruptionError, FormatVersionError):
        return None
    except BaseException as error:  # noqa: BLE001  (each other error is wrong)
        return f"{type(error).__name__} {error}"
    return None if found == wanted else "other rows"


def main(seed: int, count: int) -> None:
    """Read bombs, then `count` parts that were altered in one of three ways."""
    small, part = written(50)
    large, large_part = written(70_000, width=40)
    wanted, large_wanted = read(small, part), read(large, large_part)
    assert len(large) > 1 << 20
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))
    for what, data, its in bombs():
        if (wrong := wrong_end(data, its, None)) is not None:
            print(wrong, "at a bomb:", what)
    rng = random.Random(seed)
    for number in range(count):
        is_large = number % 20 == 0
        data, its = (large, large_part) if is_large else (small, part)
        alter = rng.choice([with_flips, with_lie, with_page])
        altered, rows_wanted = alter(data, rng), large_wanted if is_large else wanted
        # Each third part is fetched by ranges, as large parts are.
        with bounds(PART_WHOLE_BYTES_MAX=0 if number % 3 == 0 else 1 << 20):
            wrong = wrong_end(altered, its, rows_wanted)
        if wrong is not None:
            print(wrong, "at", number, alter.__name__)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    print(END)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
