"""The HTTP status of each error: for proxies and people. Clients go by the class in the body."""

from __future__ import annotations

from typing import Final

from kvstore.errors import (
    AccessDeniedError,
    ClosedError,
    ConflictError,
    FencedError,
    HistoryGoneError,
    KVStoreError,
    NotYetWrittenError,
    OutOfSpaceError,
    PreconditionError,
    RetryableError,
    UsageError,
)

_STATUS: Final[tuple[tuple[type[KVStoreError], int], ...]] = (
    (AccessDeniedError, 403),
    (ClosedError, 503),
    (UsageError, 400),
    (PreconditionError, 412),
    (ConflictError, 409),
    (RetryableError, 503),
    (HistoryGoneError, 410),
    (NotYetWrittenError, 425),
    (FencedError, 409),
    (OutOfSpaceError, 507),
)


def status_of(error: KVStoreError) -> int:
    """The status: 500 for damage and for failures of storage."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
