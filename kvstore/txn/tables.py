"""The tables of a store, imported at their first use: a process without tables needs no Arrow."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

from kvstore.parts import Parts

if TYPE_CHECKING:
    from kvstore.tables.catalogue import Catalogue
    from kvstore.tables.table import Table


class WithTables:
    """Has the catalogue of the tables of one store, which is made when it is first asked for."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._made: Catalogue | None = None
        self._making = Lock()

    @property
    def catalogue(self) -> Catalogue:
        """The tables of the store."""
        if self._made is None:
            from kvstore.tables.catalogue import Catalogue, StoreDefinitions

            with self._making:
                if self._made is None:
                    moves = self._parts.committer.is_following
                    self._made = Catalogue(StoreDefinitions(self._parts), moves=moves)
        return self._made


def table_of(transaction: Any, catalogue: Catalogue, name: str) -> Table:
    """The table `name`, read and written by a transaction."""
    from kvstore.tables.sources import TransactionRows
    from kvstore.tables.table import Table

    rows = TransactionRows(transaction, catalogue)
    rows.codec(name)
    return Table(name, rows, rows)
