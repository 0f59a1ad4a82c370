"""The stored rows of one import, found by its keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from kvstore.codec.keys import require_entry
from kvstore.codec.ordered import TERMINATOR, escape
from kvstore.engine.api import Engine
from kvstore.limits import SCAN_CHUNK_BYTES


class ImportedRow(NamedTuple):
    """A row of an import. `stored` is its key in `data`."""

    key: bytes
    stored: bytes
    value: bytes

    @property
    def kind(self) -> bytes:
        """The kind of the row: a value or a tombstone."""
        return self.stored[-1:]


def imported_entries(
    engine: Engine, keys: Iterable[bytes], reference: bytes, *, rows_max: int
) -> Iterator[list[ImportedRow]]:
    """The rows that an import still has among `keys`, which ascend, in chunks of at most `rows_max`
    rows, or fewer where values are large. One seek a key. No reader is open between chunks."""
    waiting = iter(keys)
    while True:
        asked = 0
        rows: list[ImportedRow] = []
        size = 0
        ticket, reader = engine.borrow()
        for key in islice(waiting, rows_max):
            asked += 1
            escaped = escape(key)
            stem = escaped + TERMINATOR + reference
            reader.seek(stem)
            stored = reader.key()
            if stored is None:
                engine.check(reader)
            elif stored.startswith(stem):
                require_entry(stored, escaped)
                rows.append(ImportedRow(key, stored, value := reader.value()))
                size += len(value)
                if size > SCAN_CHUNK_BYTES:
                    break
        engine.give_back(ticket, reader)
        if not asked:
            return
        if rows:
            yield rows
