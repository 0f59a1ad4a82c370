"""Reads and writes JSON lines: an object a line, with keys and values as fields.

    {"key": "AA1", "value": "on time"}
    {"key": {"base64": "a/8="}, "value": null}
    {"key": "AA2", "value": "late", "expires": "2013-01-01T06:00:00.000000000Z"}
    {"op": "delete", "key": "AA3"}

Bytes that are UTF-8 are text. Other bytes are an object `{"base64": "..."}`. `kvstore scan --json`
and `kvstore export` print these lines.

Invariants
1. A line that is written and read again gives the same bytes.
2. A row that cannot be read is refused by file and line.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import pyarrow as pa

from kvstore.errors import UsageError
from kvstore.limits import TEXT_ROW_BYTES_MAX

_ROWS: Final = 10_000
_BYTES: Final = 8 << 20


def read_lines(file: BinaryIO, where: str, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Batches of binary columns: the fields `names` of each line. Raises `UsageError`.

    The first names are of the key and the value. A line that has `"delete"` in a later field needs
    no value.
    """
    columns: list[list[bytes | None]] = [[] for _ in names]
    size = 0
    for number, line in enumerate(_lines(file, where), 1):
        if not line.strip():
            continue
        fields = _object(line, f"{where}:{number}")
        for name, column in zip(names, columns, strict=True):
            if name not in fields:
                if name == names[1] and "delete" in map(fields.get, names[2:]):
                    column.append(None)
                    continue
                raise UsageError(
                    f"{where}:{number} has no field {name!r}", f"choose from {', '.join(fields)}"
                )
            column.append(_bytes(fields[name], f"{where}:{number}: field {name!r}"))
        size += len(line)
        if len(columns[0]) == _ROWS or size > _BYTES:
            yield _batch(names, columns)
            columns, size = [[] for _ in names], 0
    yield _batch(names, columns)


def first_fields(file: BinaryIO, where: str) -> list[str]:
    """The names of the fields of the first line. Raises `UsageError`."""
    for number, line in enumerate(_lines(file, where), 1):
        if line.strip():
            return list(_object(line, f"{where}:{number}"))
    return []


def line_of(fields: dict[str, bytes | None]) -> bytes:
    """A row as a line, with its end."""
    shown = {name: _text(raw) for name, raw in fields.items()}
    return json.dumps(shown, ensure_ascii=False).encode() + b"\n"


def _lines(file: BinaryIO, where: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(TEXT_ROW_BYTES_MAX + 1):
        number += 1
        if len(line) > TEXT_ROW_BYTES_MAX:
            size = f"{TEXT_ROW_BYTES_MAX >> 20} MiB"
            raise UsageError(
                f"{where}:{number} has more than {size}", "write it as Parquet or Arrow"
            )
        yield line


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line, object_pairs_hook=_distinct)
    except _TwiceError as error:
        raise UsageError(f"{where} has two fields {error.args[0]!r}", "remove one") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", "write one object a line") from error
    if not isinstance(found, dict):
        raise UsageError(f"{where} is no object", "write one object a line")
    return found


class _TwiceError(Exception):
    """An object has two fields of one name, of which Python would take the last."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


def _bytes(field: Any, where: str) -> bytes | None:
    if field is None:
        return None
    if isinstance(field, str):
        try:
            return field.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{where} is not text: {error}", "write it as base64") from error
    if isinstance(field, dict) and list(field) == ["base64"]:
        try:
            return base64.b64decode(field["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise UsageError(f"{where} is not base64: {error}", "check the line") from error
    kind = type(field).__name__
    raise UsageError(f"{where} is of type {kind}", 'write text in quotes, or {"base64": "..."}')


def _text(raw: bytes | None) -> str | dict[str, str] | None:
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _batch(names: list[str], columns: list[list[bytes | None]]) -> pa.RecordBatch:
    arrays = [pa.array(column, pa.binary()) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, names=names)
