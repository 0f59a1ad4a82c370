"""The durable mark: a file that tells other processes up to which time a store is durable.

    DURABLE := | timestamp u64 | crc32 of the timestamp u32 |     big-endian

A log that is written and not yet synced looks the same to a reader in another process as one that
is synced. The writer therefore notes its durable frontier after each fsync, in place. The note
itself is not synced: after a power cut it is as old as the file system left it, or damaged.

Invariants
1. The time in the mark was durable before it was written there. So a reader that trusts the mark
   never shows a commit that a power cut can take back.
2. A mark that cannot be written stays at an older time, which is true as well. A failure to write
   it therefore fails no commit.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstore.errors.system import storage_errors

MARK_NAME: Final = "DURABLE"

_TIMESTAMP: Final = struct.Struct(">Q")
_CHECKSUM: Final = struct.Struct(">I")


class DurableMark:
    """The mark of one store, open to be written."""

    def __init__(self, directory: Path) -> None:
        with storage_errors(str(directory)):
            self._file = os.fdopen(
                os.open(directory / MARK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644),
                "r+b",
                buffering=0,
            )

    def write(self, timestamp: int) -> None:
        """Note that everything below `timestamp` is durable. Takes 2 us."""
        stored = _TIMESTAMP.pack(timestamp)
        with suppress(OSError, ValueError):  # see invariant 2; ValueError: it was closed meanwhile
            os.pwrite(self._file.fileno(), stored + _CHECKSUM.pack(zlib.crc32(stored)), 0)

    def close(self) -> None:
        """Close the file. Repeatable."""
        self._file.close()


def read_durable_mark(directory: Path) -> int:
    """The time below which the store in `directory` is durable. 0 if no mark is there, or if it
    is just being written. Takes 10 us. Raises `AccessDeniedError` if it may not be read."""
    size = _TIMESTAMP.size + _CHECKSUM.size
    with storage_errors(str(directory)):
        try:
            stored = (directory / MARK_NAME).read_bytes()
        except FileNotFoundError:
            return 0
    if len(stored) != size or stored[8:] != _CHECKSUM.pack(zlib.crc32(stored[:8])):
        return 0
    return int(_TIMESTAMP.unpack(stored[:8])[0])
