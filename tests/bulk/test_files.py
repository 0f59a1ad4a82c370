"""A file of rows whose bytes were changed ends in its rows or in an error of the tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from kvstore.bulk.progress import Reading
from kvstore.bulk.row_files import FileReads, file_rows
from kvstore.errors import UsageError

COUNT = 300
ROUNDS = 120

READER = """
import pathlib, random, sys
from kvstore.bulk.row_files import file_rows
from kvstore.errors import KVStoreError

path, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
whole = path.read_bytes()
refused = 0
for seed in range(rounds):
    pick = random.Random(seed)
    changed = bytearray(whole)
    for _ in range(pick.choice([1, 2, 5])):
        at, size = pick.randrange(len(changed)), pick.choice([1, 4, 8])
        number = pick.choice([0, (1 << 8 * size) - 1, 1 << (8 * size - 2), pick.randrange(256)])
        changed[at - at % size : at - at % size + size] = number.to_bytes(size, "little")
    if seed % 20 == 0:
        del changed[pick.randrange(len(changed)) :]
    path.write_bytes(changed)
    print("seed", seed, flush=True)
    try:
        for batch in file_rows([path], key="key", value="value"):
            [column.to_pylist() for column in batch.columns]
    except KVStoreError:
        refused += 1
assert refused > rounds // 20, refused
"""
"""A process of its own, because the defect that it looks for ends the process."""


def table(*, text: bool = False) -> pa.Table:
    kind = pa.string() if text else pa.binary()
    values = [b"v" * (number % 40) for number in range(COUNT)]
    keys = pa.array([b"%06d" % number for number in range(COUNT)], pa.binary())
    return pa.table({"key": keys, "value": pa.array(values, pa.binary()).cast(kind)})


def write_arrow(path: Path, rows: pa.Table, *, stream: bool = False) -> None:
    opened = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, opened(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=100)


def write(path: Path, kind: str) -> None:
    rows = table(text=kind == "text")
    if kind == "stream":
        write_arrow(path, rows, stream=True)
    elif kind == "compressed":
        feather.write_feather(rows, str(path), compression="lz4")
    elif kind == "parquet":
        pq.write_table(rows, path)
    elif kind == "dictionary":
        coded = rows["value"].dictionary_encode()
        write_arrow(path, rows.set_column(1, "value", coded))
    elif kind == "view":
        write_arrow(path, rows.set_column(1, "value", rows["value"].cast(pa.binary_view())))
    else:
        write_arrow(path, rows)


@pytest.mark.parametrize(
    "kind", ["file", "stream", "compressed", "dictionary", "text", "view", "parquet"]
)
def test_changed_bytes_end_no_process(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("rows.parquet" if kind == "parquet" else "rows.arrow")
    write(path, kind)
    assert sum(batch.num_rows for batch in file_rows([path], key="key", value="value")) == COUNT
    reader = [sys.executable, "-c", READER, str(path), str(ROUNDS)]
    ended = subprocess.run(reader, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, (ended.stdout[-20:], ended.stderr[-2000:])


def test_offsets_that_lead_out_of_a_column_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    write(path, "file")
    changed = bytearray(path.read_bytes())
    offsets = changed.index(b"".join((6 * at).to_bytes(4, "little") for at in range(9)))
    changed[offsets + 4 : offsets + 8] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(changed)
    with pytest.raises(UsageError, match="cannot be read"):
        list(file_rows([path], key="key", value="value"))


def test_progress_passes_files_without_rows(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty.arrow", tmp_path / "full.arrow"
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])
    with pa.ipc.new_file(str(empty), schema):
        pass
    write(full, "file")
    reading, told = Reading([empty, full]), list[int]()
    rows = file_rows([empty, full], key="key", value="value", reads=FileReads(reading))
    assert sum(batch.num_rows for batch in reading.over(rows, told.append)) == COUNT
    assert told[-1] == COUNT
