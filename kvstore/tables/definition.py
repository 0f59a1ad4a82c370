"""The definition of a table: its columns, its key, its indexes, and the layouts of its rows.

It is stored as JSON under a key of the store (`space.py`), so it has versions as rows do, and comes
with backups, restores and replicas.

    v              1
    number         of the table, in its keys
    revision       1, and one more with each change
    columns        id, name, type, is_nullable, and the stored bytes of a default, if any
    key            id of each key column, and whether it falls (greatest first)
    event_time     whether the last key column is the event time
    indexes        name, number, columns as in `key`, is_unique, is_whole
    layouts        of each schema number: id and type of each column, in the order of the row
    layout         the schema number of rows that are written now
    ids, index_numbers    the numbers that were given to columns and indexes so far

A dropped column leaves its id behind, so that a later column of the same name begins empty.

Invariants
1. A column of the key is never null, and its type changes no byte of stored keys.
2. A layout never changes. Each stored row names one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import pyarrow as pa

from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import CorruptionError, FormatVersionError, NotFoundError, UsageError
from kvstore.tables.kinds import Kind, kind_of, parse_type
from kvstore.tables.space import INDEX_NUMBER_MAX, TABLE_NUMBER_MAX

DEFINITION_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `default` is the stored form of the value that older rows get, None for null."""

    id: int
    name: str
    type: pa.DataType
    is_nullable: bool
    default: bytes | None = None

    @property
    def kind(self) -> Kind:
        """How its values are stored."""
        return kind_of(self.type)

    @property
    def field(self) -> pa.Field:
        """The column of an Arrow schema."""
        return pa.field(self.name, self.type, self.is_nullable)


@dataclass(frozen=True, slots=True)
class KeyPart:
    """A column of a key or an index. A falling one sorts the greatest value first."""

    id: int
    is_falling: bool = False


@dataclass(frozen=True, slots=True)
class Index:
    """An index. It is whole once it has an entry for each row."""

    name: str
    number: int
    parts: tuple[KeyPart, ...]
    is_unique: bool
    is_whole: bool


Layout = tuple[tuple[int, pa.DataType], ...]
"""Ids and types of the columns of a row, in the order of the row."""


@dataclass(frozen=True)
class Definition:
    """The definition of a table at one time. Compare two by `revision`."""

    name: str
    number: int
    revision: int
    columns: tuple[Column, ...]
    key: tuple[KeyPart, ...]
    has_event_time: bool
    indexes: tuple[Index, ...]
    layouts: tuple[Layout, ...]
    layout: int
    ids: int
    index_numbers: int

    @cached_property
    def by_name(self) -> dict[str, Column]:
        """The columns by name."""
        return {column.name: column for column in self.columns}

    @cached_property
    def by_id(self) -> dict[int, Column]:
        """The columns by id."""
        return {column.id: column for column in self.columns}

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns as an Arrow schema."""
        return pa.schema([column.field for column in self.columns])

    @cached_property
    def key_ids(self) -> frozenset[int]:
        """The ids of the columns of the key."""
        return frozenset(part.id for part in self.key)

    @property
    def key_columns(self) -> list[Column]:
        """The columns of the key, in the order of the key."""
        return [self.by_id[part.id] for part in self.key]

    @property
    def value_columns(self) -> list[Column]:
        """The columns that a row's value holds, in the order of the schema."""
        return [column for column in self.columns if column.id not in self.key_ids]

    @property
    def where(self) -> str:
        """The table in the words of an error."""
        return f"table {self.name!r}"

    def column(self, name: object) -> Column:
        """The column `name`. Raises `NotFoundError` where there is none."""
        found = self.by_name.get(name) if isinstance(name, str) else None
        if found is None:
            raise NotFoundError(
                f"{self.where} has no column {name!r}", f"it has {', '.join(self.by_name)}"
            )
        return found

    def index(self, name: object) -> Index:
        """The index `name`. Raises `NotFoundError` where there is none."""
        for index in self.indexes:
            if index.name == name:
                return index
        named = ", ".join(index.name for index in self.indexes) or "none"
        raise NotFoundError(f"{self.where} has no index {name!r}", f"its indexes: {named}")

    def parts_named(self, parts: Sequence[KeyPart]) -> list[str]:
        """The columns of a key or an index by name."""
        return [self.by_id[part.id].name for part in parts]

    def with_layout(self) -> Definition:
        """The definition with a layout of its columns as they are now, which may be an old one."""
        layout = tuple((column.id, column.type) for column in self.value_columns)
        if layout in self.layouts:
            return replace(self, layout=self.layouts.index(layout))
        return replace(self, layouts=(*self.layouts, layout), layout=len(self.layouts))

    # -- as bytes ---------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The stored form."""
        fields = {
            "v": DEFINITION_VERSION,
            "number": self.number,
            "revision": self.revision,
            "columns": [
                {
                    "id": column.id,
                    "name": column.name,
                    "type": str(column.type),
                    "is_nullable": column.is_nullable,
                    "default": None if column.default is None else column.default.hex(),
                }
                for column in self.columns
            ],
            "key": _parts_as_json(self.key),
            "event_time": self.has_event_time,
            "indexes": [
                {
                    "name": index.name,
                    "number": index.number,
                    "columns": _parts_as_json(index.parts),
                    "is_unique": index.is_unique,
                    "is_whole": index.is_whole,
                }
                for index in self.indexes
            ],
            "layouts": [
                {"ids": [id_ for id_, _ in layout], "types": [str(type_) for _, type_ in layout]}
                for layout in self.layouts
            ],
            "layout": self.layout,
            "ids": self.ids,
            "index_numbers": self.index_numbers,
        }
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, name: str, stored: bytes) -> Definition:
        """The definition of the table `name`. Raises `CorruptionError` for another shape,
        `FormatVersionError` for another version."""
        record = read_object(stored, where=f"the definition of table {name!r}")
        version = record.field("v", int)
        if version != DEFINITION_VERSION:
            raise FormatVersionError(record.where, found=version, supported=DEFINITION_VERSION)
        found = cls(
            name=name,
            number=record.integer("number", least=1, most=TABLE_NUMBER_MAX),
            revision=record.integer("revision", least=1),
            columns=tuple(map(_column, record.objects("columns"))),
            key=tuple(_parts(record, "key")),
            has_event_time=record.field("event_time", bool),
            indexes=tuple(map(_index, record.objects("indexes"))),
            layouts=tuple(map(_layout, record.objects("layouts"))),
            layout=record.integer("layout"),
            ids=record.integer("ids"),
            index_numbers=record.integer("index_numbers", most=INDEX_NUMBER_MAX),
        )
        found._require_sound(record)
        return found

    def _require_sound(self, record: JsonObject) -> None:
        ids = [column.id for column in self.columns]
        if len(set(ids)) < len(ids) or len(self.by_name) < len(ids) or not self.key:
            raise record.damaged("columns come twice, or there is no key")
        parts = [*self.key, *(part for index in self.indexes for part in index.parts)]
        if not {part.id for part in parts} <= set(ids):
            raise record.damaged("a key or an index has a column that is missing")
        if self.layout >= len(self.layouts):
            raise record.damaged("its layout is missing")
        types = dict(self.layouts[self.layout])
        if any(types.get(column.id) != column.type for column in self.value_columns):
            raise record.damaged("its layout does not fit its columns")


def _parts_as_json(parts: Sequence[KeyPart]) -> list[dict[str, Any]]:
    return [{"id": part.id, "is_falling": part.is_falling} for part in parts]


def _parts(record: JsonObject, name: str) -> Iterator[KeyPart]:
    for part in record.objects(name):
        yield KeyPart(part.integer("id"), part.field("is_falling", bool))


def _column(record: JsonObject) -> Column:
    default = None if record.get("default") is None else record.hexed("default")
    type_ = _type(record, record.text("type"))
    is_nullable = record.field("is_nullable", bool)
    column = Column(record.integer("id"), record.text("name"), type_, is_nullable, default)
    if default is not None and column.kind.width not in (0, len(default)):
        raise record.damaged(f"a default of {len(default)} bytes")
    return column


def _index(record: JsonObject) -> Index:
    return Index(
        record.text("name"),
        record.integer("number", least=1, most=INDEX_NUMBER_MAX),
        tuple(_parts(record, "columns")),
        record.field("is_unique", bool),
        record.field("is_whole", bool),
    )


def _layout(record: JsonObject) -> Layout:
    ids, types = record.items_of("ids", int), record.items_of("types", str)
    if len(ids) != len(types):
        raise record.damaged(f"{len(ids)} ids and {len(types)} types")
    return tuple((id_, _type(record, text)) for id_, text in zip(ids, types, strict=True))


def _type(record: JsonObject, text: str) -> pa.DataType:
    try:
        return _stored_type(text)
    except (ValueError, pa.ArrowException, UsageError) as error:
        raise CorruptionError(record.where, f"{error}") from error


@lru_cache(maxsize=1024)
def _stored_type(text: str) -> pa.DataType:
    """Kept, because each layout of a definition names the types of all its columns."""
    found = parse_type(text)
    kind_of(found)
    return found
