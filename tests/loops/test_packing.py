"""Sorted files made of columns: their blocks are RocksDB's, and RocksDB reads them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import bulk
from kvstore.bulk.part import SstFile
from kvstore.codec.keys import TOMBSTONE, VALUE, encode_reference, encode_suffix, frame
from kvstore.codec.varint import read_varint
from kvstore.engine.sorted_file import CODECS, figures_of, key_blocks_of
from kvstore.errors import UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.loops.blocks import unpack_lz4
from kvstore.loops.packing import Packer, Stretch
from kvstore.loops.shapes import OutOfOrder
from tests.harness.bounds import bounds
from tests.harness.rocks_files import read_by_rocksdb, write_by_rocksdb
from tests.harness.seeds import seed_of
from tests.loops import raw
from tests.mvcc.test_scan import times

GOLDEN = Path(__file__).parent / "golden"

keys = st.binary(max_size=40) | st.tuples(
    st.sampled_from([b"", b"\xff\xff", b"prefix" * 20, bytes(9)]), st.binary(max_size=3)
).map(b"".join)
values = st.binary(max_size=20) | st.integers(0, 30_000).map(bytes) | raw
rows_of_a_file = st.dictionaries(keys, values, min_size=1, max_size=50)


class Blocks(NamedTuple):
    """The blocks of a file, unpacked: those of data, the index, and the properties."""

    data: list[bytes]
    index: bytes
    told: dict[bytes, bytes]


def handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at


def entries(block: bytes, *, index: bool = False) -> list[tuple[bytes, bytes]]:
    """The entries of a block, read as the page of the format tells, and as nothing of ours does."""
    restarts = int.from_bytes(block[-4:], "little")
    end, at, key, found = len(block) - 4 * (restarts + 1), 0, b"", []
    while at < end:
        shared, at = read_varint(block, at)
        fresh, at = read_varint(block, at)
        size = 0
        if not index:
            size, at = read_varint(block, at)
        key = key[:shared] + block[at : at + fresh]
        at += fresh
        if index:
            size = handle(block, at)[1] - at
        found.append((key, block[at : at + size]))
        at += size
    return found


def blocks_of(file: Path) -> Blocks:
    content = file.read_bytes()

    def contents(place: tuple[int, int]) -> bytes:
        offset, size = place
        stored, codec = content[offset : offset + size], content[offset + size]
        if not codec:
            return stored
        size, at = read_varint(stored, 0)
        name = {4: "lz4_raw", 7: "zstd"}[codec]
        return bytes(pa.decompress(stored[at:], decompressed_size=size, codec=name, asbytes=True))

    metaindex, at = handle(content, len(content) - 52)
    index = contents(handle(content, at)[0])
    named = dict(entries(contents(metaindex)))
    data = [contents(handle(place, 0)[0]) for _, place in entries(index, index=True)]
    return Blocks(data, index, dict(entries(contents(handle(named[b"rocksdb.properties"], 0)[0]))))


def written(path: Path, rows: dict[bytes, bytes], codec: str, one_by_one: int = 0) -> Path:
    """Write rows of stored keys, the first ones one by one."""
    file, stored = SstFile(path, compression=codec), sorted(rows)
    for key in stored[:one_by_one]:
        file.add_one(key, rows[key])
    columns = ([key, rows[key]] for key in stored[one_by_one:])
    of_keys, of_values = zip(*columns, strict=True) if one_by_one < len(stored) else ((), ())
    file.add_entries(pa.array(of_keys, pa.binary()), pa.array(of_values, pa.binary()))
    file.finish()
    return path


UNLIKE = {
    b"rocksdb.creating.host.identity",
    b"rocksdb.creating.session.identity",
    b"rocksdb.compression_options",
}
"""The properties that are made otherwise, or left out."""


@settings(max_examples=40)
@given(rows_of_a_file, st.sampled_from([*CODECS]), st.integers(0, 50), st.booleans())
def test_the_blocks_are_those_of_rocksdbs_writer(
    rows: dict[bytes, bytes], codec: str, one_by_one: int, is_tiny: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = Path(directory, "ours"), Path(directory, "theirs")
        with bounds(PACKED_STRETCH_BYTES=100 if is_tiny else 1 << 20):
            written(ours, rows, codec, one_by_one)
        write_by_rocksdb(theirs, sorted(rows.items()), codec)
        found, expected = blocks_of(ours), blocks_of(theirs)
        assert found.data == expected.data
        ends = [[key for key, _ in entries(each.index, index=True)] for each in (found, expected)]
        assert ends[0] == ends[1]
        unlike = set(UNLIKE)
        if codec != "none":  # another packer of the same format
            unlike |= {b"rocksdb.data.size", b"rocksdb.tail.start.offset", b"rocksdb.index.size"}
        else:
            assert found.index == expected.index
        told, wanted = ({k: v for k, v in each.told.items() if k not in unlike}
                        for each in (found, expected))  # fmt: skip
        assert told == wanted


@settings(max_examples=10)
@given(rows_of_a_file, st.sampled_from([*CODECS]), st.integers(0, 1 << 30))
def test_rocksdb_takes_reads_and_merges_what_is_written(
    rows: dict[bytes, bytes], codec: str, seed: int
) -> None:
    source = random.Random(seed)
    rows = {**rows, b"k" * 2 * KEY_BYTES_MAX: b"", b"large": source.randbytes(1 << 18) + bytes(9)}
    with tempfile.TemporaryDirectory() as directory:
        file = written(Path(directory, "1.sst"), rows, codec)
        assert read_by_rocksdb(Path(directory, "db"), [file]) == sorted(rows.items())
        assert [key for block in key_blocks_of(file) for key in block] == sorted(rows)


@pytest.mark.parametrize("codec", CODECS)
def test_a_value_of_64_mib_is_written_and_read(tmp_path: Path, codec: str) -> None:
    piece = random.Random(seed_of()).randbytes(1 << 20)
    rows = {b"a": b"1", b"b": piece * 64, b"c": bytes(3 << 20), b"d": piece}
    file = written(tmp_path / "1.sst", rows, codec)
    assert figures_of(file).entries == 4
    assert read_by_rocksdb(tmp_path / "db", [file]) == sorted(rows.items())


def test_lz4_packs_what_repeats_at_any_distance(tmp_path: Path) -> None:
    """A match lies at most 65,535 bytes back, and no match begins in the last twelve bytes."""
    source = random.Random(seed_of())
    words = [source.randbytes(source.choice((4, 5, 8, 30, 300))) for _ in range(40)]
    for number in range(60):
        size = source.choice((13, 17, 40, 8_000, 70_000, 300_000))
        block = b""
        while len(block) < size:
            block += source.choice(words) if source.random() < 0.8 else source.randbytes(3)
            if source.random() < 0.05:
                block += source.choice((bytes(99), source.randbytes(65_520)))
        stretch = Stretch()
        stretch.put(block[:size])
        stretch.seal(4)
        stored = bytes(memoryview(stretch))
        if stored[-5]:
            told, at = read_varint(stored, 0)
            assert told == size, number
            assert unpack_lz4(stored[at:-5], size) == block[:size]
            other = pa.decompress(stored[at:-5], decompressed_size=size, codec="lz4_raw")
            assert other == block[:size]
        else:
            assert stored[:-5] == block[:size]
    packed, room = bytes(memoryview(stretch)), len(pa.compress(block[:size], codec="lz4_raw"))
    assert len(packed) < 1.1 * room + 50


def column_of(rows: list[bytes | None], first: int) -> Any:
    """The rows as a column of an array that has `first` rows before them."""
    made = pa.array([b"before"] * first + rows, pa.binary())
    valid, offsets, data = made.buffers()
    return 0, valid, first, data, offsets


@given(
    st.lists(
        st.tuples(raw, st.none() | raw, times, st.sampled_from([VALUE, TOMBSTONE])),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_versions_of_columns_are_framed_and_refused_out_of_order(
    drawn: list[Any], first: int, has_kinds: bool, has_times: bool
) -> None:
    suffixes = [
        encode_suffix(time) if has_times else encode_reference(7) for _, _, time, _ in drawn
    ]
    kinds = [kind if has_kinds else VALUE for _, _, _, kind in drawn]
    expected = [
        (frame(key) + suffix + kind, b"" if kind == TOMBSTONE else value or b"")
        for (key, value, _, _), suffix, kind in zip(drawn, suffixes, kinds, strict=True)
    ]
    stored = [key for key, _ in expected]
    refused = next((at for at in range(1, len(stored)) if stored[at] <= stored[at - 1]), None)
    suffix = b"".join(suffixes) if has_times else encode_reference(7)
    columns = [column_of([row[at] for row in drawn], first) for at in (0, 1)]
    rows = (len(drawn), *columns, suffix, b"".join(kinds) if has_kinds else None, True)
    packer = Packer(60, 1 << 20)
    if refused is None:
        assert packer.add(rows, 0, len(drawn)) == len(drawn)
    else:
        with pytest.raises(OutOfOrder) as error:
            packer.add(rows, 0, len(drawn))
        assert error.value.index == refused
    stretch = packer.next_stretch(Stretch())
    stretch.seal(0)
    packer.take(stretch)
    index, _ = packer.index()
    content, found = bytes(memoryview(stretch)), []
    for _, place in entries(index, index=True):
        (offset, size), _ = handle(place, 0)
        found += entries(content[offset : offset + size])
    internal = b"\x01" + bytes(7)
    assert found == [(key + internal, value) for key, value in expected[:refused]]


SUFFIX = encode_reference(7)
SOUND = 0, None, 0, b"abc", array("i", [0, 3])


@pytest.mark.parametrize(
    "wrong",
    [
        (3, *SOUND[1:]),
        (*SOUND[:4], array("i", [0])),
        (0, None, 1, *SOUND[3:]),
        (0, None, -1, b"abc", array("i", [0, 3, 3])),
        (0, b"", *SOUND[2:]),
        (*SOUND[:4], array("i", [0, 4])),
        (*SOUND[:4], array("i", [-1, 3])),
        (*SOUND[:4], array("i", [2, 1])),
    ],
)
def test_columns_that_lie_about_their_rows_are_refused(wrong: Any) -> None:
    for columns in (wrong, SOUND), (SOUND, wrong):
        packer = Packer(8192, 1 << 20)
        with pytest.raises(ValueError, match=r"."):
            packer.add((1, *columns, SUFFIX, None, True), 0, 1)
        assert packer.entries == 0
    for suffix, kinds, fits in (
        (SUFFIX, VALUE + VALUE, "one kind"),
        (SUFFIX + SUFFIX, None, "one suffix"),
    ):
        with pytest.raises(ValueError, match=fits):
            Packer(8192, 1 << 20).add((1, SOUND, SOUND, suffix, kinds, True), 0, 1)
    for first, end in (-1, 1), (1, 0), (0, 2):
        with pytest.raises(ValueError, match="no rows"):
            Packer(8192, 1 << 20).add((1, SOUND, SOUND, SUFFIX, None, True), first, end)


def test_blocks_are_not_changed_while_somebody_looks_at_them() -> None:
    stretch = Stretch()
    stretch.put(b"some")
    stretch.seal(0)
    with memoryview(stretch) as data:
        for change in (lambda: stretch.seal(0), lambda: stretch.restart(9)):
            with pytest.raises(BufferError):
                change()
        assert bytes(data[:4]) == b"some"
    stretch.restart(9)
    packer, other = Packer(8192, 100), Stretch()
    other.put(b"some")
    other.seal(0)
    packer.take(other)
    with pytest.raises(ValueError, match="has no key"):
        packer.index()


def golden_rows() -> dict[bytes, bytes]:
    """Rows that take several blocks, of keys that share much and little, with all their edges."""
    source = random.Random(48)
    rows = {b"row %05d" % number: b"value %d " % number * 3 for number in range(900)}
    rows |= {source.randbytes(source.randrange(40)): source.randbytes(30) for _ in range(90)}
    return rows | {b"": b"", b"\xff" * 9: b"x" * 9_000, b"zero \x00\x00": bytes(300)}


@pytest.mark.parametrize("codec", ["lz4", "none"])
def test_the_bytes_of_a_file_stay_what_they_are(tmp_path: Path, codec: str) -> None:
    """`python -m tests.loops.test_packing` writes the golden files."""
    golden = (GOLDEN / f"sorted-file-{codec}").read_bytes()
    for stretch in (100, 1 << 20):
        with bounds(PACKED_STRETCH_BYTES=stretch):
            file = written(tmp_path / f"{stretch}.sst", golden_rows(), codec, stretch // 3)
        assert file.read_bytes() == golden
    assert read_by_rocksdb(tmp_path / "db", [file]) == sorted(golden_rows().items())


def test_several_threads_write_several_files(tmp_path: Path) -> None:
    golden = (GOLDEN / "sorted-file-lz4").read_bytes()
    with bounds(PACKED_STRETCH_BYTES=2_000), ThreadPoolExecutor(4) as pool:
        paths = [tmp_path / f"{number}.sst" for number in range(8)]
        files = [*pool.map(lambda path: written(path, golden_rows(), "lz4"), paths)]
    assert {file.read_bytes() for file in files} == {golden}
    assert sorted(os.listdir(tmp_path)) == [f"{number}.sst" for number in range(8)]


KILLED = """
import os, signal, sys
from pathlib import Path
from kvstore.bulk.part import PartWriter
writer = PartWriter(Path(sys.argv[1]), 7)
for number in range(10**9):
    writer.put(b"%012d" % number, os.urandom(40))
    if writer.size_bytes > 3 << 20:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    load = bulk.Import.create(tmp_path, import_id=7)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("part-*")
    assert left.name.endswith(".sst.tmp")
    assert left.stat().st_size > 3 << 20
    with load.writer() as writer:
        writer.put(b"a", b"1")
    assert [part.rows for part in load.seal().parts] == [1]


def test_a_codec_that_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compression"):
        SstFile(tmp_path / "1.sst", compression="snappy")
    assert os.listdir(tmp_path) == []


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in ("lz4", "none"):
        (GOLDEN / f"sorted-file-{each}").unlink(missing_ok=True)
        written(GOLDEN / f"sorted-file-{each}", golden_rows(), each)
