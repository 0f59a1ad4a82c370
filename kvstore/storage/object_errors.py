"""Failures of an object store, as errors of the one tree.

Invariants
1. A failure that may pass becomes the error that the caller passes: the call had no effect, or its
   effect is unknown.
2. A failure that another attempt would meet again is raised at once, with the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from kvstore.errors import (
    AccessDeniedError,
    DeterminateError,
    IndeterminateError,
    KVStoreError,
    NoBucketError,
    StorageError,
)
from kvstore.forks import own
from kvstore.storage.os_errors import not_done, translate_os_error

_METADATA_SERVICE = "169.254.169.254"
"""The address at which a provider's machines ask for credentials that are found nowhere else."""
_CREDENTIALS = (
    "check the credentials, in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY) or options=, and what they allow"
)
_PASSING = re.compile(
    r"status code: (408|409|425|429|500|502|503|504|509|52\d)\b"
    r"|\b(RequestTimeout|SlowDown|OperationAborted|ServerBusy|OperationTimedOut)\b"
    r"|error sending request|error decoding response body|timed out|connection closed"
)
"""Messages of obstore for failures that may pass: a status, a provider's code inside a status 400,
or no answer at all."""
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class _Client:
    """obstore's threads: one set for the process, which a forked child does not get."""

    def __init__(self) -> None:
        self._is_owned = False

    def use(self) -> None:
        """Call it before any request. Raises `ForkedError` where a request would hang."""
        if not self._is_owned:
            self._is_owned = True
            remedy = "start a fresh process (spawn, forkserver, subprocess), or fork before any use"
            own(self, "the client of object stores", remedy=remedy)


_CLIENT: Final = _Client()


@contextmanager
def translated(where: str, failure: type[DeterminateError | IndeterminateError]) -> Iterator[None]:
    """Translate the store's exceptions into errors of ours: `failure` where they may pass."""
    _CLIENT.use()
    try:
        yield
    except (BaseError, OSError) as error:
        raise _refusal(where, error) or _failure(where, error, failure) from error


@contextmanager
def unknown(where: str) -> Iterator[None]:
    """Raise `IndeterminateError` for a failed read that would have told the outcome of a put."""
    try:
        yield
    except (DeterminateError, AccessDeniedError, NoBucketError) as error:
        raise IndeterminateError(where, error.cause) from error


def _failure(
    where: str, error: Exception, failure: type[DeterminateError | IndeterminateError]
) -> KVStoreError:
    said = str(error).partition("\n\nDebug source")[0]
    if (number := _OS_ERROR.search(said)) is not None:
        cause = OSError(int(number[1]), first_line(error))
        is_unknown = failure is IndeterminateError
        return translate_os_error(where, cause) if is_unknown else not_done(where, cause)
    if _PASSING.search(said):
        return failure(where, first_line(error))
    remedy = "repair the storage; acknowledged writes stand"
    return StorageError(f"{where} failed: {first_line(error)}", remedy)


def _refusal(where: str, error: Exception) -> AccessDeniedError | NoBucketError | None:
    """The error of our tree if another attempt would meet `error` again, else None."""
    text = first_line(error)
    if _METADATA_SERVICE in text:
        return AccessDeniedError(where, f"no credentials were found ({text})", _CREDENTIALS)
    if _NO_BUCKET.search(str(error)) is not None:
        return NoBucketError(where, text)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return AccessDeniedError(where, text, _CREDENTIALS)
    # For an object 404 is no error: it is not there. For a list, the bucket is not there.
    if "404 Not Found" in text:
        return NoBucketError(where, text)
    return None


def first_line(error: BaseException) -> str:
    """The message of obstore without its debug output."""
    return str(error).partition("\n")[0]
