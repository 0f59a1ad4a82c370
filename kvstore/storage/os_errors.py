"""Errors of the operating system, sorted by what a caller of a storage should do about them."""

from __future__ import annotations

import errno

from kvstore.errors import (
    AccessDeniedError,
    DeterminateError,
    IndeterminateError,
    KVStoreError,
    OutOfSpaceError,
    StorageError,
)

_REFUSALS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
)
"""The path or its permissions are wrong."""
_PASSING = frozenset(
    {
        errno.ENOENT,  # somebody removed the folder: the next attempt makes it again
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOLCK,
        # of network file systems
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.EPIPE,
    }
)
"""Failures of the operating system that another attempt may not meet again."""
_BROKEN = "repair the storage; acknowledged writes stand"


def translate_os_error(where: str, error: OSError) -> KVStoreError:
    """The error for a failed write: a refusal, a full or broken disk, or an unknown outcome, after
    which the call may be retried."""
    lasting = _lasting(where, error)
    return lasting or IndeterminateError(where, str(error))


def not_done(where: str, error: OSError) -> KVStoreError:
    """The error for a call that surely had no effect: a refusal, a full or broken disk, or a
    failure that may pass."""
    lasting = _lasting(where, error)
    return lasting or DeterminateError(where, str(error))


def _lasting(where: str, error: OSError) -> KVStoreError | None:
    """The error to raise at once; None where another attempt may not meet `error` again."""
    if error.errno in _REFUSALS:
        return AccessDeniedError(where, str(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(where)
    return None if error.errno in _PASSING else StorageError(f"{where} failed: {error}", _BROKEN)
