"""The tables of a store: their definitions at each time, and how they are made and altered.

A definition is a value under a key of the store. Its history is the history of the table's schema,
so a read as of a time sees the columns of that time.

Invariants
1. A row is committed only while the definition by which it was made is the newest one: the commit
   looks under its lock. So a new index misses no row.
2. The numbers of tables differ: a transaction that makes a table has read all definitions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import pyarrow as pa

from kvstore.codec.tuples import desc
from kvstore.errors import ConflictError, TableAlteredError, UsageError
from kvstore.mvcc import Version
from kvstore.parts import Parts
from kvstore.reserve import CATALOGUE
from kvstore.span import Span
from kvstore.tables.codec import TableCodec
from kvstore.tables.definition import Definition
from kvstore.tables.evolve import (
    Alteration,
    IndexColumns,
    alter,
    define,
    require_free_names,
    require_name,
    require_same,
)
from kvstore.tables.space import TABLE_NUMBER_MAX, definition_key, name_of


class StoreDefinitions:
    """The definitions in a store."""

    def __init__(self, parts: Parts) -> None:
        self._versions, self._reads = parts.versions, parts.reads

    def history(self, key: bytes) -> Sequence[Version]:
        upto = self._reads.at(None)
        versions = self._versions.history(key)
        # A commit under way may have written versions that it has not shown yet.
        return [version for version in versions if version.timestamp <= upto]

    def scan(self, *, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        span = Span.of_prefix(prefix)
        chunks = self._reads.read(None, span, lambda at: self._versions.scan(span, at))
        return chain.from_iterable(zip(*chunk, strict=True) for chunk in chunks)


class Definitions(Protocol):
    """The reads by which a store or a collection finds definitions."""

    def history(self, key: bytes) -> Sequence[Version]:
        """All kept versions of `key`, newest first."""
        ...

    def scan(self, *, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Live keys and values now."""
        ...


class CatalogueTransaction(Protocol):
    """The calls of a transaction that makes or alters a table."""

    def scan(self, *, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Live keys and values, which count as read."""
        ...

    def get(self, key: bytes) -> bytes | None:
        """A value, which counts as read."""
        ...

    def put_rows(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set keys of tables."""
        ...


class Catalogue:
    """The definitions that one reader sees, kept in memory once they were read."""

    def __init__(self, reader: Definitions, *, moves: Callable[[], bool] = lambda: False) -> None:
        """`moves` tells whether definitions change without `forget`, as in a replica."""
        self._reader, self._moves = reader, moves
        self._lock = threading.Lock()
        self._known: dict[str, list[tuple[int, TableCodec | None]]] = {}
        self._decoded: dict[str, dict[bytes, TableCodec]] = {}
        """The definitions that were read last, by their bytes: decoding one takes up to 0.3 ms, and
        a table that was altered often has many."""
        self._numbers: dict[bytes, tuple[bytes, int]] = {}
        """The number of each table at the last making of one, beside the definition it is from."""
        self._turn = 0
        self._changing = 0

    def names(self) -> list[str]:
        """The tables, by name."""
        return [name_of(key) for key, _ in self._reader.scan(prefix=CATALOGUE)]

    def codec(self, name: str, as_of: int | None = None) -> TableCodec:
        """The definition of a table as of a time, and its oldest one for a time before it. Raises
        `UsageError` where there is no such table."""
        try:
            versions = self._known.get(name)
        except TypeError as error:  # a list
            raise UsageError(f"there is no table {name!r}", self._hint()) from error
        if versions is None or self._changing or self._moves():
            versions = self._load(name)
        found: TableCodec | None = None
        for at, codec in versions:
            found = codec or found
            if as_of is None or at <= as_of:
                break
        if found is None:
            raise UsageError(f"there is no table {name!r}", self._hint())
        return found

    def number_free(self, stored: Iterable[tuple[bytes, bytes]]) -> int:
        """A number that none of these definitions has. Decodes the definitions that came since the
        call before."""
        known, numbers = self._numbers, {}
        for key, value in stored:
            found = known.get(key)
            if found is None or found[0] != value:
                found = value, Definition.from_bytes(name_of(key), value).number
            numbers[key] = found
        self._numbers = numbers
        return max((number for _, number in numbers.values()), default=0) + 1

    def forget(self, name: str) -> None:
        """Read the definitions of a table again when they are asked for."""
        with self._lock:
            self._turn += 1
            self._known.pop(name, None)

    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Keep no definition in memory while one is committed: a row by the new one may be read
        right behind the commit."""
        with self._lock:
            self._changing += 1
        try:
            yield
        finally:
            self.forget(name)
            with self._lock:
                self._changing -= 1

    def _load(self, name: str) -> list[tuple[int, TableCodec | None]]:
        turn = self._turn
        known = self._decoded.get(name, {})
        versions: list[tuple[int, TableCodec | None]] = []
        for _, at, stored in self._reader.history(definition_key(require_name(name))):
            codec = None if stored is None else known.get(stored)
            if codec is None and stored is not None:
                codec = TableCodec(Definition.from_bytes(name, stored))
            versions.append((at, codec))
        self._decoded[name] = {codec.stored: codec for _, codec in versions if codec}
        with self._lock:
            if turn == self._turn and not self._changing and versions:  # else one came meanwhile
                self._known[name] = versions
        return versions

    def _hint(self) -> str:
        names = self.names()
        return f"there are {', '.join(names[:20])}" if names else "make it: table(name, schema=...)"


def make(
    transaction: CatalogueTransaction,
    name: str,
    schema: pa.Schema,
    key: str | desc | Sequence[str | desc],
    indexes: Mapping[str, IndexColumns] | None,
    event_time: str | None,
    *,
    number_free: Callable[[Iterable[tuple[bytes, bytes]]], int],
) -> None:
    """Make a table, or raise `UsageError` unless it is there and the same. Costs a pass over all
    definitions if it is not there; `number_free` is the method of `Catalogue`."""
    has_indexes, has_event_time = indexes is not None, event_time is not None
    stored = transaction.get(definition_key(require_name(name)))
    if stored is not None:
        known = Definition.from_bytes(name, stored)
        wanted = define(name, known.number, schema, key, indexes, event_time)
        require_same(known, wanted, has_indexes=has_indexes, has_event_time=has_event_time)
        return
    number = number_free(transaction.scan(prefix=CATALOGUE))
    if number > TABLE_NUMBER_MAX:
        raise UsageError(f"{number} tables are too many", "make another store")
    wanted = define(name, number, schema, key, indexes, event_time)
    require_free_names(wanted, wanted.by_name)
    transaction.put_rows([definition_key(name)], [wanted.to_bytes()])


def change(
    begin: Callable[[], Any], seen: Definition, alteration: Alteration | Callable[[Definition], Any]
) -> None:
    """Alter a table whose definition is `seen`, and delete the entries of dropped indexes. Raises
    `TableAlteredError` if the table has another definition."""
    name = seen.name
    try:
        with begin() as transaction:
            stored = transaction.get(definition_key(name))
            if stored is None or not _is_definition(stored, seen):
                raise TableAlteredError(name)
            if isinstance(alteration, Alteration):
                altered = alter(seen, alteration)
            else:
                altered = alteration(seen)
            transaction.put_rows([definition_key(name)], [altered.to_bytes()])
            transaction.delete_rows((), _dropped(seen, altered))
    except ConflictError as error:
        raise TableAlteredError(name) from error


def _is_definition(stored: bytes, seen: Definition) -> bool:
    """Decoding costs three times as much as encoding, where a table has many layouts."""
    return stored == seen.to_bytes() or Definition.from_bytes(seen.name, stored) == seen


def _dropped(before: Definition, after: Definition) -> list[tuple[bytes, bytes]]:
    """The spans of the entries of indexes that an alteration drops."""
    kept = {index.number for index in after.indexes}
    if all(index.number in kept for index in before.indexes):
        return []
    codec = TableCodec(before)
    spans = [
        Span.of_prefix(codec.index_codec(index).prefix)
        for index in before.indexes
        if index.number not in kept
    ]
    return [(span.start, span.end) for span in spans if span.end is not None]
