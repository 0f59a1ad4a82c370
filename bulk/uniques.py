"""Unique indexes and imports: no two rows have the same values in a unique index afterwards.

The entries of the import and the entries of the store are read side by side, in the order of the
index. Two entries with the same values are a suspicion, because an entry is a hint: the rows
decide. For a key in both, the row of the import counts.

Invariants
1. The whole import is compared with the store at one time, before its files enter the store. Rows
   that are put later are compared under the commit lock, just before the import is added.
2. Memory holds two chunks of entries, whatever the number of rows that have the same values.
3. Entries with a null are passed: a null is equal to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import Self

from bulk.manifest import Manifest
from kvstore.arrow import binary_array
from kvstore.codec.keys import TAIL_BYTES, TOMBSTONE, VALUE, encode_reference, span_bounds
from kvstore.codec.ordered import frame, unframe
from kvstore.engine.loose import LooseFiles
from kvstore.errors import CorruptionError, ImportRefusedError
from kvstore.limits import SCAN_CHUNK
from kvstore.span import Span
from kvstore.store import Store
from kvstore.tables import TableCodec
from kvstore.tables.definition import Index
from kvstore.tables.exact import as_python
from kvstore.tables.writing import not_unique

_FIRST_KEYS: Final = 64
"""Entries of the store that are read at once where the import has few of the same values."""


class _Entry(NamedTuple):
    """An entry of an index: the bytes up to the end of its values, and the key of its row."""

    values: bytes
    row: bytes


class UniqueRows:
    """The check of the rows that one import brings to one table. Use it as a context manager."""

    def __init__(
        self,
        store: Store,
        codec: TableCodec,
        files: Sequence[Path],
        import_id: int,
        replaced: Sequence[Span] = (),
    ) -> None:
        """`files` are the staged files of the import, which deletes all other rows in the spans
        `replaced`."""
        self._replaced = replaced
        self._store, self._codec = store, codec
        self._where = str(files[0].parent) if files else "the import"
        self._reference = encode_reference(import_id)
        self._loose = LooseFiles(files)
        self._since = 0

    def require(self, as_of: int) -> None:
        """Raise `NotUniqueError` if a row of the import has the values of another row. Costs a pass
        over the entries of the import, and reads the entries of the store near them."""
        self._since = as_of
        for index in _unique(self._codec):
            whole = Span.of_prefix(self._codec.index_codec(index).prefix)
            stored = _Forward(self._store, whole, as_of)
            entries = self._staged_entries(index, whole)
            for values, found in groupby(entries, key=lambda entry: entry.values):
                behind, rows = len(values), self._codec.key.prefix
                known = (_Entry(values, rows + e[behind:]) for e in stored.beginning(values))
                self._require_one(index, values, chain(found, known), as_of)

    def __call__(self) -> None:
        """Raise `NotUniqueError` if a row that was put since `require` has the values of a row of
        the import. The caller holds the commit lock. Costs a look-up for each such row."""
        rows = Span.of_prefix(self._codec.key.prefix)
        changes = self._store.changes(self._since, None, rows.start, rows.end, order="time")
        for change in changes:
            if change.op != "put" or self._staged_row(change.key) is not None:
                continue
            row = self._row(change.key, None)  # None for one that is replaced
            for index in _unique(self._codec) if row is not None else ():
                for entry in self._entries(index, [self._codec.entries(index, row).to_pylist()]):
                    staged = self._staged_entries(index, Span.of_prefix(entry.values))
                    self._require_one(index, entry.values, chain([entry], staged), None)

    def close(self) -> None:
        """Release the files."""
        self._loose.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------

    def _require_one(
        self, index: Index, values: bytes, entries: Iterable[_Entry], as_of: int | None
    ) -> None:
        """Raise `NotUniqueError` if two rows that `entries` lead to have the same values."""
        holder, is_sure = b"", False
        for _, key in entries:
            if not holder or key == holder:
                holder = key
                continue
            is_sure = is_sure or self._fits(index, values, holder, as_of)
            if not is_sure:
                holder = key
            elif self._fits(index, values, key, as_of):
                self._refuse(index, key, holder, as_of)

    def _fits(self, index: Index, values: bytes, key: bytes, as_of: int | None) -> bool:
        """Whether the row of a key will have `values`."""
        row = self._row(key, as_of)
        if row is None:
            return False
        entry: bytes = self._codec.entries(index, row)[0].as_py()
        return entry.startswith(values)

    def _row(self, key: bytes, as_of: int | None) -> pa.RecordBatch | None:
        """The row that a key will have, as a batch of one row."""
        value = self._staged_row(key)
        if value is None and not any(key in span for span in self._replaced):
            value = self._store.get(key, as_of)
        if not value:  # deleted: a row has bytes
            return None
        return self._codec.decode(binary_array([key]), binary_array([value]), is_checked=False)

    def _staged_row(self, key: bytes) -> bytes | None:
        """The value that the import has for a key; b"" if it deletes the key."""
        stem = frame(key) + self._reference
        value = self._loose.get(stem + VALUE)
        return b"" if value is None and self._loose.get(stem + TOMBSTONE) is not None else value

    def _staged_entries(self, index: Index, span: Span) -> Iterator[_Entry]:
        """The entries of the import. Raises `ImportRefusedError` for bytes that are none."""
        try:
            yield from self._entries(index, self._staged(span))
        except CorruptionError as error:
            problem = f"{error.where}: {error.problem}"
            raise ImportRefusedError(self._where, problem, "stage the import again") from error

    def _staged(self, span: Span) -> Iterator[list[bytes]]:
        """The keys that the import sets in a span."""
        start, end = span_bounds(span.start, span.end)
        for stored, _ in self._loose.rows(start, end):
            keys = [unframe(each[:-TAIL_BYTES]) for each in stored if each[-1:] == VALUE]
            yield [key for key in keys if span.end is None or key < span.end]

    def _entries(self, index: Index, pieces: Iterable[list[bytes]]) -> Iterator[_Entry]:
        """Entries of an index; an entry with a null is left out."""
        keys, parts = self._codec.index_codec(index), len(index.parts)
        prefix = len(self._codec.key.prefix)
        for piece in pieces:
            columns = keys.arrays(binary_array(piece))[:parts]
            whole = columns[0].is_valid()
            for column in columns[1:]:
                whole = pc.and_(whole, column.is_valid())
            rows = self._codec.row_keys(index, piece)
            for entry, row, is_whole in zip(piece, rows, whole.to_pylist(), strict=True):
                if is_whole:
                    yield _Entry(entry[: prefix - len(row) or None], row)

    def _refuse(self, index: Index, key: bytes, other: bytes, as_of: int | None) -> None:
        one, two = (key, other) if self._staged_row(key) else (other, key)  # the store's last
        batch = self._row(one, as_of)
        assert batch is not None, "it fits the values"
        names = self._codec.definition.parts_named(index.parts)
        values = [as_python(batch.column(name), 0) for name in names]
        raise not_unique(self._codec, index, values, two)


class _Forward:
    """The live keys of a span at one time, looked up prefix by prefix, each above the last. It
    reads on where the next prefix is near, and seeks where it is far."""

    def __init__(self, store: Store, span: Span, as_of: int) -> None:
        self._store, self._as_of, self._span = store, as_of, span
        self._keys: list[bytes] = []
        self._count = _FIRST_KEYS
        self._is_last = False

    def beginning(self, prefix: bytes) -> Iterator[bytes]:
        """The keys that begin with a prefix."""
        at = bisect_left(self._keys, prefix)
        if at == len(self._keys):
            self._read(prefix, is_near=False)
            at = 0
        while self._keys[at : at + 1] and self._keys[at].startswith(prefix):
            yield self._keys[at]
            at += 1
            if at == len(self._keys):
                self._read(self._keys[-1] + b"\x00", is_near=True)
                at = 0

    def _read(self, start: bytes, *, is_near: bool) -> None:
        if self._is_last:
            self._keys = []
            return
        self._count = min(4 * self._count, SCAN_CHUNK) if is_near else _FIRST_KEYS
        found = self._store.keys(start, self._span.end, as_of=self._as_of, limit=self._count)
        self._keys = list(found)
        self._is_last = len(self._keys) < self._count


def _unique(codec: TableCodec) -> list[Index]:
    return [index for index in codec.definition.indexes if index.is_unique]


def required_unique(
    held: ExitStack,
    store: Store,
    manifest: Manifest,
    files: Sequence[Path],
    as_of: int,
    replaced: Sequence[Span] = (),
) -> list[UniqueRows]:
    """Compare an import with the store at `as_of`, without the rows of the store in the spans that
    are `replaced`. Returns the checks of the commit, which `held` closes. Raises
    `NotUniqueError`."""
    checks = []
    for made in manifest.tables:
        codec = store.table(made.table).codec()
        if _unique(codec):
            rows = UniqueRows(store, codec, files, manifest.import_id, replaced)
            check = held.enter_context(rows)
            check.require(as_of)
            checks.append(check)
    return checks
