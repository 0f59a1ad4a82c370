"""Sorted files: bytes that a reader meets, and rows that the writer gets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

from kvstore.bulk.part import SstFile
from kvstore.codec.varint import read_varint
from kvstore.engine import sorted_file
from kvstore.engine.sorted_file import CODECS, figures_of, key_blocks_of, table_footer
from kvstore.errors import CorruptionError
from kvstore.loops.blocks import xxh3
from kvstore.loops.files import Files, Pass
from kvstore.loops.shapes import OutOfOrder
from tests.fuzz.driver import Target
from tests.harness.bounds import bounds

BYTES_MAX = 1 << 20
ROWS_MAX = 1_000


def scratch() -> Path:
    """A file for one process: each run writes it anew."""
    return Path(tempfile.gettempdir()) / f"kvstore-fuzz-{os.getpid()}.sst"


def passed(file: Path) -> list[tuple[bytes, bytes]] | None:
    """All entries of a file by the loop of passes, None where it finds damage."""
    with file.open("rb") as opened:
        try:
            told = table_footer(opened.fileno())
            files = Files([[(opened.fileno(), *told)]])
            one = Pass(files, b"", None, 0, {}, whole=True)
            found = list[tuple[bytes, bytes]]()
            while one.take(ROWS_MAX, BYTES_MAX, ROWS_MAX) and len(found) < 50 * ROWS_MAX:
                found += zip(*one.found_rows(), strict=True)
            found += zip(*one.found_rows(), strict=True)
        except (ValueError, IndexError):
            return None
    return found


def a_file(data: bytes) -> None:
    """Every reader of a file gives rows or says that it is damaged. What the checksums of mutated
    blocks would hide is met too: the first byte tells whether they are made to fit."""
    content = bytearray(data[1:])
    if data[:1] >= b"\x80":
        reseal(content)
    file = scratch()
    try:
        file.write_bytes(content)
        rows = passed(file)
        try:
            figures = figures_of(file)
            keys = list(chain.from_iterable(key_blocks_of(file)))
        except CorruptionError:
            return
        assert all(one < other for one, other in pairwise(keys))
        assert (figures.first, figures.last) == (keys[0], keys[-1])
        if rows is not None:
            assert [key for key, _ in rows] == keys
    finally:
        file.unlink(missing_ok=True)


def checksum(content: bytes | bytearray, offset: int, size: int) -> bytes:
    """The checksum of a block as its bytes are."""
    codec = content[offset + size]
    told = xxh3(bytes(content[offset : offset + size])) ^ codec * 0x6B9083D9
    return (told & 0xFFFFFFFF).to_bytes(4, "little")


def reseal(content: bytearray) -> None:
    """Make the checksums of the first block, of the index and of the block that names the
    properties fit."""
    places = [(0, size) for size in _first_sizes()]
    with suppress(IndexError, ValueError):
        at = max(len(content) - 52, 0)
        for _ in range(2):
            offset, at = read_varint(content, at)
            size, at = read_varint(content, at)
            places.append((offset, size))
    for offset, size in places:
        if offset + size + 5 < len(content):
            end = offset + size + 1
            content[end : end + 4] = checksum(content, offset, size)


def written_rows(data: bytes) -> None:
    """Rows that ascend are read back, whatever they are and however they are added; the first that
    does not ascend is refused, and the file has those before it."""
    rows = list(parsed(data[2:]))
    codec = [*CODECS][data[0] % len(CODECS)] if data else "lz4"
    file = scratch()
    with bounds(PACKED_STRETCH_BYTES=1 + (data[1] if len(data) > 1 else 0) * 40):
        writer = SstFile(file, compression=codec)
        kept = list[tuple[bytes, bytes]]()
        try:
            for key, value in rows:
                try:
                    writer.add([key], [value])
                except OutOfOrder:
                    assert kept
                    assert key <= kept[-1][0]
                    break
                assert not kept or key > kept[-1][0]
                kept.append((key, value))
            assert (writer.finish() is None) == (not kept)
            if kept:
                assert passed(file) == kept
                assert figures_of(file).entries == len(kept)
        finally:
            writer.abandon()
            file.unlink(missing_ok=True)


def parsed(data: bytes) -> Sequence[tuple[bytes, bytes]]:
    """Rows of bytes: each begins with the length of its key, and that of its value, which may be
    repeated many times."""
    rows, at = [], 0
    while at + 3 <= len(data) and len(rows) < ROWS_MAX:
        of_key, of_value, times = data[at : at + 3]
        at += 3
        key, value = data[at : at + of_key], data[at + of_key : at + of_key + of_value]
        at += of_key + of_value
        rows.append((key, value * (1 + times * (times > 0xF0))))
    return rows


@cache
def _first_sizes() -> list[int]:
    """The sizes of the first blocks of the sound files."""
    return [
        next(n for n in range(1, len(each)) if each[n + 1 : n + 5] == checksum(each, 0, n))
        for each in _files()
    ]


@cache
def _files() -> list[bytes]:
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for number, codec in enumerate([*CODECS] * 2):
            file = SstFile(Path(directory) / str(number), compression=codec)
            keys = [b"key %04d" % at * (1 + at % 3) for at in range(9 if number < 3 else 500)]
            keys.sort()
            file.add(keys, [b"value %d" % (at % 7) * 3 for at in range(len(keys))])
            file.finish()
            found.append((Path(directory) / str(number)).read_bytes())
    return found


def _rows() -> Sequence[bytes]:
    seeds = []
    for number in range(9):
        rows = b"".join(
            bytes([3, 4, 0xFF * (at == 5)]) + b"%03d" % at + b"%04d" % at for at in range(20)
        )
        seeds.append(bytes([number, number * 30]) + rows)
    return seeds


TARGETS = [
    Target(
        "sorted-file",
        a_file,
        lambda: [first + each for each in _files() for first in (b"\x00", b"\xff")],
        (sorted_file,),
        rounds=200,
    ),
    Target("written-rows", written_rows, _rows, (sorted_file,), rounds=100),
]
