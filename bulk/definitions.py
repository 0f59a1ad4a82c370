"""The definitions of tables by which the rows of an import were encoded.

Invariants
1. A row is added only while the definition that encoded it is the newest one of its table. So each
   added row has an entry in every index, and a layout that the table knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvstore.errors import ImportRefusedError, UsageError
from kvstore.store import Store
from kvstore.tables import TableCodec
from kvstore.tables.definition import Definition


class EncodedBy(NamedTuple):
    """The definition of a table that encoded rows: its revision, and the SHA-256 of its bytes."""

    table: str
    revision: int
    digest: str

    @classmethod
    def of(cls, codec: TableCodec) -> EncodedBy:
        """The definition of a codec."""
        return cls.of_stored(codec.definition.name, codec.stored)

    @classmethod
    def of_stored(cls, name: str, stored: bytes) -> EncodedBy:
        """The definition of a table in its stored form."""
        revision = Definition.from_bytes(name, stored).revision
        return cls(name, revision, hashlib.sha256(stored).hexdigest())


def require_definitions(
    store: Store, tables: Iterable[EncodedBy], where: str
) -> list[Callable[[], None]]:
    """Raise `ImportRefusedError` unless each of `tables` has that very definition in the store.

    Returns checks for the commit, each of which looks again. Raises `UsageError` for a table that
    takes no import.
    """
    checks = []
    for made in tables:
        remedy = "build it again from the rows; a backup: restore it into a new store"
        try:
            table = store.table(made.table)
        except UsageError as error:
            problem = f"it has rows of a table: {error.what}"
            raise ImportRefusedError(where, problem, remedy) from error
        target = table.import_target()
        found = EncodedBy.of(target.codec)
        if found != made:
            differs = f"at revision {found.revision}, and its rows were made at {made.revision}"
            if found.revision == made.revision:
                differs = "not the table of its rows: it has other columns or indexes"
            raise ImportRefusedError(where, f"table {made.table!r} is {differs}", remedy)
        checks.append(target.check)
    return checks
