"""The keys of small imports, so that work on their rows costs the rows, and not the keys between
them.

The files of an import span much of the key space, in which live data may be a million times as
large. GC, settling and the change index therefore look up the rows of a small import by its list.

    import-keys/<id, 16 hex>  := keys [hex], ascending

Invariants
1. A list names every row of its import: it was read from the files, and its length is the number of
   rows. The batch that changes the rows of an import changes its list.
2. The list is written together with the record of the import, and goes together with it. It is not
   held in memory.
3. An import without a list is read by a pass over its spans: a large one, or one with long keys.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Final

from kvstore.codec.json import JsonObject
from kvstore.codec.keys import TAIL_BYTES
from kvstore.codec.ordered import unframe
from kvstore.engine.api import WriteBatch
from kvstore.engine.sorted_file import key_blocks_of
from kvstore.errors import CorruptionError
from kvstore.imports.record import ImportRecord
from kvstore.imports.stored import UNCHANGED, RowChanges
from kvstore.limits import IMPORT_KEYS_BYTES_MAX
from kvstore.loops.blocks import referring_keys
from kvstore.meta import Meta

KEYS_PREFIX: Final = "import-keys/"


class KeyLists:
    """The key lists of one store."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta

    def of(self, import_id: int) -> list[bytes] | None:
        """The keys of an import, ascending. None if it has no list."""
        record = self._meta.read(keys_name(import_id))
        return None if record is None else read_keys(record)

    def stage(
        self, batch: WriteBatch, record: ImportRecord, found: Collection[bytes] | None
    ) -> None:
        """Add the list of the keys `found` in the files of an import to an engine batch.

        Adds none if the import is large, or if files of a stranger have other rows than they say,
        or have a key twice.
        """
        if found is None or not record.is_small or not len(found) == len(set(found)) == record.rows:
            return
        if sum(map(len, found)) <= IMPORT_KEYS_BYTES_MAX:
            keys = [key.hex() for key in sorted(found)]
            self._meta.stage(batch, keys_name(record.import_id), {"keys": keys})

    def amend(self, batch: WriteBatch, record: ImportRecord, changes: RowChanges) -> None:
        """Bring the list of an import, if it has one, to the rows that it has with `changes`."""
        keys = self.of(record.import_id) if changes != UNCHANGED else None
        if keys is not None:
            gone = {unframe(stored[:-TAIL_BYTES]) for stored in changes.left_out}
            self.stage_delete(batch, record.import_id)
            self.stage(batch, record, [*({*keys} - gone), *changes.deleted])

    def stage_delete(self, batch: WriteBatch, import_id: int) -> None:
        """Add the removal of a list to an engine batch."""
        self._meta.stage_delete(batch, keys_name(import_id))


class FoundKeys:
    """The keys of an import, read from its sorted files one after the other."""

    def __init__(self, record: ImportRecord) -> None:
        self._reference = record.reference
        self._rows = record.rows
        self._room = IMPORT_KEYS_BYTES_MAX
        self.keys: list[bytes] | None = [] if record.is_small else None
        """The keys so far; a forged import may have any. None once it is known that the import gets
        no list."""

    def read(self, file: Path | str) -> None:
        """Add the keys of a file. A pass over it, unless the import gets no list. Raises
        `CorruptionError` at damage."""
        if self.keys is None:
            return
        with closing(key_blocks_of(file)) as blocks:
            for stored in blocks:
                try:
                    found = referring_keys(stored, self._reference)
                except ValueError as error:
                    raise CorruptionError(str(file), str(error)) from error
                self._rows -= len(stored)
                self._room -= sum(map(len, found))
                if self._rows < 0 or self._room < 0:
                    self.keys = None
                    return
                self.keys += found


def read_keys(record: JsonObject) -> list[bytes]:
    """The keys of a list's record. Raises `CorruptionError` unless they ascend."""
    keys = [record.unhexed(key, name="keys") for key in record.items_of("keys", str)]
    if any(before >= after for before, after in pairwise(keys)):
        raise record.damaged("its keys do not ascend")
    return keys


def keys_name(import_id: int) -> str:
    """The name of the list of an import."""
    return f"{KEYS_PREFIX}{import_id:016x}"
