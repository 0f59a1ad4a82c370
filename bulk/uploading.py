"""Sending the parts of an import to an object store while later parts are built.

Invariants
1. The local disk holds `UPLOADS_AT_ONCE` finished parts at most, and the part being written.
2. A failed upload is raised to the caller who adds the next part, or who waits for all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from bulk.bucket import Bucket
from bulk.part import Part
from kvstore.errors.system import storage_errors
from kvstore.limits import UPLOADS_AT_ONCE


def scratch_directory(parent: str | os.PathLike[str] | None = None) -> Path:
    """A new directory for the parts that are being built, on the disk of temporary files."""
    with storage_errors(str(parent or tempfile.gettempdir())):
        return Path(tempfile.mkdtemp(prefix="kvstore-parts-", dir=parent))


def send(bucket: Bucket, part: Part, scratch: Path) -> None:
    """Send a part and the records of its expiries, and remove their local files."""
    for each in (part, *part.expiries):
        bucket.put_part(each, scratch / each.name)
        with suppress(OSError):
            (scratch / each.name).unlink()


class Uploads:
    """Sends finished parts in threads of its own."""

    def __init__(self, bucket: Bucket, scratch: Path) -> None:
        self._bucket, self._scratch = bucket, scratch
        self._pool = ThreadPoolExecutor(UPLOADS_AT_ONCE, "kvstore-upload")
        self._under_way: set[Future[None]] = set()
        # A process that dies leaves the directory to the cleaning of temporary files.
        self._remove = weakref.finalize(self, _remove, scratch, os.getpid())

    def add(self, part: Part) -> None:
        """Send a part. Waits while `UPLOADS_AT_ONCE` parts are under way."""
        self._wait(UPLOADS_AT_ONCE - 1)
        self._under_way.add(self._pool.submit(send, self._bucket, part, self._scratch))

    def finish(self) -> None:
        """Wait until all parts are there."""
        self._wait(0)

    def close(self) -> None:
        """End the threads, and remove the local files. Repeatable."""
        self._pool.shutdown(cancel_futures=True)
        self._remove()

    def _wait(self, most: int) -> None:
        """Wait until at most `most` parts are under way. Raises the error of a failed one."""
        while len(self._under_way) > most:
            done, left = wait(self._under_way, return_when=FIRST_COMPLETED)
            self._under_way = left
            for each in done:
                each.result()


def _remove(scratch: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove the files of its parent
        shutil.rmtree(scratch, ignore_errors=True)
