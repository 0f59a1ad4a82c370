"""Values of rows: the columns beside the key, in the layout of one schema number.

`kvstore.loops.rows` has the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from kvstore.arrow import array_of
from kvstore.errors import CorruptionError, FormatVersionError, UsageError
from kvstore.loops import contract
from kvstore.loops.contract import ROW_FORMAT, Column, Made
from kvstore.loops.rows import decode_rows, encode_rows
from kvstore.tables.definition import Layout
from kvstore.tables.kinds import Kind, kind_of

_HEAD: Final = struct.Struct("<BH")
_ENDS: Final = {1: "B", 2: "H", 4: "I"}


def cell_buffers(column: pa.Array, width: int) -> Column:
    """The buffers of a column as the loops take them."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.string())
    elif pa.types.is_large_binary(column.type):
        column = column.cast(pa.binary())
    valid, *rest = column.buffers()
    valid = valid if column.null_count else None
    if width:
        return width, valid, column.offset, rest[0], None
    return 0, valid, column.offset, rest[1], rest[0]


def array_made(type_: pa.DataType, made: Made, count: int) -> pa.Array:
    """The array of a type whose buffers the loops made. Rows of older releases may hold what a
    column does not: texts that are no UTF-8, and times outside of its range."""
    kind = kind_of(type_)
    valid, data, ends = made
    is_full = valid.count(b"\xff") == len(valid)
    buffers = [None if is_full else pa.py_buffer(valid), pa.py_buffer(data)]
    if ends is not None:
        buffers.insert(1, pa.py_buffer(ends))
    found = pa.Array.from_buffers(kind.storage, count, buffers, 0 if is_full else -1)
    if kind.storage == kind.type:
        return found
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, found)
    return found.cast(type_)


class RowCodec:
    """Rows of one layout. `where` names their table in errors."""

    def __init__(self, number: int, layout: Layout, where: str) -> None:
        self.number, self.layout = number, layout
        self._where = where
        self.kinds = [kind_of(type_) for _, type_ in layout]
        self.place = {id_: at for at, (id_, _) in enumerate(layout)}
        self.widths = [kind.width for kind in self.kinds]
        fixed = [kind for kind in self.kinds if kind.width]
        self._varying = len(self.kinds) - len(fixed)
        self._null_bytes = (len(layout) + 7) // 8
        codes = "".join(kind.code for kind in fixed)
        self._structs = {
            _head(width): struct.Struct(f"<BH{self._null_bytes}s{codes}{code * self._varying}")
            for width, code in _ENDS.items()
        }

    def values(self, columns: Sequence[pa.Array], count: int) -> pa.Array:
        """The rows of columns in the order of the layout, binary."""
        buffers = [
            cell_buffers(column, width) for column, width in zip(columns, self.widths, strict=True)
        ]
        encoded = encode_rows(self.number, buffers, count)
        if encoded is None:
            raise UsageError(f"{self._where}: {count} rows have 2 GiB", "pass fewer rows at once")
        return array_of(count, *encoded)

    def arrays(self, values: pa.Array, places: Sequence[int]) -> list[pa.Array]:
        """The columns at `places` of the layout. No other column is decoded."""
        _, offsets, data = values.buffers()
        made = decode_rows(
            *(offsets, data or b"", values.offset, len(values)),
            *(self.number, self.widths, places, self._where),
        )
        return [
            array_made(self.kinds[place].type, buffers, len(values))
            for place, buffers in zip(places, made, strict=True)
        ]

    def value(self, cells: Sequence[Any]) -> bytes:
        """The row of stored cells in the order of the layout, None for null."""
        fixed: list[Any] = []
        varying: list[bytes] = []
        ends: list[int] = []
        nulls = total = 0
        for at, (kind, cell) in enumerate(zip(self.kinds, cells, strict=True)):
            if cell is None:
                nulls |= 1 << at
            if kind.width:
                fixed.append((b"" if kind.code.endswith("s") else 0) if cell is None else cell)
            else:
                varying.append(cell or b"")
                total += len(varying[-1])
                ends.append(total)
        width = 1 if total < 1 << 8 else 2 if total < 1 << 16 else 4
        head = _head(width)
        bits = nulls.to_bytes(self._null_bytes, "little")
        packed = self._structs[head].pack(head, self.number, bits, *fixed, *ends)
        return b"".join((packed, *varying))

    def reads(
        self, wanted: Sequence[tuple[str, int, Callable[[Any], Any] | None]]
    ) -> list[contract.CellRead]:
        """Columns as `RowDicts` takes them. Each of `wanted` has a name, a place in the layout, and
        a function that makes a value of a stored cell; None stands for the function of its kind."""
        found = []
        for name, place, call in wanted:
            kind = self.kinds[place]
            way = kind.way if call is None else contract.CALLED
            found.append((name, place, kind.letter, way, call or kind.value))
        return found


def schema_number(stored: bytes, where: str) -> int:
    """The schema number of a row. Raises `FormatVersionError` for a row of another format."""
    if len(stored) < _HEAD.size:
        raise CorruptionError(f"a row of {where}", f"{len(stored)} bytes are no row")
    head, number = _HEAD.unpack_from(stored)
    if head >> 4 != ROW_FORMAT:
        raise FormatVersionError(f"a row of {where}", found=head >> 4, supported=ROW_FORMAT)
    return int(number)


def schema_numbers(values: pa.Array, where: str) -> Any:
    """The schema number of each row of a binary array. Raises as `schema_number`."""
    _, offsets, data = values.buffers()
    count = len(values)
    if not count:
        return np.empty(0, np.int64)
    bounds = np.frombuffer(offsets, np.int32)[values.offset : values.offset + count + 1]
    short = np.flatnonzero(bounds[1:] - bounds[:-1] < _HEAD.size)
    if len(short):
        raise CorruptionError(f"{where}, row {short[0]}", "its bytes are no row")
    stored = np.frombuffer(data, np.uint8)
    formats = stored[bounds[:-1]] >> 4
    if (formats != ROW_FORMAT).any():
        found = int(formats[formats != ROW_FORMAT][0])
        raise FormatVersionError(f"a row of {where}", found=found, supported=ROW_FORMAT)
    return stored[bounds[:-1] + 1] | stored[bounds[:-1] + 2].astype(np.int64) << 8


def _head(width: int) -> int:
    return ROW_FORMAT << 4 | width


def cell_bytes(kind: Kind, cell: Any) -> bytes:
    """A stored cell as bytes."""
    return struct.pack(f"<{kind.code}", cell) if kind.width else cell


def bytes_cell(kind: Kind, stored: bytes) -> Any:
    """The stored cell of bytes."""
    return struct.unpack(f"<{kind.code}", stored)[0] if kind.width else stored
