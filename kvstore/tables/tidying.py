"""Entries of indexes that no row fits any more: imports leave them behind, and GC deletes them.

    tables-tidied := timestamp     entries that imports up to here left behind are gone
                     due, place    of a walk that has not ended: the last import, the last entry

Invariants
1. An entry is deleted only if no kept version of its row fits it: a revert of an import brings an
   older version back, which needs its entry.
2. The deletion reads the row in its transaction, so that nobody sets or reverts the row meanwhile.
3. A walk looks at `INDEX_CHUNK_ROWS` entries at once. After a kill the next walk continues there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from kvstore.arrow import binary_array
from kvstore.limits import INDEX_CHUNK_ROWS
from kvstore.meta import Meta
from kvstore.parts import Parts
from kvstore.span import Span
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.codec import TableCodec
from kvstore.tables.definition import Index
from kvstore.tables.finding import fitting
from kvstore.tables.sources import TransactionRows
from kvstore.tables.space import table_prefix

_TIDIED: Final = "tables-tidied"


class Tidying:
    """Deletes the index entries that no row of a store fits."""

    def __init__(
        self, parts: Parts, transact: Callable[[Callable[[Any], int]], int], catalogue: Catalogue
    ) -> None:
        self._versions, self._imports = parts.versions, parts.imports
        self._committer = parts.committer
        self._meta = Meta(parts.versions.engine)
        self._transact, self._catalogue = transact, catalogue

    def run(self, since: int, require_running: Callable[[], None] = lambda: None) -> int:
        """Delete the entries that imports left behind, if they were added up to `since` and can no
        longer be reverted; returns the number of entries. `require_running` raises to end the walk.

        Nothing to do costs a look at each import. Otherwise a look-up for each entry of the tables
        that were imported into.
        """
        if self._committer.policy.commits is not None:  # a replica gets the deletions
            return 0
        noted: Mapping[str, Any] = self._meta.read(_TIDIED) or {}
        mark = int(noted.get("timestamp", 0))
        records = [
            record
            for record in self._imports.every()
            if record.added is not None and mark < record.added <= since
        ]
        names = self._catalogue.names() if records else []
        codecs = [self._catalogue.codec(name) for name in names]
        spans = [span for record in records for span in record.spans]
        reached = [codec for codec in codecs if codec.definition.indexes and _meets(codec, spans)]
        if not reached:
            return 0
        due = max(record.added or 0 for record in records)
        place = bytes.fromhex(noted["place"]) if noted.get("due") == due else b""
        deleted = 0
        for codec in sorted(reached, key=lambda codec: codec.key.prefix):
            for index in sorted(codec.definition.indexes, key=lambda index: index.number):
                after = max(place, codec.index_codec(index).prefix)

                def note(last: bytes) -> None:
                    self._note({"timestamp": mark, "due": due, "place": last.hex()})
                    require_running()

                deleted += self.index(codec, index, after, note)
        self._note({"timestamp": due})
        return deleted

    def table(self, name: str) -> int:
        """Delete the entries of a table that no kept version of a row fits; see `Table.tidy`."""
        codec = self._catalogue.codec(name)
        return sum(
            self.index(codec, index, codec.index_codec(index).prefix, lambda _: None)
            for index in codec.definition.indexes
        )

    def index(
        self, codec: TableCodec, index: Index, after: bytes, note: Callable[[bytes], None]
    ) -> int:
        """Delete the entries of an index from `after` on. `note` is called with the end of each
        chunk."""
        end = Span.of_prefix(codec.index_codec(index).prefix).end
        deleted = 0
        while end is None or after < end:
            at = self._committer.upper - 1
            entries = self._entries(Span(after, end), at)
            if not entries:
                break
            _, fits = fitting(codec, _At(self._versions, at), index, binary_array(entries))
            suspects = [entry for entry, each in zip(entries, fits, strict=True) if not each]
            if suspects:
                deleted += self._delete(codec.definition.name, index, suspects)
            after = entries[-1] + b"\x00"
            note(after)
        return deleted

    def _entries(self, span: Span, at: int) -> list[bytes]:
        chunks = self._versions.scan(span, at, limit=INDEX_CHUNK_ROWS)
        return list(islice((key for keys, _ in chunks for key in keys), INDEX_CHUNK_ROWS))

    def _delete(self, name: str, index: Index, entries: Sequence[bytes]) -> int:
        """Delete each of `entries` that no kept version of its row fits."""

        def body(transaction: Any) -> int:
            codec = TransactionRows(transaction, self._catalogue).codec(name)
            if index not in codec.definition.indexes:
                return 0
            ends = codec.index_codec(index).part_ends(binary_array(entries), len(index.parts))
            stale = []
            for entry, end in zip(entries, ends, strict=True):
                key = codec.key.prefix + entry[end:]
                transaction.get(key)  # counts as read
                if not self._fits_once(codec, index, key, entry):
                    stale.append(entry)
            transaction.delete_rows(stale)
            return len(stale)

        return self._transact(body)

    def _fits_once(self, codec: TableCodec, index: Index, key: bytes, entry: bytes) -> bool:
        since = self._committer.since
        for _, at, value in self._versions.history(key):
            if value is not None and entry in codec.entries_of(key, value):
                return True
            if at <= since:  # older versions are garbage
                break
        return False

    def _note(self, fields: dict[str, Any]) -> None:
        with self._committer.lock:
            self._committer.write_meta(
                lambda batch: self._meta.stage(batch, _TIDIED, fields), durable=False
            )


class _At:
    """The values of rows at one time."""

    def __init__(self, versions: Any, at: int) -> None:
        self._versions, self._at = versions, at

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys."""
        return [self._versions.get(key, self._at) for key in keys]


def _meets(codec: TableCodec, spans: Iterable[Span]) -> bool:
    whole = Span.of_prefix(table_prefix(codec.definition.number))
    return any(span.intersect(whole.start, whole.end) is not None for span in spans)
