"""The versioned undo of a span: new versions that restore the state at an earlier time.

A revert removes no history: readers of history see one more commit. It finds the changes since then
through the change index, or by a pass over the span where that costs less. It is one commit and
therefore bounded: at most `REVERT_ROWS_MAX` keys and `BATCH_BYTES_MAX` bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from kvstore.changes import Change
from kvstore.errors import ConflictError, UsageError
from kvstore.limits import REVERT_ATTEMPTS, REVERT_ROWS_MAX
from kvstore.mvcc import Versions
from kvstore.span import Span
from kvstore.timestamp import Timestamp
from kvstore.txn.transaction import Transaction


def revert_range(
    begin: Callable[[], Transaction],
    changed: Callable[[int], Iterator[Change]],
    versions: Versions,
    span: Span,
    to: int,
) -> Timestamp | None:
    """Restore the state of `span` at `to`, at one new timestamp; None if the state is the same.

    `changed(upto)` gives the latest changes of the span in `(to, upto]`. The revert starts again if
    another commit writes into the span meanwhile, and raises `ConflictError` if that happens too
    often.
    """

    def once() -> Timestamp | None:
        with begin() as transaction:
            if to < transaction.read_at:
                transaction.require_unchanged(span)
                restore_keys(transaction, changed(transaction.read_at), versions, to)
        return transaction.timestamp

    for _ in range(REVERT_ATTEMPTS - 1):
        with suppress(ConflictError):
            return once()
    return once()


def restore_keys(
    transaction: Transaction, changes: Iterator[Change], versions: Versions, to: int
) -> None:
    """Write, in `transaction`, the value that each changed key had at `to`.

    Raises `UsageError` for more than `REVERT_ROWS_MAX` keys. Costs two look-ups for each changed
    key.
    """
    rows = 0
    for key in _candidates(changes, versions, to):
        old, new = versions.get(key, to), versions.get(key, transaction.read_at)
        if old == new:
            continue
        if old is None:
            transaction.delete(key)
        else:
            transaction.put(key, old)
        rows += 1
        if rows > REVERT_ROWS_MAX:
            raise UsageError(
                f"more than {REVERT_ROWS_MAX} keys changed since {to}",
                "revert smaller spans, one after the other",
            )


def _candidates(changes: Iterator[Change], versions: Versions, to: int) -> Iterator[bytes]:
    """Keys that may differ from their state at `to`: written keys, and keys under range deletes."""
    for change in changes:
        if change.op != "delete_range":
            yield change.key
            continue
        for keys, _ in versions.scan(Span(change.key, change.end_key), to):
            yield from keys
