"""Thrift's compact protocol, read and written again byte for byte, so that a test can lie in it.

A struct is a list of `Field`s; a list is a `Listed`; numbers are ints, texts bytes, truths bools.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, TEXT, LIST, SET, MAP, STRUCT = range(1, 13)
NUMBERS = (I16, I32, I64)


@dataclass
class Field:
    number: int
    kind: int
    value: Any


@dataclass
class Listed:
    kind: int
    items: list[Any]
    claimed: int | None = None
    """The false count that the list claims; None: the true one."""


Struct = list[Field]


def read(data: bytes, at: int = 0) -> tuple[Struct, int]:
    """The struct at `at`, and where it ends."""
    fields: Struct = []
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _zigzag(data, at)
        value, at = _value(data, at, head & 15)
        fields.append(Field(number, head & 15, value))
    return fields, at + 1


def write(fields: Struct) -> bytes:
    """The bytes of a struct."""
    out = bytearray()
    last = 0
    for field in fields:
        step = field.number - last
        last = field.number
        if 0 < step < 16:
            out.append(step << 4 | field.kind)
        else:
            out.append(field.kind)
            out += _varint(_zagged(field.number))
        out += _written(field.kind, field.value)
    return bytes(out) + b"\0"


def get(fields: Struct, *path: int) -> Any:
    """The value at a path of field numbers, and of places in lists."""
    found: Any = fields
    for step in path:
        if isinstance(found, Listed):
            found = found.items[step]
        else:
            found = next(field for field in found if field.number == step).value
    return found


def put(fields: Struct, value: Any, *path: int) -> None:
    """Set the value at a path."""
    holder = get(fields, *path[:-1])
    next(field for field in holder if field.number == path[-1]).value = value


def every(fields: Struct) -> Iterator[Field]:
    """Each field of a struct and of all nested values."""
    for field in fields:
        yield field
        if field.kind == STRUCT:
            yield from every(field.value)
        elif field.kind == LIST and field.value.kind == STRUCT:
            for item in field.value.items:
                yield from every(item)


def lie(fields: Struct, rng: random.Random) -> None:
    """Change one field, as an attacker who knows the format would."""
    field = rng.choice(list(every(fields)))
    if field.kind in NUMBERS:
        field.value = rng.choice(
            (-1, 0, 1, 7, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, *_near(field.value))
        )
    elif field.kind == TEXT:
        field.value = rng.choice([b"", b"\xff" * 9, field.value[:-1], field.value * 2])
    elif field.kind == LIST:
        listed = field.value
        match rng.randrange(4):
            case 0:
                listed.claimed = rng.choice([0, len(listed.items) + 1, 10_000, 2**31 - 1])
            case 1:
                listed.items = listed.items * 2
            case 2:
                listed.items = listed.items[:-1]
            case _:
                listed.items = listed.items[::-1]
    elif field.kind == STRUCT:
        field.value = rng.choice([[], field.value * 2, field.value[1:], field.value[::-1]])
    elif field.kind in (TRUE, FALSE):
        field.kind = TRUE + FALSE - field.kind


def _near(number: int) -> tuple[int, ...]:
    return number - 1, number + 1, number * 1000


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (TRUE, FALSE):
        return None, at
    if kind in NUMBERS:
        return _zigzag(data, at)
    if kind == TEXT:
        length, at = _unsigned(data, at)
        return data[at : at + length], at + length
    if kind == STRUCT:
        return read(data, at)
    if kind == LIST:
        head, at = data[at], at + 1
        count = head >> 4
        if count == 15:
            count, at = _unsigned(data, at)
        items = []
        for _ in range(count):
            item, at = _value(data, at, head & 15)
            items.append(item)
        return Listed(head & 15, items), at
    width = 1 if kind == BYTE else 8
    return data[at : at + width], at + width


def _written(kind: int, value: Any) -> bytes:
    if kind in (TRUE, FALSE):
        return b""
    if kind in NUMBERS:
        return _varint(_zagged(value))
    if kind == TEXT:
        return _varint(len(value)) + value
    if kind == STRUCT:
        return write(value)
    if kind == LIST:
        count = len(value.items) if value.claimed is None else value.claimed
        short = bytes([count << 4 | value.kind]) if count < 15 else b""
        head = short or bytes([0xF0 | value.kind]) + _varint(count)
        return head + b"".join(_written(value.kind, item) for item in value.items)
    return bytes(value)


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte, at = data[at], at + 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    number, at = _unsigned(data, at)
    return (number >> 1) ^ -(number & 1), at


def _zagged(number: int) -> int:
    return (number << 1 ^ number >> 63) & (1 << 64) - 1


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
