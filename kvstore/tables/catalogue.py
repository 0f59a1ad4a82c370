"""The tables of a store: their definitions at each time, and how they begin and change."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.codec.json import read_object
from kvstore.codec.tuples import desc
from kvstore.errors import Argument, ConflictError, NotFoundError, TableAlteredError, UsageError
from kvstore.limits import TABLE_COLUMNS_MAX, TABLE_LAYOUTS_MAX, TABLE_NAME_BYTES_MAX
from kvstore.mvcc import Version
from kvstore.tables.definition import (
    INDEX_NUMBER_MAX,
    TABLE_NUMBER_MAX,
    Column,
    Definition,
    Index,
    KeyPart,
    definition_key,
    is_instant,
    kind_of,
    name_of,
    progress_prefix,
    table_prefix,
)
from kvstore.tables.nested import canonical, is_nested
from kvstore.tables.row_codec import TableCodec, cell_bytes, default_value
from kvstore.timeline.parts import Parts
from kvstore.timeline.reserved import DEFINITIONS, NUMBERS

# --------------------------------------------------------------------------------------------------
# How tables begin and change: the definition of a new table, and the one after an alteration.
#
#     add         a column that may be null, or one with a default for rows that were written before
#     drop        a column that neither the key nor an index has
#     widen       a type that holds each value of the old one; a column that may be null from now on
#     add_index   an index whose entries of existing rows `Table.build_index` makes
#     drop_index
#     expires     the column that tells when rows expire that are written from now on; False: none
#
# Stored rows stay as they are. Everything else is refused by name, with `UsageError`.


class unique:  # noqa: N801  # reads as a keyword: indexes={"by_mail": unique("mail")}
    """The columns of an index in which no two rows have the same values. Rows with a null in one
    of these columns never conflict."""

    __slots__ = ("columns",)

    def __init__(self, *columns: str | desc) -> None:
        self.columns = columns


IndexColumns: TypeAlias = "str | desc | unique | Sequence[str | desc]"
Added: TypeAlias = "pa.DataType | pa.Field | tuple[pa.DataType | pa.Field, Any]"


@dataclass(frozen=True, slots=True)
class Alteration:
    """The arguments of `Table.alter`."""

    add: Mapping[str, Added] | None = None
    drop: Sequence[str] | str | None = None
    widen: Mapping[str, pa.DataType | pa.Field] | None = None
    add_index: Mapping[str, IndexColumns] | None = None
    drop_index: Sequence[str] | str | None = None
    expires: str | Literal[False] | None = None
    valid_to: str | Literal[False] | None = None


def define(
    name: str,
    number: int,
    schema: pa.Schema,
    key: str | desc | Sequence[str | desc],
    indexes: Mapping[str, IndexColumns] | None = None,
    event_time: str | None = None,
    expires: str | None = None,
    valid_to: str | None = None,
) -> Definition:
    """The definition of a new table. Its indexes are whole, because it has no rows."""
    where = f"table {require_name(name)!r}"
    if not isinstance(schema, pa.Schema):
        raise UsageError(f"{where}: schema is {type(schema).__name__}", "pass a pyarrow.Schema")
    columns = tuple(
        Column(at, field.name, canonical(field.type), field.nullable)
        for at, field in enumerate(schema)
    )
    _require_columns(columns, where)
    parts = list(_listed(key, where, "key"))
    if event_time is not None:
        _require_event_time(columns, event_time, parts, where)
        parts.append(desc(event_time))
    found = Definition(
        name=name,
        number=number,
        revision=1,
        columns=columns,
        key=(),
        has_event_time=event_time is not None,
        indexes=(),
        layouts=(),
        layout=0,
        ids=len(columns),
        index_numbers=0,
    )
    found = replace(found, key=_definition_parts(found, parts, "the key"))
    columns = tuple(
        replace(column, is_nullable=False) if column.id in found.key_ids else column
        for column in columns
    )
    found = _expiring(replace(found, columns=columns).with_layout(), expires)
    found = _ending(found, valid_to)
    return _with_indexes(found, _mapping(indexes, "indexes"), is_whole=True)


class TableArguments(NamedTuple):
    """The arguments of `Store.table` that make a table."""

    schema: pa.Schema
    key: list[str | desc]
    indexes: Mapping[str, IndexColumns]
    event_time: str | None
    expires: str | None
    valid_to: str | None


def arguments_of(definition: Definition) -> TableArguments:
    """The arguments that make a table with the columns, the key and the indexes of another."""
    key = named_parts(definition, definition.key)
    event_time = definition.key_columns[-1].name if definition.has_event_time else None
    indexes = {
        index.name: unique(*columns) if index.is_unique else columns
        for index in definition.indexes
        for columns in [named_parts(definition, index.parts)]
    }
    expires, end = definition.expiry_column, definition.end_column
    return TableArguments(
        definition.schema,
        key[:-1] if event_time else key,
        indexes,
        event_time,
        None if expires is None else expires.name,
        None if end is None else end.name,
    )


def named_parts(definition: Definition, parts: Sequence[KeyPart]) -> list[str | desc]:
    """Columns of a key or an index as a caller gives them."""
    return [
        desc(name) if part.is_falling else name
        for name, part in zip(definition.parts_named(parts), parts, strict=True)
    ]


def alter(definition: Definition, alteration: Alteration) -> Definition:
    """The definition after an alteration. Raises `UsageError` for one that cannot be, and for one
    that changes nothing."""
    found = _without_indexes(definition, _names(alteration.drop_index, "drop_index"))
    if alteration.expires is False:
        found = replace(found, expires=None)
    if alteration.valid_to is False:
        found = replace(found, valid_to=None)
    found = _without_columns(found, _names(alteration.drop, "drop"))
    found = _widened(found, _mapping(alteration.widen, "widen"))
    found = _with_columns(found, _mapping(alteration.add, "add"))
    found = _expiring(found, alteration.expires or None)
    end = found.end_column
    found = _ending(found, alteration.valid_to or (None if end is None else end.name))
    found = _with_indexes(found, _mapping(alteration.add_index, "add_index"), is_whole=False)
    if found == definition:
        raise UsageError(
            f"{definition.where}: nothing to alter",
            (
                "pass ",
                Argument("add"),
                ", ",
                Argument("drop"),
                ", ",
                Argument("widen"),
                ", ",
                Argument("add_index"),
                ", ",
                Argument("drop_index"),
                ", ",
                Argument("expires"),
                " or ",
                Argument("valid_to"),
            ),
        )
    found = replace(found, revision=definition.revision + 1).with_layout()
    if len(found.layouts) > TABLE_LAYOUTS_MAX:
        raise UsageError(
            f"{definition.where} has had {TABLE_LAYOUTS_MAX} layouts of its rows",
            "make a new table and copy the rows",
        )
    return found


def require_name(name: object) -> str:
    """The name of a table."""
    if not isinstance(name, str) or not name or "\x00" in name:
        raise UsageError(f"a table cannot be called {name!r}", "pass a text")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise UsageError(f"a table cannot be called {name!r}", "pass whole characters") from None
    if size > TABLE_NAME_BYTES_MAX:
        raise UsageError(
            f"the name of a table has {size} bytes", f"at most {TABLE_NAME_BYTES_MAX} are allowed"
        )
    return name


def require_same(
    definition: Definition,
    other: Definition,
    *,
    has_indexes: bool,
    has_event_time: bool,
    has_expiry: bool,
    has_end: bool,
) -> None:
    """Raise `UsageError` with the first difference between a table and what its opener expects."""
    ours, theirs = (_named(each, each.key) for each in (definition, other))
    if ours != theirs or (has_event_time and definition.has_event_time != other.has_event_time):
        _differs(definition, f"the key {', '.join(ours)}, not {', '.join(theirs)}")
    for name in {**definition.by_name, **other.by_name}:
        one, two = definition.by_name.get(name), other.by_name.get(name)
        if one is None or two is None:
            what = f"no column {name!r}" if one is None else f"a column {name!r} besides"
            _differs(definition, what)
        elif (one.type, one.is_nullable) != (two.type, two.is_nullable):
            _differs(definition, f"column {name!r} {_shown(one)}, not {_shown(two)}")
    column, wanted = (each.expiry_column for each in (definition, other))
    if has_expiry and (column and column.name) != (wanted and wanted.name):
        _differs(definition, f"expires={column and column.name!r}")
    column, wanted = (each.end_column for each in (definition, other))
    if has_end and (column and column.name) != (wanted and wanted.name):
        _differs(definition, f"valid_to={column and column.name!r}")
    if has_indexes:
        indexes, asked = (
            {index.name: (_named(each, index.parts), index.is_unique) for index in each.indexes}
            for each in (definition, other)
        )
        for name in {**indexes, **asked}:
            if indexes.get(name) != asked.get(name):
                _differs(definition, f"another index {name!r}, or none")


def _differs(definition: Definition, what: str) -> None:
    raise UsageError(
        f"{definition.where} has {what}", "open it by its name alone, or alter it (Table.alter)"
    )


def _shown(column: Column) -> str:
    return f"{column.type}{'' if column.is_nullable else ' not null'}"


def _named(definition: Definition, parts: Sequence[KeyPart]) -> list[str]:
    return [
        f"desc({name})" if part.is_falling else name
        for name, part in zip(definition.parts_named(parts), parts, strict=True)
    ]


# -- columns ------------------------------------------------------------------------------------

ADDED_NAMES: Final = frozenset(
    ["_change_type", "_commit_version", "_commit_timestamp", "row_timestamp", "row_version"]
)
"""The columns that changes, feeds and joins put beside the columns of a table: `row_changes.py`,
`joins.py` and Spark's readers. Names that begin with `kvstore_` stand in their plans."""


def two_named(definition: Definition, name: str) -> UsageError:
    """The refusal of a frame with a column of the table and an added one of the same name."""
    return UsageError(
        f"{definition.where} has a column {name!r}, which would be there twice",
        "choose the other columns: columns=[...]",
    )


def require_free_names(definition: Definition, names: Iterable[str]) -> None:
    """Raise `UsageError` for a new column that has a name of ours: a frame would have two columns
    of this name. Spark does not tell capitals from small letters."""
    for name in names:
        if name.lower() in ADDED_NAMES or name.lower().startswith("kvstore_"):
            raise UsageError(
                f"{definition.where}: a column cannot be called {name!r}, because changes and "
                "joins add a column of this name",
                "choose another name",
            )


def _require_columns(columns: Sequence[Column], where: str) -> None:
    names: set[str] = set()
    if not 0 < len(columns) <= TABLE_COLUMNS_MAX:
        raise UsageError(f"{where} has {len(columns)} columns", f"1 to {TABLE_COLUMNS_MAX} fit")
    for column in columns:
        if not column.name or column.name in names:
            raise UsageError(f"{where} has a second column {column.name!r}", "rename one")
        names.add(column.name)
        _require_type(column.type, f"{where}, column {column.name!r}")


def _require_type(type_: object, where: str) -> pa.DataType:
    if not isinstance(type_, pa.DataType):
        raise UsageError(f"{where}: {type_!r:.100} is no type", "pass one of pyarrow")
    try:
        kind_of(type_)
    except UsageError as error:
        raise error.at(f"{where}: ") from None
    return canonical(type_)


def _require_event_time(
    columns: Sequence[Column], name: str, key: Sequence[str | desc], where: str
) -> None:
    found = next((column for column in columns if column.name == name), None)
    if found is None:
        raise UsageError(f"{where} has no column {name!r}", "event_time names a column")
    is_time = pa.types.is_timestamp(found.type) or pa.types.is_date32(found.type)
    if not (is_time or pa.types.is_integer(found.type)):
        raise UsageError(
            f"{where}: event_time {name!r} is {found.type}", "use a timestamp, date or integer"
        )
    if any(name == (part.value if isinstance(part, desc) else part) for part in key):
        raise UsageError(f"{where}: event_time {name!r} is in the key", "it is put last by itself")


def _expiring(definition: Definition, name: object) -> Definition:
    """The definition with a column that tells when rows expire."""
    if name is None:
        return definition
    column = definition.column(name)
    if not is_instant(column.type):
        raise UsageError(
            f"{definition.where}: expires names {name!r}, which is {column.type}",
            'use timestamps with a time zone: pa.timestamp("us", "UTC")',
        )
    return replace(definition, expires=column.id)


def _ending(definition: Definition, name: object) -> Definition:
    """The definition with a column that tells until when rows are valid."""
    if name is None:
        return definition
    column = definition.column(name)
    if not definition.has_event_time:
        raise UsageError(
            f"{definition.where}: valid_to names {name!r}, and rows begin at no time",
            "name the column of their beginning: event_time",
        )
    begins = definition.key_columns[-1]
    if column.id in definition.key_ids or column.type != begins.type:
        raise UsageError(
            f"{definition.where}: valid_to names {name!r}, which is {column.type}",
            f"name a column beside the key, of the type of {begins.name!r}: {begins.type}",
        )
    return replace(definition, valid_to=column.id)


def _without_columns(definition: Definition, names: Sequence[str]) -> Definition:
    for name in names:
        column = definition.column(name)
        if column.id in definition.key_ids:
            raise UsageError(f"{definition.where}: {name!r} is in the key", "it cannot be dropped")
        if column.id == definition.expires:
            raise UsageError(
                f"{definition.where}: {name!r} tells when rows expire",
                "end that too: expires=False; rows that are there expire as they were to",
            )
        if column.id == definition.valid_to:
            raise UsageError(
                f"{definition.where}: {name!r} tells until when rows are valid",
                "end that too: valid_to=False",
            )
        for index in definition.indexes:
            if column.id in {part.id for part in index.parts}:
                raise UsageError(
                    f"{definition.where}: {name!r} is in the index {index.name!r}",
                    f"drop the index too: drop_index=[{index.name!r}]",
                )
        kept = tuple(each for each in definition.columns if each.id != column.id)
        definition = replace(definition, columns=kept)
    return definition


def _widened(definition: Definition, wider: Mapping[str, Any]) -> Definition:
    for name, given in wider.items():
        column = definition.column(name)
        where = f"{definition.where}, column {name!r}"
        type_ = _require_type(given.type if isinstance(given, pa.Field) else given, where)
        field = given if isinstance(given, pa.Field) else pa.field(name, type_, column.is_nullable)
        if type_ != column.type and not is_wider(type_, column.type):
            raise UsageError(
                f"{where} is {column.type}, which {type_} does not widen",
                "choose a type that holds all values of the old one",
            )
        if column.is_nullable and not field.nullable:
            raise UsageError(f"{where} may be null", "rows may hold nulls already")
        is_ordered = column.id in definition.key_ids or any(
            column.id == part.id for index in definition.indexes for part in index.parts
        )
        if column.id in definition.key_ids and field.nullable != column.is_nullable:
            raise UsageError(f"{where} is in the key", "a key is never null")
        if is_ordered and not _sorts_alike(type_, column.type):
            raise UsageError(
                f"{where} is in the key or an index, where {type_} has other bytes",
                "add another column",
            )
        default = column.default
        if default is not None:
            default = _default_cell(type_, default_value(column), where)
        new = replace(column, type=type_, is_nullable=field.nullable, default=default)
        columns = tuple(new if each.id == column.id else each for each in definition.columns)
        definition = replace(definition, columns=columns)
    return definition


def _with_columns(definition: Definition, added: Mapping[str, Any]) -> Definition:
    for name, given in added.items():
        where = f"{definition.where}, column {name!r}"
        if name in definition.by_name or not name or not isinstance(name, str):
            raise UsageError(f"{where} is there already, or has no name", "choose another name")
        require_free_names(definition, [name])
        shape, default = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        field = (
            shape if isinstance(shape, pa.Field) else pa.field(name, _require_type(shape, where))
        )
        field = field.with_type(_require_type(field.type, where))
        if default is None and not field.nullable:
            raise UsageError(
                f"{where} takes no null, and older rows have no value",
                f"give a default: add={{{name!r}: (field, value)}}",
            )
        cell = None if default is None else _default_cell(field.type, default, where)
        column = Column(definition.ids, name, field.type, field.nullable, cell)
        definition = replace(
            definition, columns=(*definition.columns, column), ids=definition.ids + 1
        )
    _require_columns(definition.columns, definition.where)
    return definition


def _default_cell(type_: pa.DataType, value: Any, where: str) -> bytes:
    kind = kind_of(type_)
    try:
        return cell_bytes(kind, kind.stored(value))
    except ValueError as error:
        raise UsageError(
            f"{where}: its default: {error}", "pass a default of the type of the column"
        ) from None


# -- types --------------------------------------------------------------------------------------


def is_wider(new: pa.DataType, old: pa.DataType) -> bool:
    """Whether the type `new` holds each value of `old`."""
    types = pa.types
    if types.is_integer(old):
        if types.is_integer(new):
            is_signed, was_signed = map(types.is_signed_integer, (new, old))
            spare = new.bit_width - old.bit_width
            return bool(spare > 0 and (is_signed or not was_signed))
        return bool(types.is_floating(new) and old.bit_width < (53 if new.bit_width == 64 else 24))
    if types.is_floating(old):
        return bool(types.is_floating(new) and new.bit_width > old.bit_width)
    if types.is_decimal(old) and types.is_decimal(new):
        whole = new.precision - new.scale >= old.precision - old.scale
        return bool(
            new != old and whole and new.scale >= old.scale and new.byte_width >= old.byte_width
        )
    return (old, new) in _WIDER


_WIDER: Final = frozenset(
    [
        (pa.string(), pa.large_string()),
        (pa.binary(), pa.large_binary()),
        (pa.time32("s"), pa.time32("ms")),
        (pa.time32("s"), pa.time64("us")),
        (pa.time32("ms"), pa.time64("us")),
    ]
)


def _sorts_alike(new: pa.DataType, old: pa.DataType) -> bool:
    """Whether keys of both types have the same bytes for each value of `old`."""
    one, two = kind_of(new), kind_of(old)
    return new == old or (one.tag == two.tag and not pa.types.is_time(old))


# -- keys and indexes ---------------------------------------------------------------------------


def _with_indexes(
    definition: Definition, added: Mapping[str, Any], *, is_whole: bool
) -> Definition:
    for name, given in added.items():
        where = f"{definition.where}, index {name!r}"
        if not isinstance(name, str) or not name:
            raise UsageError(f"{where}: no name", "pass a text")
        if any(index.name == name for index in definition.indexes):
            raise UsageError(f"{where} is there already", "drop it first, or choose another name")
        columns = given.columns if isinstance(given, unique) else given
        parts = _definition_parts(
            definition, list(_listed(columns, where, "columns")), f"index {name!r}"
        )
        number = definition.index_numbers + 1
        if number > INDEX_NUMBER_MAX:
            raise UsageError(
                f"{definition.where} has had {INDEX_NUMBER_MAX} indexes", "make a new table"
            )
        index = Index(name, number, parts, isinstance(given, unique), is_whole)
        definition = replace(definition, indexes=(*definition.indexes, index), index_numbers=number)
    return definition


def _without_indexes(definition: Definition, names: Sequence[str]) -> Definition:
    for name in names:
        dropped = definition.index(name)
        kept = tuple(index for index in definition.indexes if index != dropped)
        definition = replace(definition, indexes=kept)
    return definition


def _definition_parts(
    definition: Definition, named: Sequence[str | desc], what: str
) -> tuple[KeyPart, ...]:
    if not named:
        raise UsageError(f"{definition.where}: {what} has no columns", "name at least one")
    parts = []
    for each in named:
        name = each.value if isinstance(each, desc) else each
        column = definition.column(name)
        if is_nested(column.type):
            raise UsageError(
                f"{definition.where}: {what} names {name!r}, which is {column.type}",
                "name a column of single values; store the part that you look for in one",
            )
        parts.append(KeyPart(column.id, isinstance(each, desc)))
    if len({part.id for part in parts}) < len(parts):
        raise UsageError(f"{definition.where}: {what} names a column twice", "name it once")
    return tuple(parts)


def _listed(given: Any, where: str, what: str) -> Iterable[str | desc]:
    if isinstance(given, str | desc):
        return [given]
    if not isinstance(given, list | tuple):
        raise UsageError(f"{where}: {what}={given!r:.100}", "pass a list of names")
    return given


def _names(given: Any, what: str) -> list[str]:
    if given is None:
        return []
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list | tuple | set | frozenset):
        raise UsageError(f"{what}={given!r:.100}", "pass a list of names")
    return list(given)


def _mapping(given: Any, what: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if isinstance(given, pa.Schema):
        return {field.name: field for field in given}
    if not isinstance(given, Mapping):
        raise UsageError(f"{what}={given!r:.100}", "pass a dict by name")
    return given


# --------------------------------------------------------------------------------------------------
# The tables of a store: their definitions at each time, and how they are made and altered.
#
# A definition is a value under a key of the store. Its history is the history of the table's
# schema, so a read as of a time sees the columns of that time.
#
# Invariants
# 1. A row is committed only while the definition by which it was made is the newest one: the commit
#    looks under its lock. So a new index misses no row.
# 2. The numbers of tables differ: a transaction that makes a table has read all definitions. The
#    number of a table that was dropped is never given again, because history has its rows.
#
#     numbers := JSON    number: the greatest one of a table that was dropped


class StoreDefinitions:
    """The definitions in a store."""

    def __init__(self, parts: Parts) -> None:
        self._versions, self._reads = parts.versions, parts.reads

    def history(self, key: bytes) -> Sequence[Version]:
        upto = self._reads.at(None)
        versions = self._versions.history(key)
        # A commit under way may have written versions that it has not shown yet.
        return [version for version in versions if version.timestamp <= upto]

    def scan(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        span = Span(start, end)
        chunks = self._reads.read(None, span, lambda at: self._versions.scan(span, at))
        return chain.from_iterable(zip(*chunk, strict=True) for chunk in chunks)


class Definitions(Protocol):
    """The reads by which a store or a collection finds definitions."""

    def history(self, key: bytes) -> Sequence[Version]:
        """All kept versions of `key`, newest first."""
        ...

    def scan(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Live keys and values of a span now."""
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
        return [name_of(key) for key, _ in self._reader.scan(DEFINITIONS.start, DEFINITIONS.end)]

    def codec(self, name: str, as_of: int | None = None) -> TableCodec:
        """The definition of a table as of a time, and its oldest one for a time before it. Raises
        `UsageError` where there is no such table."""
        found: TableCodec | None = None
        for at, codec in self._versions(name):
            found = codec or found
            if as_of is None or at <= as_of:
                break
        if found is None:
            raise NotFoundError(f"there is no table {name!r}", self._hint())
        return found

    def codec_of(self, name: str, number: int, as_of: int) -> TableCodec:
        """As `codec`, of the table that had this number: also once it was dropped."""
        found: TableCodec | None = None
        for at, codec in self._versions(name):
            if codec is not None and codec.definition.number == number:
                found = codec
                if at <= as_of:
                    break
        if found is None:  # history has forgotten it
            raise NotFoundError(f"there is no table {name!r}", self._hint())
        return found

    def indexes_of(self, name: str, number: int) -> dict[int, tuple[TableCodec, Index]]:
        """The indexes that the table of this number has had in the kept history, each by its number
        with its newest codec."""
        found: dict[int, tuple[TableCodec, Index]] = {}
        for _, codec in self._versions(name):
            if codec is not None and codec.definition.number == number:
                for index in codec.definition.indexes:
                    found.setdefault(index.number, (codec, index))
        return found

    def _versions(self, name: str) -> list[tuple[int, TableCodec | None]]:
        try:
            versions = self._known.get(name)
        except TypeError as error:  # a list
            raise NotFoundError(f"there is no table {name!r}", self._hint()) from error
        if versions is None or self._changing or self._moves():
            versions = self._load(name)
        return versions

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
            is_there = bool(versions) and versions[0][1] is not None  # else one may come
            if turn == self._turn and not self._changing and is_there:  # else one came meanwhile
                self._known[name] = versions
        return versions

    def _hint(self) -> str:
        names = self.names()
        return (
            f"there are {', '.join(names[:20])}"
            if names
            else "there are no tables yet: make one by `table`, with its schema"
        )


def make(
    transaction: Any,
    name: str,
    schema: pa.Schema,
    key: str | desc | Sequence[str | desc],
    indexes: Mapping[str, IndexColumns] | None,
    event_time: str | None,
    expires: str | None,
    valid_to: str | None,
    *,
    number_free: Callable[[Iterable[tuple[bytes, bytes]]], int],
) -> None:
    """Make a table, or raise `UsageError` unless it is there and the same. Costs a pass over all
    definitions if it is not there; `number_free` is the method of `Catalogue`."""
    has_indexes, has_event_time = indexes is not None, event_time is not None
    found = transaction.get(definition_key(require_name(name)))
    if found is not None:
        known = Definition.from_bytes(name, found)
        wanted = define(name, known.number, schema, key, indexes, event_time, expires, valid_to)
        given = {"has_indexes": has_indexes, "has_event_time": has_event_time}
        given |= {"has_expiry": expires is not None, "has_end": valid_to is not None}
        require_same(known, wanted, **given)
        return
    stored = transaction.scan(DEFINITIONS.start, DEFINITIONS.end)
    number = max(number_free(stored), _dropped_number(transaction) + 1)
    if number > TABLE_NUMBER_MAX:
        raise UsageError(f"{number} tables are too many", "make another store")
    wanted = define(name, number, schema, key, indexes, event_time, expires, valid_to)
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


def drop(transaction: Any, name: str) -> None:
    """Delete a table: its definition, its rows and the entries of its indexes. Raises
    `NotFoundError` where there is no such table."""
    key = definition_key(name)
    stored = transaction.get(key)
    if stored is None:
        raise NotFoundError(f"there is no table {name!r}", "it was dropped already")
    number = Definition.from_bytes(name, stored).number
    greatest = max(number, _dropped_number(transaction))
    transaction.put_rows([NUMBERS], [json.dumps({"number": greatest}).encode()])
    spans = Span.of_prefix(table_prefix(number)), Span.of_prefix(progress_prefix(name))
    ends = [(span.start, span.end) for span in spans if span.end is not None]
    transaction.delete_rows([key], ends)


def _dropped_number(transaction: Any) -> int:
    """The greatest number of a table that was dropped, 0 if none was."""
    stored = transaction.get(NUMBERS)
    if stored is None:
        return 0
    record = read_object(stored, where="the number of dropped tables")
    return record.integer("number", least=1, most=TABLE_NUMBER_MAX)


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
