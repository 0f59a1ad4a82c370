"""A sorted file tells its figures and its keys, and bytes of a stranger tell that they are none."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from shutil import which
from typing import NamedTuple

import pyarrow as pa
import pytest
import rocksdict as rocks
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore.bulk.part import SstFile
from kvstore.codec.varint import read_varint
from kvstore.engine.loose_files import LooseFiles
from kvstore.engine.sorted_file import Figures, figures_of, key_blocks_of
from kvstore.errors import AccessDeniedError, CorruptionError, StorageError
from kvstore.limits import KEY_BYTES_MAX
from tests.harness.rocks_files import writer_options
from tests.harness.seeds import seed_of
from tests.harness.traced import traced
from tests.harness.varints import varint


def keys_of(file: Path) -> Iterator[bytes]:
    return chain.from_iterable(key_blocks_of(file))


CODECS = ("lz4", "zstd", "none")
FOOTER_BYTES = 53


def sst(path: Path, rows: dict[bytes, bytes], codec: str = "none") -> Path:
    file = SstFile(path, compression=codec)
    file.add(sorted(rows), [rows[key] for key in sorted(rows)])
    file.finish()
    return path


@given(
    st.dictionaries(
        st.binary(max_size=300) | st.binary(max_size=3).map(lambda tail: b"prefix" * 30 + tail),
        st.binary(max_size=20) | st.integers(0, 20_000).map(bytes),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from(CODECS),
)
def test_a_file_tells_the_rows_that_were_written(rows: dict[bytes, bytes], codec: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = sst(Path(directory) / "1.sst", rows, codec)
        keys = sorted(rows)
        assert list(keys_of(file)) == keys
        assert figures_of(file) == Figures(keys[0], keys[-1], len(keys))


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_of_many_blocks_and_large_rows(tmp_path: Path, codec: str) -> None:
    rows = {b"key %06d" % number: os.urandom(40) + bytes(60) for number in range(5_000)}
    rows |= {b"k" * KEY_BYTES_MAX: b"", b"key 000017 large": os.urandom(1 << 20) + bytes(1 << 22)}
    file = sst(tmp_path / "1.sst", rows, codec)
    assert list(keys_of(file)) == sorted(rows)
    assert figures_of(file) == Figures(min(rows), max(rows), len(rows))


def test_entries_that_remove_others_are_refused(tmp_path: Path) -> None:
    writer = rocks.SstFileWriter(writer_options("lz4"))
    writer.open(str(tmp_path / "1.sst"))
    writer[b"a"] = b"1"
    del writer[b"b"]
    writer[b"c"] = b"3"
    writer.finish()
    with pytest.raises(CorruptionError, match="1 of its entries delete or merge"):
        figures_of(tmp_path / "1.sst")
    with pytest.raises(CorruptionError, match="another kind"):
        list(keys_of(tmp_path / "1.sst"))


def test_a_file_of_a_database_is_refused(tmp_path: Path) -> None:
    options = writer_options("lz4")
    options.create_if_missing(True)
    database = rocks.Rdict(str(tmp_path / "db"), options)
    database[b"a"] = b"1"
    database.flush()
    database.close()
    (file,) = (tmp_path / "db").glob("*.sst")
    with pytest.raises(CorruptionError, match="external_sst_file"):
        figures_of(file)


@pytest.mark.parametrize(
    "content", [b"", b"no rows", b"no rows" * 100, bytes(FOOTER_BYTES), b"\xff" * 4096]
)
def test_bytes_that_are_no_sorted_file_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "1.sst"
    file.write_bytes(content)
    for read in (figures_of, keys_of):
        with pytest.raises(CorruptionError):
            list(read(file))


def test_failures_of_the_file_system_are_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        figures_of(tmp_path / "1.sst")
    file = sst(tmp_path / "2.sst", {b"a": b"1"})
    file.chmod(0)
    if not os.access(file, os.R_OK):
        with pytest.raises(AccessDeniedError):
            figures_of(file)


FOOTERS = {
    "a block of 2**40 bytes": varint(0) + varint(1 << 40),
    "a block of 2**63 bytes": varint(0) + varint(1 << 63),
    "a block at 2**63": varint(1 << 63) + varint(8),
    "a block over the footer": varint(0) + varint(1 << 20),
    "a number that does not end": b"\xff" * 40,
    "no index": varint(0) + varint(0) + b"\xff" * 20,
}


@pytest.mark.parametrize("name", FOOTERS)
@pytest.mark.parametrize("which", ["metaindex", "index"])
def test_a_footer_is_checked_before_its_sizes_are_allocated(
    tmp_path: Path, name: str, which: str
) -> None:
    """The footer has no checksum of its own, and RocksDB ends the process where an allocation
    fails."""
    file = sst(tmp_path / "1.sst", {b"a": b""})
    content = bytearray(file.read_bytes())
    handles = FOOTERS[name] if which == "metaindex" else varint(0) + varint(0) + FOOTERS[name]
    content[-52:-12] = handles[:40].ljust(40, b"\x00")
    file.write_bytes(content)
    for read in (figures_of, lambda file: LooseFiles([file])):
        with pytest.raises(CorruptionError):
            read(file)


def test_each_byte_of_a_block_is_under_its_checksum(tmp_path: Path) -> None:
    """Some bytes of the file belong to no block that is read: they may change unseen."""
    rows = {b"key %03d" % number: b"value" for number in range(40)}
    for codec in CODECS:
        file = sst(tmp_path / "1.sst", rows, codec)
        content, told = file.read_bytes(), (figures_of(file), list(keys_of(file)))
        refused = 0
        for at in range(0, len(content), 3):
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            try:
                assert (figures_of(file), list(keys_of(file))) == told
            except CorruptionError:
                refused += 1
        assert refused > 0.9 * len(content) / 3 - FOOTER_BYTES


def test_a_damaged_block_in_the_middle_is_met_by_a_read_of_the_keys(tmp_path: Path) -> None:
    file = sst(tmp_path / "1.sst", {b"key %06d" % number: b"v" * 20 for number in range(5000)})
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert figures_of(file).entries == 5000
    with pytest.raises(CorruptionError, match="checksum"):
        list(keys_of(file))


def blocks(content: bytes) -> list[tuple[int, int]]:
    """Where the blocks of a file with one block of data lie: data, metaindex, index, properties."""
    at = len(content) - FOOTER_BYTES + 1
    handles = []
    for _ in range(2):
        offset, at = read_varint(content, at)
        size, at = read_varint(content, at)
        handles.append((offset, size))
    named = content.index(b"rocksdb.properties", handles[0][0]) + len(b"rocksdb.properties")
    offset, named = read_varint(content, named)
    size, _ = read_varint(content, named)
    data_size = min(start for start, _ in [*handles, (offset, size)]) - 5
    return [(0, data_size), *handles, (offset, size)]


def resealed(content: bytes, block: tuple[int, int]) -> bytes:
    """The file with the checksum that the contents of a block have now."""
    start, end = block[0], block[0] + block[1]
    codec = content[end]
    checksum = (xxh3_64_intdigest(content[start:end]) ^ codec * 0x6B9083D9) & 0xFFFFFFFF
    return content[: end + 1] + checksum.to_bytes(4, "little") + content[end + 5 :]


TAKE = """
import sys
from pathlib import Path
from shutil import which
from kvstore.engine.loose_files import LooseDatabase
for file in sorted(Path(sys.argv[1]).iterdir()):
    print(file.name, flush=True)
    with LooseDatabase([file]) as loose:
        keys = [key for chunk, _ in loose.rows() for key in chunk]
    print(len(keys), flush=True)
"""


@pytest.mark.parametrize("codec", CODECS)
def test_rocksdb_takes_each_forged_file_that_is_read_and_reads_the_same(
    tmp_path: Path, codec: str
) -> None:
    """A checksum does not prove who wrote a block, and some forged blocks end RocksDB's process."""
    source = random.Random(f"{codec} {seed_of()}")
    file = sst(tmp_path / "1.sst", {b"key %03d" % number: b"value" for number in range(40)}, codec)
    sound, accepted = file.read_bytes(), list[str]()
    (tmp_path / "accepted").mkdir()
    for number in range(600):
        block = source.choice(blocks(sound))
        content = bytearray(sound)
        for _ in range(source.choice((1, 1, 2, 4))):
            at = block[0] + source.randrange(block[1] + 1)
            content[at] = source.choice((0, 1, 4, 7, 0x7F, 0x80, 0xFF, content[at] ^ 1))
        file.write_bytes(resealed(bytes(content), block))
        try:
            figures, keys = figures_of(file), list(islice(keys_of(file), 1_000))
        except CorruptionError:
            continue
        assert (figures.first, figures.last) == (keys[0], keys[-1])
        passed = [key for chunk, _ in LooseFiles([file]).rows() for key in chunk]
        assert passed == keys
        if figures.entries:  # RocksDB refuses a file without entries, and so does its manifest
            file.rename(tmp_path / "accepted" / f"{number:04d}")
            accepted += [f"{number:04d}", str(len(keys))]
    assert 100 < len(accepted) < 800
    command = [sys.executable, "-c", TAKE, str(tmp_path / "accepted")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == accepted, done.stderr[-2_000:]


@pytest.mark.skipif(which("sst_dump") is None, reason="no sst_dump (Debian: rocksdb-tools)")
@pytest.mark.parametrize("codec", CODECS)
def test_the_tool_of_another_rocksdb_reads_a_file(tmp_path: Path, codec: str) -> None:
    rows = {b"key %05d" % number: b"value %d" % number * 9 for number in range(3000)}
    file = sst(tmp_path / "1.sst", rows, codec)

    def told(command: str, *words: str) -> str:
        run = ["sst_dump", f"--file={file}", f"--command={command}", *words]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout

    assert "The file is ok" in told("verify")
    shown = re.findall(
        r"^'([0-9A-F]+)' seq:0, type:1 => ([0-9A-F]+)$", told("scan", "--output_hex"), re.M
    )
    assert {bytes.fromhex(key): bytes.fromhex(value) for key, value in shown} == rows


def entry(shared: int, key: bytes, value: bytes = b"") -> bytes:
    return varint(shared) + varint(len(key)) + varint(len(value)) + key + value


def contents(entries: bytes, restarts: Sequence[int] = (0,)) -> bytes:
    places = b"".join(at.to_bytes(4, "little") for at in restarts)
    return entries + places + len(restarts).to_bytes(4, "little")


PUT = b"\x01" + bytes(7)
ROW = entry(0, b"a" + PUT, b"1")
LONG = b"a" * 131_000 + PUT


class Forged(NamedTuple):
    """The contents of the blocks of a forged file, and which of them zstd packs."""

    data: bytes = contents(ROW)
    further_properties: bytes = b""
    further_index: bytes = b""
    index: bytes = b""
    """The contents of the index, instead of one entry and the further ones."""

    packs: str = ""
    claim: int = 0
    """Added to the size that the packed block of data tells."""

    def written(self, file: Path, told: dict[bytes, bytes]) -> Path:
        """Write the file; its properties are `told` and the further ones."""
        out = bytearray()

        def put(data: bytes, name: str, claim: int = 0) -> bytes:
            codec = 7 if name in self.packs.split() else 0
            if codec:
                data = varint(len(data) + claim) + pa.compress(data, codec="zstd", asbytes=True)
            handle = varint(len(out)) + varint(len(data))
            checksum = (xxh3_64_intdigest(data) ^ codec * 0x6B9083D9) & 0xFFFFFFFF
            out.extend(data + bytes([codec]) + checksum.to_bytes(4, "little"))
            return handle

        handle = put(self.data, "data", self.claim)
        entries = bytes([0, 1]) + b"b" + handle + self.further_index
        index = put(self.index or contents(entries), "index")
        properties = b"".join(entry(0, name, told[name]) for name in sorted(told))
        named = put(contents(properties + self.further_properties), "properties")
        metaindex = put(contents(entry(0, b"rocksdb.properties", named)), "metaindex")
        footer = b"\x04" + (metaindex + index).ljust(40, b"\x00") + (5).to_bytes(4, "little")
        file.write_bytes(out + footer + 0x88E241B785F4CFF7.to_bytes(8, "little"))
        return file


BOMBS: dict[str, Callable[[], Forged]] = {
    "one key again and again": lambda: Forged(
        contents(ROW + bytes([9, 0, 0]) * 5_000_000), packs="data"
    ),
    "a long key again and again": lambda: Forged(
        contents(entry(0, LONG) + varint(len(LONG)) + bytes([0, 0]) * 500_000), packs="data"
    ),
    "long keys that ascend": lambda: Forged(
        contents(
            entry(0, LONG)
            + b"".join(entry(131_000, n.to_bytes(3, "big") + PUT) for n in range(1, 20_000))
        ),
        packs="data",
    ),
    "entries of many MB": lambda: Forged(
        contents(
            b"".join(entry(0, n.to_bytes(3, "big") + PUT) for n in range(120_000)),
            range(0, 14 * 120_000, 14),
        ),
        packs="data",
    ),
    "long names of properties": lambda: Forged(
        further_properties=entry(0, b"z" * 500_000)
        + b"".join(entry(500_000, n.to_bytes(3, "big")) for n in range(60_000))
    ),
    "large properties": lambda: Forged(
        further_properties=entry(0, b"z", bytes(32 << 20)), packs="properties"
    ),
    "a long index": lambda: Forged(further_index=bytes([1, 0, 0]) * 5_000_000, packs="index"),
    "a block that tells terabytes": lambda: Forged(packs="data", claim=1 << 42),
    "a block that tells a byte more": lambda: Forged(packs="data", claim=1),
    "no restart": lambda: Forged(ROW + bytes(4)),
    "a restart in the middle": lambda: Forged(contents(ROW, (0, 4))),
    "a restart at a cut key": lambda: Forged(
        contents(ROW + entry(1, b"b" + PUT, b"2"), (0, len(ROW))),
    ),
    "restarts that do not ascend": lambda: Forged(contents(ROW + ROW, (0, 0))),
}
"""Made when they are needed: some have many MB."""


@pytest.mark.traces_memory
@pytest.mark.parametrize("name", BOMBS)
def test_a_forged_file_costs_no_memory_and_no_time(tmp_path: Path, name: str) -> None:
    with_one_row = sst(tmp_path / "1.sst", {b"a": b"1"}).read_bytes()
    start, size = blocks(with_one_row)[3]
    told = properties(with_one_row[start : start + size])
    sound = Forged().written(tmp_path / "2.sst", told)
    assert figures_of(sound) == Figures(b"a", b"a", 1)
    file = BOMBS[name]().written(tmp_path / "3.sst", told)
    with traced() as memory, pytest.raises(CorruptionError) as error:
        figures_of(file)
    assert len(str(error.value)) < 1_000
    assert memory.peak < 64 << 20


@pytest.mark.traces_memory
def test_an_index_of_many_entries_costs_no_memory(tmp_path: Path) -> None:
    """Each of its entries names the one block of data."""
    with_one_row = sst(tmp_path / "1.sst", {b"a": b"1"}).read_bytes()
    start, size = blocks(with_one_row)[3]
    told = properties(with_one_row[start : start + size])
    named = bytes([0, 1]) + b"b" + varint(0) + varint(len(Forged().data))
    count = 1_000_000
    index = contents(named * count, range(0, len(named) * count, len(named)))
    file = Forged(index=index, packs="index").written(tmp_path / "2.sst", told)
    with traced() as memory, pytest.raises(CorruptionError, match="ascend"):
        list(key_blocks_of(file))
    assert memory.peak < 64 << 20


def properties(block: bytes) -> dict[bytes, bytes]:
    """The entries of a block of properties."""
    at, end, key, found = 0, len(block) - 8, b"", {}
    while at < end:
        shared, at = read_varint(block, at)
        fresh, at = read_varint(block, at)
        size, at = read_varint(block, at)
        key = key[:shared] + block[at : at + fresh]
        at += fresh + size
        found[key] = block[at - size : at]
    return found


def test_no_file_stays_open(tmp_path: Path) -> None:
    sound = sst(tmp_path / "1.sst", {b"key %06d" % n: b"value" for n in range(5_000)})
    damaged = tmp_path / "2.sst"
    damaged.write_bytes(sound.read_bytes()[:-1])
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        figures_of(sound)
        next(keys_of(sound))
        with pytest.raises(CorruptionError):
            figures_of(damaged)
        with pytest.raises(CorruptionError):
            next(keys_of(damaged))
        abandoned = SstFile(tmp_path / "3.sst")
        abandoned.add([b"a"], [b"1"])
        abandoned.abandon()
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_file_that_becomes_shorter_while_it_is_read_is_told(tmp_path: Path) -> None:
    file = sst(tmp_path / "1.sst", {b"k%06d" % n: os.urandom(200) for n in range(3_000)})
    keys = keys_of(file)
    assert next(keys) == b"k000000"
    os.truncate(file, 5_000)
    with pytest.raises(CorruptionError, match="shorter"):
        list(keys)


@pytest.mark.parametrize(
    "name",
    [
        b"leveldb.BytewiseComparator",
        b"rocksdb.column.family.id",
        b"rocksdb.external_sst_file.version",
        b"rocksdb.external_sst_file.global_seqno",
        b"rocksdb.index.key.is.user.key",
        b"rocksdb.num.entries",
        b"rocksdb.num.range-deletions",
        b"rocksdb.properties",
    ],
)
def test_metadata_that_rocksdb_would_refuse_is_refused_before(tmp_path: Path, name: bytes) -> None:
    """RocksDB looks at it after the store has written down that an import is coming."""
    file = sst(tmp_path / "1.sst", {b"key %03d" % number: b"value" for number in range(40)})
    sound = file.read_bytes()
    tail = name[-4:]  # keys of properties are cut where they begin as the one before
    for block in blocks(sound)[1:]:
        start, end = block[0], block[0] + block[1]
        forged = sound[:start] + sound[start:end].replace(tail, b"XXXX") + sound[end:]
        if forged != sound:
            file.write_bytes(resealed(forged, block))
            with pytest.raises(CorruptionError, match=r"propert|metadata"):
                figures_of(file)
            return
    raise AssertionError(f"no block names {name!r}")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_packed_block_that_tells_another_size_is_refused(tmp_path: Path, codec: str) -> None:
    """Room of this size would be taken for it, and the rest of it would stay as memory was."""
    rows = {b"key %03d" % number: b"value" * 9 for number in range(90)}
    file = sst(tmp_path / "1.sst", rows, codec)
    sound = file.read_bytes()
    block = blocks(sound)[0]
    size, end = read_varint(sound, 0)
    assert sound[block[1]], "the block is packed"
    for told in (size + 1, size - 1, 1 << 14 - 1, (1 << 32) - 1):
        prefix = varint(told)
        assert len(prefix) == end or told > 1 << 30, "the block stays whole"
        file.write_bytes(resealed(prefix + sound[len(prefix) :], block))
        with pytest.raises(CorruptionError):
            figures_of(file)
