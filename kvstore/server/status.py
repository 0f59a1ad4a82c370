"""The HTTP status of each error: for proxies and people. Clients go by the class in the body.

400 and 413 say that the request is not as the document of the server describes it; 404 that it
names something that is not there; 409 that the state of the store refuses it.
"""

from __future__ import annotations

from typing import Final

from kvstore.errors import (
    AccessDeniedError,
    ClosedError,
    ConflictError,
    DependencyError,
    FencedError,
    HistoryGoneError,
    HistoryHeldError,
    KeyConflictError,
    KVStoreError,
    NotACounterError,
    NotFoundError,
    NotUniqueError,
    NotYetWrittenError,
    OutOfSpaceError,
    PreconditionError,
    RetryableError,
    TableAlteredError,
    UsageError,
)
from kvstore.server.changesets import UnknownChangesetError


class RequestError(UsageError):
    """A request that HTTP has a status of its own for. For clients it is a `UsageError`. `allow`
    names the methods of a path, where the request came by another one."""

    def __init__(self, what: str, remedy: str, *, status: int, allow: str = "") -> None:
        super().__init__(what, remedy)
        self.status, self.allow = status, allow


_STATUS: Final[tuple[tuple[type[KVStoreError], int], ...]] = (
    (AccessDeniedError, 403),
    (UnknownChangesetError, 404),
    (NotFoundError, 404),
    (ClosedError, 503),
    (NotACounterError, 409),
    (NotUniqueError, 409),
    (KeyConflictError, 409),
    (UsageError, 400),
    (PreconditionError, 412),
    (ConflictError, 409),
    (DependencyError, 409),
    (HistoryHeldError, 409),
    (TableAlteredError, 409),
    (RetryableError, 503),
    (HistoryGoneError, 410),
    (NotYetWrittenError, 425),
    (FencedError, 409),
    (OutOfSpaceError, 507),
)


def status_of(error: KVStoreError) -> int:
    """The status: 500 for damage and for failures of storage."""
    return error.status if isinstance(error, RequestError) else status_of_class(type(error))


def status_of_class(kind: type[KVStoreError]) -> int:
    """The status of the errors of a class."""
    return next((status for each, status in _STATUS if issubclass(kind, each)), 500)
