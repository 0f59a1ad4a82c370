"""Transactions of a client: reads at one time of the server, and a commit that the server checks.

The server knows nothing of a transaction before its commit, which brings the reads along. So a
client that goes away leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstore.client import calls, streams
from kvstore.client.pool import Pool
from kvstore.client.writes import SentWriteSet
from kvstore.commit import Durability, Expires, sent_expiry
from kvstore.mvcc import WriteSet
from kvstore.span import Span
from kvstore.tables.catalogue import Catalogue
from kvstore.timestamp import Timestamp
from kvstore.txn import ReadSet, Transaction


class RemoteVersions:
    """The versions of a served store."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`."""
        return self._pool.send(calls.get(key, as_of))

    def scan(
        self, span: Span, as_of: int, *, reverse: bool
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Live keys and values of a span at `as_of`, chunk by chunk."""
        for batch in streams.rows(self._pool, calls.scan(span, as_of, reverse, None, None)):
            yield batch.column(0).to_pylist(), batch.column(1).to_pylist()


class RemoteTransactions:
    """Begins and commits the transactions of one client."""

    write_set: Final = SentWriteSet

    def __init__(self, pool: Pool, catalogue: Catalogue) -> None:
        self._pool, self.catalogue = pool, catalogue
        self.versions = RemoteVersions(pool)

    def due(self, expires: Expires) -> int:
        """See `sent_expiry`: a client does not know the time of the store."""
        return sent_expiry(expires)

    def narrow(self, span: Span) -> Span:
        """The span as it is: the server leaves tables out."""
        return span

    def begin(self, durability: Durability | None) -> Transaction:
        """A transaction at the newest complete time of the server. One round trip."""
        transaction = Transaction(self, 0, durability=durability)
        transaction.read_at = self._pool.send(calls.newest())
        return transaction

    def commit(
        self,
        writes: WriteSet,
        reads: ReadSet,
        read_at: int,
        pin: int,
        *,
        durability: Durability | None,
    ) -> Timestamp:
        """See `Transactions.commit`."""
        assert isinstance(writes, SentWriteSet), "write_set says so"
        return self._pool.send(calls.batch(writes, durability, reads, read_at))

    def end(self, pin: int) -> None:
        """The server has nothing to end."""

    def abandon(self, pin: int) -> None:
        """The server has nothing to end."""
