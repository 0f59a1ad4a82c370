"""Homes: private directories in which readers open a database that another process writes.

RocksDB writes an information log beside a database, and rocksdict a file of its own. A home takes
both, so that the writer's directory may be read-only storage or another user's.

    TMPDIR/kvstore-follow-*/CURRENT, MANIFEST-%06d    links to the writer's files
                            LOCK                      locked as long as the reader is open
                            info/                     RocksDB's information log

Invariants
1. A home whose lock is free was abandoned by a reader that was killed. The next reader removes it.
2. A home gets its name when it is locked, so that no other reader takes it for an abandoned one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstore.errors.system import storage_errors
from kvstore.forks import own

_PREFIX: Final = "kvstore-follow-"
_WHERE: Final = "the directory for temporary files (TMPDIR)"


class ReaderHome:
    """The home of one reader. It is removed when it is closed, and not in a forked child."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        own(self, f"the directory {path}")

    @classmethod
    def made(cls, directory: Path, manifest: str) -> ReaderHome:
        """A new home for a reader of the database at `directory`. Raises `OutOfSpaceError`."""
        with storage_errors(_WHERE):
            unnamed = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
            lock = os.open(unnamed / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for name in ("CURRENT", manifest):
                    (unnamed / name).symlink_to(directory.absolute() / name)
                path = unnamed.with_name(unnamed.name.removeprefix("new-"))
                unnamed.rename(path)
            except BaseException:
                os.close(lock)
                shutil.rmtree(unnamed, ignore_errors=True)
                raise
            home = cls(path, lock)
            _remove_abandoned(path.parent)
        return home

    def close(self) -> None:
        """Remove the home. Repeatable."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)  # the next reader removes what stays
            lock, self._lock = self._lock, -1
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for home in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another user's, or another reader removes it
            lock = os.open(home / "LOCK", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home)
            finally:
                os.close(lock)
