"""Exit codes: one number tells a script what to do about a failure.

0   done
1   the key is not there, or verify, scrub or salvage found something that is not whole
2   fix the call, the option or the path; nothing was written
3   surely not done (the store is in use, a conflict): run it again
4   history at the time is gone, or the time is not complete yet
5   storage failed, or bytes are damaged
6   a newer owner has taken over: stop
130 interrupted
"""

from __future__ import annotations

import errno
from typing import Final

from kvstore.errors import (
    CorruptionError,
    FencedError,
    HistoryGoneError,
    KVStoreError,
    NotYetWrittenError,
    RetryableError,
    StorageError,
    UsageError,
)

DONE: Final = 0
NOT_FOUND: Final = 1
USAGE: Final = 2
RETRY: Final = 3
TIME: Final = 4
STORAGE: Final = 5
FENCED: Final = 6

EXIT_CODES: Final[tuple[tuple[type[KVStoreError], int], ...]] = (
    (UsageError, USAGE),
    (RetryableError, RETRY),
    (HistoryGoneError, TIME),
    (NotYetWrittenError, TIME),
    (FencedError, FENCED),
    (StorageError, STORAGE),
    (CorruptionError, STORAGE),
)
"""The branches of the error tree, each with its code."""

HELP: Final = """Exit codes:
    0  done
    1  the key is absent; damage was found; a part of the work failed
    2  wrong call: nothing was written
    3  not done: run it again
    4  history is gone, or the time is not complete yet
    5  storage failed, or bytes are damaged
    6  a newer owner has taken over: stop
  130  interrupted"""

_OF_THE_PATH: Final = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


def exit_code(error: KVStoreError) -> int:
    """The code for `error`, by its branch of the tree."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def from_system(error: OSError) -> KVStoreError:
    """An error of ours for a refusal of the operating system (a path, a permission, the disk)."""
    where = error.filename or "the operating system"
    text = f"{where}: {error.strerror or error}"
    if error.errno in _OF_THE_PATH:
        return UsageError(text, "check the path")
    return StorageError(text, "look at the disk, then run it again")
