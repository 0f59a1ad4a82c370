"""rocksdict's errors as errors of our tree. Each is a bare `Exception`, recognised by its text."""

from __future__ import annotations

import re
from pathlib import Path

import rocksdict as rocks

from kvstore.errors import (
    AccessDeniedError,
    ClosedError,
    CorruptionError,
    KVStoreError,
    LockedError,
    OutOfSpaceError,
    StorageError,
)


class translated:  # noqa: N801  # used as a statement: `with translated(where):`
    """Turn rocksdict's bare exceptions into errors of the tree. A message names the directory
    `where`, even if the database was opened in another directory, its `home`."""

    __slots__ = ("_home", "_where")

    def __init__(self, where: str, home: Path | None = None) -> None:
        self._where = where
        self._home = where if home is None else str(home)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, KVStoreError):
            raise from_text(self._where, error, self._home) from error


def from_text(where: str, error: Exception, home: str = "") -> KVStoreError:
    """The error of our tree for an exception of rocksdict, in a database at `where` that was opened
    in `home`."""
    text = str(error).replace(home, where) if home else str(error)
    if isinstance(error, rocks.DbClosedError) or text.startswith("Already "):
        return ClosedError(where)  # "Already borrowed": another thread is closing the database
    if "lock hold by current process" in text or "While lock file" in text:
        return LockedError(
            where, "this process" if "current process" in text else "another process"
        )
    if "No space left" in text or "Disk quota" in text:
        return OutOfSpaceError(where)
    if lost := _LOST_LOG.search(text):
        return CorruptionError(
            str(Path(where) / f"{int(lost[1]):06d}.log"),
            "the log is lost, or shorter than it was when it was synced",
            "put it back, or restore the store from a backup",
        )
    if text.startswith("Corruption"):
        return CorruptionError(where, text)
    if any(refusal in text for refusal in _REFUSALS):
        return AccessDeniedError(where, text)
    return StorageError(f"storage of {where} failed: {text}", "look at the disk, then reopen")


_LOST_LOG = re.compile(r"(?:Missing WAL with log number|Size mismatch: WAL \(log number): (\d+)")
_REFUSALS = ("Permission denied", "Operation not permitted", "Read-only file system")
