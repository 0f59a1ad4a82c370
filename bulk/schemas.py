"""The columns that a file has, as the schema of a new table.

Parquet and Arrow tell the types of their columns. CSV, TSV and JSON lines have texts: each column
gets the first type of the list that holds every value of the file, so that an import of the same
file refuses nothing.

    bool                     true, false
    int64                    7, -7; not 007, which is a text
    double                   1.5, 2e9; a whole number only if a double holds it
    date32                   2026-01-31
    timestamp[us, tz=UTC]    2026-01-31T12:00:00Z, 2026-01-31 13:00+01:00; [ns] with more digits
    timestamp[us]            2026-01-31T12:00:00; [ns] with more digits
    string                   all else

In JSON a number is no text, so a text there becomes a date, a timestamp or a string. The values
that stand for null in CSV (`NULLS` of `kvstore.bulk.delimited`) fit every type.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.bulk.delimited import NULLS
from kvstore.bulk.row_files import (
    FileReads,
    column_names,
    fields_of_lines,
    file_schema,
    format_of,
    text_batches,
)
from kvstore.errors import UsageError
from kvstore.tables.nested import is_nested, mapped
from kvstore.tables.words import FLOAT_DIGITS, NumberText, is_float_of


def schema_of(
    path: Path,
    reads: FileReads,
    columns: Sequence[str] | None = None,
    given: Sequence[pa.Field] = (),
) -> pa.Schema:
    """The columns of a file, all or those that are named, and the fields `given`: in the place of
    those of the same name, or behind all. Costs a pass over a file of text.

    Raises `UsageError` for a file that cannot be read, and for a column that has no type.
    """
    types = {field.name: field for field in given}
    kind = format_of(path)
    if kind in ("parquet", "arrow"):
        found = file_schema(path)
    elif kind == "jsonl":
        found = _schema_of_lines(path, reads, types)
    else:
        found = _schema_of_text(path, reads)
    fields = {}
    for name in found.names if columns is None else columns:
        if name not in found.names:
            raise UsageError(
                f"{path} has no column {name!r}", f"there are {', '.join(found.names)}"
            )
        fields[name] = types[name] if name in types else _plain(found.field(name), path)
    return pa.schema({**fields, **types}.values())


def _plain(field: pa.Field, path: Path) -> pa.Field:
    """A field with the type that a column of a table has for its values."""
    kind = _plain_type(field.type)
    if pa.types.is_null(kind):
        raise UsageError(
            f"{path}: column {field.name!r} has no value and no type",
            f"name its type: {field.name}:string",
        )
    return pa.field(field.name, kind, field.nullable)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if is_nested(kind):
        return mapped(kind, _plain_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return _plain_type(pa.list_(kind.value_field))
    narrow = {
        pa.string_view(): pa.string(),
        pa.binary_view(): pa.binary(),
        pa.date64(): pa.date32(),
        pa.float16(): pa.float32(),
    }
    return narrow.get(kind, kind)


class _Candidate(NamedTuple):
    """A type, and the form of the texts that it takes."""

    type: pa.DataType
    form: str


_DAY: Final = r"\d{4}-\d\d-\d\d"
_CLOCK: Final = _DAY + r"[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?"
_ZONE: Final = r"(Z|[+-]\d\d(:?\d\d)?)"

TIMES: Final = (
    _Candidate(pa.date32(), _DAY),
    _Candidate(pa.timestamp("us", "UTC"), _CLOCK + _ZONE),
    _Candidate(pa.timestamp("ns", "UTC"), _CLOCK + _ZONE),
    _Candidate(pa.timestamp("us"), _CLOCK),
    _Candidate(pa.timestamp("ns"), _CLOCK),
)
TEXTS: Final = (
    _Candidate(pa.bool_(), "(?i:true|false)"),
    _Candidate(pa.int64(), r"-?(0|[1-9]\d{0,18})"),
    _Candidate(pa.float64(), r"-?(0|[1-9]\d{0,14})(\.\d+)?([eE][+-]?\d{1,3})?"),
    *TIMES,
)


class _Texts:
    """The types that hold all texts of a column so far."""

    def __init__(self, candidates: Sequence[_Candidate]) -> None:
        self._left = list(candidates)
        self._is_empty = True

    def see(self, texts: pa.Array) -> None:
        """Look at more texts; a null fits every type."""
        texts = texts.drop_null()
        if not len(texts):
            return
        self._is_empty = False
        self._left = [each for each in self._left if _fits(texts, each)]

    @property
    def type(self) -> pa.DataType:
        """The first type that holds all of them."""
        return pa.string() if self._is_empty or not self._left else self._left[0].type


def _fits(texts: pa.Array, candidate: _Candidate) -> bool:
    kind = candidate.type
    if not pc.all(pc.match_substring_regex(texts, f"^({candidate.form})$")).as_py():
        return False
    try:
        found = texts.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    if not pa.types.is_floating(kind):
        return True
    digits = FLOAT_DIGITS[64]
    return all(
        is_float_of(text, number, digits)
        for text, number in zip(texts.to_pylist(), found.to_pylist(), strict=True)
    )


def _schema_of_text(path: Path, reads: FileReads) -> pa.Schema:
    names = column_names(path, reads)
    columns = {name: _Texts(TEXTS) for name in names}
    if len(columns) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{path} has {names.count(double)} columns {double!r}", "rename one")
    nulls = pa.array(NULLS)
    for batch in text_batches(path, names, reads):
        for name, column in columns.items():
            texts = batch.column(name)
            trimmed = pc.utf8_trim(texts, " \t")
            column.see(pc.if_else(pc.is_in(trimmed, nulls), pa.scalar(None, pa.string()), texts))
    return pa.schema([(name, column.type) for name, column in columns.items()])


class _Values:
    """The kinds of the JSON values of a column so far."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.texts = _Texts(TIMES)
        self.least = self.most = 0

    def see(self, values: Sequence[Any]) -> None:
        texts = []
        for value in values:
            kind = _kind(value)
            if kind == "text":
                texts.append(value)
            elif kind == "integer":
                self.least, self.most = min(self.least, value), max(self.most, value)
            if value is not None:
                self.kinds.add(kind)
        self.texts.see(pa.array(texts, pa.string()))

    def type(self, name: str, path: Path) -> pa.DataType:
        """The type that holds all of them. Raises `UsageError`."""
        remedy = f"name its type: {name}:string"
        match sorted(self.kinds):
            case []:
                return pa.string()
            case ["boolean"]:
                return pa.bool_()
            case ["integer"]:
                if self.least >= -(1 << 63) and self.most < 1 << 63:
                    return pa.int64()
                if self.least >= 0 and self.most < 1 << 64:
                    return pa.uint64()
                raise UsageError(f"{path}: column {name!r} has integers of over 64 bits", remedy)
            case ["fraction"] | ["fraction", "integer"]:
                return pa.float64()
            case ["text"]:
                return self.texts.type
            case ["binary"] | ["binary", "text"]:
                return pa.binary()
            case ["nested"] | ["nested", *_]:
                raise UsageError(
                    f"{path}: column {name!r} has objects or lists",
                    f"name its type: {name}:list<double>, {name}:struct<a: int64, b: string>, "
                    f"{name}:map<string, int64>; or {name}:string, with --nested text; or pass "
                    "--nested columns",
                )
        kinds = ", ".join(sorted(self.kinds))
        raise UsageError(f"{path}: column {name!r} has values of several kinds: {kinds}", remedy)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, str):
        return "fraction" if isinstance(value, NumberText) else "text"
    return "binary" if isinstance(value, dict) and list(value) == ["base64"] else "nested"


def _schema_of_lines(path: Path, reads: FileReads, given: Container[str]) -> pa.Schema:
    columns: dict[str, _Values] = {}
    for rows in fields_of_lines(path, reads):
        for name in dict.fromkeys(name for row in rows for name in row):
            seen = columns.setdefault(name, _Values())
            seen.see([row.get(name) for row in rows])
    return pa.schema(
        [
            (name, pa.string() if name in given else seen.type(name, path))
            for name, seen in columns.items()
        ]
    )
