"""SHA-256 of a file, also of one that is still being written: a thread follows its writer.

Hashing takes a seventh of the time of writing an SST, and runs outside the interpreter lock.
Files only grow at their end (RocksDB writes SSTs so), hence what was hashed stays true.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

_CHUNK: Final = 4 << 20
"""Bytes hashed in one call: each waits for the interpreter up to 5 ms before and after."""

_FOLLOW_FROM: Final = 16 << 20
"""Bytes that have come since the last look: smaller files are not worth a thread."""


class GrowingDigest:
    """The digest of the file at `path`, which another writes meanwhile and then leaves alone."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._digest = hashlib.sha256()
        self._chunk = memoryview(bytearray(_CHUNK))
        self._thread: ThreadPoolExecutor | None = None
        self._looking: Future[None] | None = None
        self._looked_at = 0

    def follow(self, size_bytes: int) -> None:
        """The file has grown to about `size_bytes`: hash what is there, in the thread."""
        if size_bytes - self._looked_at < _FOLLOW_FROM:
            return
        if self._looking is not None and not self._looking.done():
            return
        self._looked_at = size_bytes
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-digest")
        with suppress(RuntimeError):  # the interpreter ends: `finish` looks at all of it
            self._looking = self._thread.submit(self._look)

    def finish(self) -> str:
        """Bring the whole file to disk; its SHA-256 in hex."""
        try:
            if self._looking is not None:
                self._looking.result()
            self._look()
            os.fsync(self._file.fileno())
        finally:
            self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Stop following. Repeatable."""
        if self._thread is not None:
            self._thread.shutdown()
        self._file.close()

    def _look(self) -> None:
        while count := self._file.readinto(self._chunk):
            self._digest.update(self._chunk[:count])


def fsync_and_hash(path: Path) -> str:
    """SHA-256 of a file, in hex, once all of it is on disk."""
    return GrowingDigest(path).finish()
