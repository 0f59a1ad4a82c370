"""Errors of the operating system, translated into errors of this project."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors.root import KVStoreError
from kvstore.errors.storage import OutOfSpaceError, StorageError
from kvstore.errors.usage import AccessDeniedError


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Translate errors of the operating system into errors of this project."""
    try:
        yield
    except OSError as error:
        raise storage_error(where, error) from error


def storage_error(where: str, error: OSError) -> KVStoreError:
    """The error of this project for an error of the operating system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(where)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDeniedError(where, str(error))
    return StorageError(f"{where}: {error}", "look at the disk, then open it again")
