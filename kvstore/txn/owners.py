"""The owners of transactions: a store in this process, or a client of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from kvstore.commit import Durability, Expires
from kvstore.mvcc import WriteSet
from kvstore.span import Span
from kvstore.timestamp import Timestamp
from kvstore.txn.reads import ReadSet

if TYPE_CHECKING:
    from kvstore.tables.catalogue import Catalogue


class ReadsVersions(Protocol):
    """The versions that a transaction reads."""

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`."""
        ...

    def scan(
        self, span: Span, as_of: int, *, reverse: bool
    ) -> Iterator[tuple[Sequence[bytes], Sequence[bytes]]]:
        """Live keys and values of a span at `as_of`, chunk by chunk."""
        ...


class OwnsTransactions(Protocol):
    """The store of a transaction: one in this process, or a client of one."""

    @property
    def versions(self) -> ReadsVersions:
        """The versions that are read."""
        ...

    @property
    def write_set(self) -> type[WriteSet]:
        """The kind of write sets that the store takes."""
        ...

    @property
    def catalogue(self) -> Catalogue:
        """The tables of the store."""
        ...

    def due(self, expires: Expires) -> int:
        """The time at which a key expires. Raises `UsageError` for one that does not lie ahead."""
        ...

    def narrow(self, span: Span) -> Span:
        """A span without the reserved keys: see `kvstore.reserve`."""
        ...

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
        ...

    def end(self, pin: int) -> None:
        """See `Transactions.end`."""
        ...

    def abandon(self, pin: int) -> None:
        """See `Transactions.abandon`."""
        ...
