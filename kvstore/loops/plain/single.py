"""Single rows of a table: keys of values of Python, and rows as dicts.

`kvstore.codec.tuples` has the bytes of keys, and `kvstore.loops.plain.rows` the bytes of rows.

Invariants
1. A dict has the values that a batch of `decode_keys` and `decode_rows` has in the same row.
2. Bytes that are no key or no row of the table raise `CorruptionError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from kvstore.errors import CorruptionError
from kvstore.loops import contract
from kvstore.loops.contract import ROW_FORMAT, CellRead, KeyMade, KeyRead
from kvstore.loops.plain.parts import HEAD, Shape, parsed

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EPOCHS: Final = {contract.INSTANT: _EPOCH, contract.LOCAL: _EPOCH.replace(tzinfo=None)}


class KeyMaker:
    """Makes keys that begin with a prefix."""

    def __init__(self, prefix: bytes, columns: Sequence[KeyMade]) -> None:
        self._prefix = prefix
        self._makers = [column[6] for column in columns]

    def make(self, values: Sequence[Any]) -> bytes:
        """The key of `values`, of the columns from the first on. Raises `ValueError` for a value
        that its column does not take."""
        if len(values) > len(self._makers):
            raise ValueError("a key has too many values")
        made = (maker(value) for maker, value in zip(self._makers, values, strict=False))
        return self._prefix + b"".join(made)

    def fits(
        self,
        entries: Sequence[bytes],
        rows: Sequence[dict[str, Any] | None],
        names: Sequence[str],
    ) -> list[bool]:
        """Whether each entry of an index fits its row: the entry begins with the key of the row's
        values in the columns `names`. No entry fits None."""
        return [
            row is not None and entry.startswith(self.make([row[name] for name in names]))
            for entry, row in zip(entries, rows, strict=True)
        ]


class RowDicts:
    """Reads the rows of one schema number as dicts."""

    def __init__(
        self,
        where: str,
        template: dict[str, Any],
        prefix: bytes,
        keys: Sequence[KeyRead],
        number: int,
        widths: Sequence[int],
        cells: Sequence[CellRead],
    ) -> None:
        """A dict is a copy of `template`, with the columns of `keys` and `cells`. Keys begin with
        `prefix`. `widths` has the width of each column of a row, 0 where it varies."""
        self._where, self._template = where, template
        self._prefix, self._number = prefix, number
        self._keys = list(keys)
        self._shapes = [(kind, tag, flips, width) for _, kind, tag, flips, width, _, _ in keys]
        self._cells = list(cells)
        self._shape = Shape(number, widths)
        self._wanted = [place for _, place, _, _, _ in cells]

    def read(self, key: bytes, value: bytes) -> dict[str, Any] | None:
        """The row of a key and a value; None where the value has another schema number."""
        if len(value) < HEAD.size or (value[0] >> 4, HEAD.unpack_from(value)[1]) != (
            ROW_FORMAT,
            self._number,
        ):
            return None
        row = self._template.copy()
        if any(name is not None for name, *_ in self._keys):
            self._read_key(key, row)
        try:
            found = self._shape.cells(value, self._wanted, f"a row of {self._where}")
            for (name, _, letter, way, call), cell in zip(self._cells, found, strict=True):
                row[name] = None if cell is None else _value(_stored(letter, cell), way, call)
        except UnicodeDecodeError as error:
            raise CorruptionError(f"a row of {self._where}", f"no UTF-8: {error}") from None
        return row

    def read_all(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        otherwise: Callable[[bytes, bytes], dict[str, Any]],
    ) -> list[dict[str, Any] | None]:
        """The rows of keys and values. A value that is None gives None. `otherwise` reads a row
        with another schema number."""
        rows: list[dict[str, Any] | None] = []
        for key, value in zip(keys, values, strict=True):
            row = None if value is None else self.read(key, value)
            rows.append(otherwise(key, value) if row is None and value is not None else row)
        return rows

    def _read_key(self, key: bytes, row: dict[str, Any]) -> None:
        here = len(self._prefix)
        try:
            for column, (cell, end) in zip(
                self._keys, parsed(key, here, self._shapes), strict=True
            ):
                name, kind, *_, way, call = column
                here = end
                if end < 0 or cell is None:
                    here = -1
                    break
                if name is not None:
                    row[name] = _value(_element(kind, cell), way, call)
        except (ValueError, OverflowError):
            here = -1
        if here != len(key):
            raise CorruptionError(f"{self._where}, key {key.hex()}", "no key of its table")


def _element(kind: int, cell: bytes) -> Any:
    if kind in (contract.SIGNED, contract.UNSIGNED):
        return int.from_bytes(cell, "little", signed=kind == contract.SIGNED)
    if kind == contract.DOUBLE:
        return struct.unpack("<d", cell)[0]
    return cell[0] if kind == contract.BOOLEAN else cell


def _stored(letter: str, cell: bytes) -> Any:
    return cell if letter == "s" else struct.unpack(f"<{letter}", cell)[0]


def _value(stored: Any, way: int, call: Callable[[Any], Any] | None) -> Any:
    if way == contract.STORED:
        return stored
    if way == contract.TEXT:
        return str(stored, "utf-8")
    if way == contract.TRUTH:
        return bool(stored)
    epoch = _EPOCHS.get(way)
    if epoch is not None and contract.INSTANT_LEAST <= stored <= contract.INSTANT_MOST:
        return epoch + timedelta(0, 0, stored)
    assert call is not None
    return call(stored)


def row_keys(
    entries: Sequence[bytes],
    skip: int,
    columns: Sequence[tuple[int, int, bool, int]],
    prefix: bytes,
    where: str,
) -> list[bytes]:
    """The keys of the rows to which entries of an index lead. An entry has the columns of the
    index, as in `decode_keys`, behind `skip` bytes, and the columns of the row's key behind them. A
    row's key begins with `prefix`. Raises `CorruptionError` for bytes that are no entry."""
    found = []
    for entry in entries:
        end = skip
        for place, (_, end) in enumerate(parsed(entry, skip, columns)):
            if end < 0:
                raise CorruptionError(
                    f"{where}, key {entry.hex()}",
                    f"no key of its table: column {place} does not fit",
                )
        found.append(prefix + entry[end:])
    return found
