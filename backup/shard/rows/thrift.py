"""Thrift's compact protocol, as far as Parquet's footers and page headers use it, read strictly.

    struct := field ... | 0      field := (step 4 bits | kind 4 bits) | value
    list   := (count 4 bits | kind 4 bits) | value ...

Invariants
1. Memory and time are O(bytes read): a count that the bytes cannot hold is refused at once.
2. Malformed bytes raise `ValueError`. A field comes once; the kind of a known field is checked.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from kvstore.codec.varint import read_varint

Fields: TypeAlias = "dict[int, Any]"
"""Fields by number. A field is an int, bytes, `Fields`, or a list of these. Booleans and doubles
are read as None."""

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _TEXT, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_DEPTH_MAX = 8


def read_struct(data: bytes, at: int = 0) -> tuple[Fields, int]:
    """The struct that begins at `at`, and where it ends."""
    try:
        return _struct(data, at, _DEPTH_MAX)
    except IndexError as error:
        raise ValueError("a header is cut short") from error


def number(fields: Fields, field: int, default: int | None = None) -> int:
    """The number `field`, which is not negative."""
    found = fields.get(field, default)
    if type(found) is not int or found < 0:
        raise ValueError(f"field {field} of a header is {_shown(found)}, not a count")
    return found


def struct(fields: Fields, field: int) -> Fields:
    """The struct `field`."""
    found = fields.get(field)
    if type(found) is not dict:
        raise ValueError(f"field {field} of a header is {_shown(found)}, not a struct")
    return found


def text(fields: Fields, field: int, default: bytes | None = None) -> bytes:
    """The bytes `field`."""
    found = fields.get(field, default)
    if type(found) is not bytes:
        raise ValueError(f"field {field} of a header is {_shown(found)}, not a text")
    return found


def listed(fields: Fields, field: int, kind: type) -> list[Any]:
    """The list `field`, each item of `kind`; none where the field is missing."""
    found = fields.get(field, [])
    if type(found) is not list or not all(type(item) is kind for item in found):
        raise ValueError(f"field {field} of a header is {_shown(found)}, not a list as it should")
    return found


def _shown(found: object) -> str:
    return "missing" if found is None else f"{found!r:.40}"


def _struct(data: bytes, at: int, depth: int) -> tuple[Fields, int]:
    if not depth:
        raise ValueError("a header is nested too deep")
    fields: Fields = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _zigzag(data, at)
        if field in fields:
            raise ValueError(f"field {field} of a header comes twice")
        kind = head & 15
        # Hot: a footer has 130 numbers for a row group, most of them in one byte or two.
        if _I16 <= kind <= _I64 and (byte := data[at]) < 128:
            fields[field] = (byte >> 1) ^ -(byte & 1)
            at += 1
        elif kind > _FALSE:
            fields[field], at = _value(data, at, kind, depth - 1)
        else:
            fields[field] = None
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if _I16 <= kind <= _I64:
        found, at = _zigzag(data, at)
        if not -(1 << (63 if kind == _I64 else 31)) <= found < 1 << (63 if kind == _I64 else 31):
            raise ValueError("a number of a header is too large for its type")
        return found, at
    if kind == _STRUCT:
        return _struct(data, at, depth)
    if kind == _TEXT:
        length, at = read_varint(data, at)
        if at + length > len(data):
            raise ValueError("a text of a header is cut short")
        return data[at : at + length], at + length
    if kind in (_LIST, _SET):
        return _list(data, at, depth)
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    raise ValueError(f"a header has a value of type {kind}")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    head, at = data[at], at + 1
    count, kind = head >> 4, head & 15
    if count == 15:
        count, at = read_varint(data, at)
    if count > len(data) - at or not depth:
        raise ValueError(f"a list of {count} in a header is cut short, or nested too deep")
    items: list[Any] = []
    for _ in range(count):
        if kind in (_TRUE, _FALSE):
            item, at = None, at + 1
        else:
            item, at = _value(data, at, kind, depth - 1)
        items.append(item)
    return items, at


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    found, at = read_varint(data, at)
    return (found >> 1) ^ -(found & 1), at
