"""RocksDB's own logs, read just far enough: edits in the MANIFEST, and torn tails of the write-
ahead log.

A reader beside a writer learns of flushes from the edits. An opening tells a torn tail, which a
crash leaves, from damage.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

# --------------------------------------------------------------------------------------------------
# The ends of files that another process writes, read without giving the interpreter lock away.
#
# `os.stat` gives the interpreter lock away. If another thread computes, it comes back after a
# switch interval only (`sys.getswitchinterval`, 5 ms). A live reader looks at four files at every
# tick, and would be 20 ms older than it needs to be. Linux has `statx`, whose bytes are the same on
# all processors:
#
#     statx := | 32 | inode u64 | size u64 | 64 | modified s u64 | ns u32 | 12 | device 2 * u32 |

_FIELDS: Final = struct.Struct("=32xQQ64xqI12xII")
_AT_FDCWD: Final = -100
_BASIC_STATS: Final = 0x7FF
_STATX_BYTES: Final = 256


class FileEnd(NamedTuple):
    """A file on the disk, and how far it is written."""

    device: int
    inode: int
    size: int
    modified_ns: int


def _found_statx() -> Callable[..., int] | None:
    try:
        call: Any = ctypes.PyDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
    found: Callable[..., int] = call
    return found


_STATX: Final = _found_statx()


def file_end(path: str) -> FileEnd:
    """The end of the file or directory at `path`. Takes 2 us. Raises `OSError` as `os.stat`."""
    if _STATX is None:
        return slow_file_end(path)
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if _STATX(_AT_FDCWD, os.fsencode(path), 0, _BASIC_STATS, buffer):
        code = ctypes.get_errno()
        if code == errno.ENOSYS:  # an old kernel, or a sandbox that knows no such call
            return slow_file_end(path)
        raise OSError(code, os.strerror(code), path)
    inode, size, seconds, ns, major, minor = _FIELDS.unpack_from(buffer)
    return FileEnd(os.makedev(major, minor), inode, size, seconds * 10**9 + ns)


def slow_file_end(path: str) -> FileEnd:
    """As `file_end`, by `os.stat`."""
    found = os.stat(path)
    return FileEnd(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


# --------------------------------------------------------------------------------------------------
# The edits in RocksDB's MANIFEST, read just far enough to find flushes.
#
# The MANIFEST has the bytes of a log. Each record is an edit of the list of files, and begins with
# a tag:
#
#     edit := | 02 log number | ...     a flush: entries of older logs are in files now
#             | 09 previous log | ...   a compaction, an import, a note about logs
#             | other | ...             the beginning of a MANIFEST
#
# A RocksDB secondary instance keeps the entries of logs in memory, also after the writer has
# flushed them. Later compactions of the writer may remove these entries from the files for good,
# and the instance would show them for ever. So it has to be opened anew after a flush, and after no
# other edit.

_BEGINNINGS: Final = frozenset((1, 2))
"""The types of records, and of parts of records, that an edit begins with."""

_REARRANGES: Final = b"\x09"


class EditReader:
    """Reads the edits of one MANIFEST, each once."""

    def __init__(self, manifest: Path) -> None:
        self._manifest = manifest
        self._read = 0

    def rearrange(self, end: int) -> bool:
        """Whether no edit up to byte `end`, and after the edits read before, is a flush. Counts
        them as read. Costs 0.5 us an edit."""
        file = os.open(self._manifest, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stored = os.pread(file, end - self._read, self._read)
        finally:
            os.close(file)
        rearranges, at = True, self._read
        while at + RECORD.size <= end:
            left = BLOCK_BYTES - at % BLOCK_BYTES
            if left < RECORD.size:
                at += left
                continue
            place = at - self._read
            _, length, kind = RECORD.unpack_from(stored, place)
            begin = place + RECORD.size
            if begin + length > len(stored):
                break  # the writer is just adding it
            if kind in _BEGINNINGS and stored[begin : begin + 1] != _REARRANGES:
                rearranges = False
            at += RECORD.size + length
        self._read = at
        return rearranges


# --------------------------------------------------------------------------------------------------
# RocksDB's write-ahead log, read just far enough to tell a torn tail from damage.
#
# RocksDB's own recovery either cuts the log silently at the first bad byte, whatever follows on
# disk, or refuses tails that a power cut leaves. So RocksDB is told to refuse, and this module then
# reads the log. If a whole record follows the bad one, written bytes have changed, which is an
# error. If none follows, the tail was torn and is cut.
#
#     log    := | block 32 KiB | ...           files `%06d.log`, ascending
#     block  := | record | ... | 0 to 6 zeros |    a record never crosses a block
#     record := | masked CRC-32C u32 | length u16 | type u8 | payload |      little-endian
#               the checksum covers type and payload; bytes never written are zeros
#
# Records of recycled logs have types of their own, and no log of ours is recycled. RocksDB's reader
# (rocksdict 0.3.29) never returns from bytes that look like such a record, as garbage behind the
# last whole record may. Such a log is cut or refused before RocksDB reads it.
#
# A power cut may leave a hole in front of records that did reach the disk. This looks like damage,
# because nothing on disk tells which records were acknowledged. A damaged last record looks torn.

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
