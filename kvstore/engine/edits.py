"""The edits in RocksDB's MANIFEST, read just far enough to find flushes.

The MANIFEST is a log (`kvstore.engine.wal` has its bytes). Each record is an edit of the list of
files, and begins with a tag:

    edit := | 02 log number | ...     a flush: entries of older logs are in files now
            | 09 previous log | ...   a compaction, an import, a note about logs
            | other | ...             the beginning of a MANIFEST

A RocksDB secondary instance keeps the entries of logs in memory, also after the writer has flushed
them. Later compactions of the writer may remove these entries from the files for good, and the
instance would show them for ever. So it has to be opened anew after a flush, and after no other
edit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvstore.engine.wal import BLOCK_BYTES, RECORD

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
