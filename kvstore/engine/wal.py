"""RocksDB's write-ahead log, read just far enough to tell a torn tail from damage.

RocksDB's own recovery either cuts the log silently at the first bad byte, whatever follows on disk,
or refuses tails that a power cut leaves. So RocksDB is told to refuse, and this module then reads
the log. If a whole record follows the bad one, written bytes have changed, which is an error. If
none follows, the tail was torn and is cut.

    log    := | block 32 KiB | ...           files `%06d.log`, ascending
    block  := | record | ... | 0 to 6 zeros |    a record never crosses a block
    record := | masked CRC-32C u32 | length u16 | type u8 | payload |      little-endian
              the checksum covers type and payload; bytes never written are zeros

Records of recycled logs have types of their own, and no log of ours is recycled. RocksDB's reader
(rocksdict 0.3.29) never returns from bytes that look like such a record, as garbage behind the last
whole record may. Such a log is cut or refused before RocksDB reads it.

A power cut may leave a hole in front of records that did reach the disk. This looks like damage,
because nothing on disk tells which records were acknowledged. A damaged last record looks torn.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

BLOCK_BYTES: Final = 32 * 1024
RECORD: Final = struct.Struct("<IHB")
_RECYCLED: Final = frozenset((5, 6, 7, 8, 11))
_MASK_DELTA: Final = 0xA282EAD8
_CASTAGNOLI: Final = 0x82F63B78


class LogDamage(NamedTuple):
    """The first bad record of a log, or of the MANIFEST, that is followed by a whole one."""

    file: Path
    offset: int


def find_damage(directory: Path) -> LogDamage | None:
    """The first bad record, in the logs of `directory` or its MANIFEST, that a whole record
    follows; None if at most their end is torn.

    For a database that does not open: computes checksums in Python, 10 MB a second.
    """
    for files in (sorted(directory.glob("*.log")), _manifests(directory)):
        broken: LogDamage | None = None
        for file in files:
            for offset, is_whole in records_of(file.read_bytes()):
                if is_whole and broken is not None:
                    return broken
                if not is_whole and broken is None:
                    broken = LogDamage(file, offset)
    return None


def looks_recycled(directory: Path) -> bool:
    """Whether a log in `directory`, or the MANIFEST, has bytes that look like a record of a
    recycled log, and is therefore torn or damaged. Reads headers only: 0.2 us a record."""
    files = [*directory.glob("*.log"), *_manifests(directory)]
    return any(_RECYCLED & _kinds(_bytes_of(file)) for file in files)


def _bytes_of(file: Path) -> bytes:
    """The bytes of a file, none where the writer of the store has just removed it."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def cut(directory: Path) -> None:
    """Cut the logs in `directory`, and its MANIFEST, at their first bad record. The cut is
    durable."""
    _cut(sorted(directory.glob("*.log")))
    cut_manifest(directory)


def cut_manifest(directory: Path) -> None:
    """Cut the MANIFEST as `cut` does. RocksDB cuts the torn tail of a log by itself, but refuses a
    MANIFEST with a torn tail."""
    _cut(_manifests(directory))


def _manifests(directory: Path) -> list[Path]:
    """The MANIFEST that `CURRENT` names, if it exists. It has the format of a log."""
    try:
        name = (directory / "CURRENT").read_text(errors="replace").strip()
    except FileNotFoundError:
        return []
    file = directory / name
    return [file] if file.is_file() and name.startswith("MANIFEST-") else []


def _cut(files: Sequence[Path]) -> None:
    is_cut = False
    for file in files:
        found = records_of(file.read_bytes())
        end = 0 if is_cut else next((at for at, is_whole in found if not is_whole), None)
        if end is not None:
            is_cut = True
            if file.is_symlink():  # a reader's directory links to a log that it must not change
                log_bytes = file.read_bytes()
                file.unlink()
                file.write_bytes(log_bytes)
            with file.open("r+b") as log:
                log.truncate(end)
                os.fsync(log.fileno())


def _kinds(log: bytes) -> set[int]:
    """The types of all records that RocksDB may read: behind a bad record it continues at the next
    block."""
    kinds = set()
    for block in range(0, len(log), BLOCK_BYTES):
        end = min(block + BLOCK_BYTES, len(log))
        at = block
        while at + RECORD.size <= end:
            _, length, kind = RECORD.unpack_from(log, at)
            kinds.add(kind)
            if not (kind or length):
                break
            at += RECORD.size + length
    return kinds


def records_of(log: bytes) -> Iterator[tuple[int, bool]]:
    """The offset of each record, and whether it is whole. Behind a bad record the next block
    follows."""
    for block in range(0, len(log), BLOCK_BYTES):
        end = min(block + BLOCK_BYTES, len(log))
        at = block
        while at + RECORD.size <= end:
            masked, length, kind = RECORD.unpack_from(log, at)
            stop = at + RECORD.size + length
            if stop > end or not (kind or length):
                yield at, False
                break
            yield at, _masked_crc32c(log[at + RECORD.size - 1 : stop]) == masked
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
