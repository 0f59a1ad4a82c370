"""RocksDB's write-ahead log, read just far enough to tell a torn tail from damage.

RocksDB's own recovery either cuts the log at the first bad byte without a word, however much that
was on disk follows, or refuses tails that a power cut leaves. So it is asked to refuse, and
where it does, this module looks: if a whole record follows the bad one, bytes that were written
have changed, and that is an error; if none does, the tail was torn, and is cut.

    log    := | block 32 KiB | ...           files `%06d.log`, ascending
    block  := | record | ... | 0 to 6 zeros |    a record never crosses a block
    record := | masked CRC-32C u32 | length u16 | type u8 | payload |      little-endian
              the checksum covers type and payload; zeros are where nothing was written

Records of a recycled log have types of their own, and no log of ours is recycled. RocksDB's reader
(rocksdict 0.3.29) does not return from bytes that look like one, as garbage behind the last whole
record may: such a log is cut, or refused, before RocksDB reads it.

A hole that a power cut leaves before records that did reach the disk looks like damage: nothing
on disk tells which of them had been promised. A bad last record looks like a torn one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

BLOCK_BYTES: Final = 32 * 1024
_RECORD = struct.Struct("<IHB")
_RECYCLED: Final = frozenset((5, 6, 7, 8, 11))
_MASK_DELTA: Final = 0xA282EAD8
_CASTAGNOLI: Final = 0x82F63B78


class LogDamage(NamedTuple):
    """The first bad record of a log, or of the MANIFEST, that is followed by a whole one."""

    file: Path
    offset: int


def find_damage(directory: Path) -> LogDamage | None:
    """Where the logs in `directory`, or its MANIFEST, break although they go on; None if only
    their end is torn.

    For a database that would not open: computes checksums in Python, some 10 MB a second.
    """
    for files in (sorted(directory.glob("*.log")), _manifests(directory)):
        broken: LogDamage | None = None
        for file in files:
            for offset, is_whole in _records(file.read_bytes()):
                if is_whole and broken is not None:
                    return broken
                if not is_whole and broken is None:
                    broken = LogDamage(file, offset)
    return None


def looks_recycled(directory: Path) -> bool:
    """Whether a log in `directory`, or the MANIFEST, has what looks like a record of a recycled
    log: then its end is torn, or it is damaged. Looks at headers only: 0.2 us a record."""
    files = [*directory.glob("*.log"), *_manifests(directory)]
    return any(_RECYCLED & _kinds(file.read_bytes()) for file in files)


def cut(directory: Path) -> None:
    """Cut the logs in `directory`, and its MANIFEST, at their first bad record, durably: nothing is
    left behind it."""
    _cut(sorted(directory.glob("*.log")))
    cut_manifest(directory)


def cut_manifest(directory: Path) -> None:
    """Do what `cut` does, to the MANIFEST alone: RocksDB cuts the torn tail of a log by itself, and
    refuses that of a MANIFEST."""
    _cut(_manifests(directory))


def _manifests(directory: Path) -> list[Path]:
    """The MANIFEST that counts, if there is one. Its bytes are those of a log."""
    try:
        name = (directory / "CURRENT").read_text().strip()
    except FileNotFoundError:
        return []
    file = directory / name
    return [file] if file.is_file() and name.startswith("MANIFEST-") else []


def _cut(files: Sequence[Path]) -> None:
    is_cut = False
    for file in files:
        found = _records(file.read_bytes())
        end = 0 if is_cut else next((at for at, is_whole in found if not is_whole), None)
        if end is not None:
            is_cut = True
            if file.is_symlink():  # in a reader's directory, which does not own the log
                log_bytes = file.read_bytes()
                file.unlink()
                file.write_bytes(log_bytes)
            with file.open("r+b") as log:
                log.truncate(end)
                os.fsync(log.fileno())


def _kinds(log: bytes) -> set[int]:
    """The types of all records that RocksDB may come to: behind a bad one it goes on at the next
    block."""
    kinds = set()
    for block in range(0, len(log), BLOCK_BYTES):
        end = min(block + BLOCK_BYTES, len(log))
        at = block
        while at + _RECORD.size <= end:
            _, length, kind = _RECORD.unpack_from(log, at)
            kinds.add(kind)
            if not (kind or length):
                break
            at += _RECORD.size + length
    return kinds


def _records(log: bytes) -> Iterator[tuple[int, bool]]:
    """Offset of each record, and whether it is whole; after a bad one, from the next block."""
    for block in range(0, len(log), BLOCK_BYTES):
        end = min(block + BLOCK_BYTES, len(log))
        at = block
        while at + _RECORD.size <= end:
            masked, length, kind = _RECORD.unpack_from(log, at)
            stop = at + _RECORD.size + length
            if stop > end or not (kind or length):
                yield at, False
                break
            yield at, _masked_crc32c(log[at + _RECORD.size - 1 : stop]) == masked
            at = stop


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE: Final = _table()
