"""Keys of rows and entries of indexes: some columns as bytes that sort as the columns do."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa

from kvstore.arguments import key_list
from kvstore.arrow import array_of, binary_array
from kvstore.codec.decimals import decode_decimal, encode_decimal
from kvstore.codec.ordered import frame
from kvstore.codec.tuples import (
    FALSE,
    NULL,
    SIGN,
    TRUE,
    UNSIGNED,
    desc,
    elements,
    encode_double,
    flip,
)
from kvstore.errors import CorruptionError, UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.loops import contract
from kvstore.loops.elements import decode_keys, encode_keys
from kvstore.loops.single import KeyMaker, row_keys
from kvstore.tables.definition import Column, Definition, KeyPart
from kvstore.tables.exact import as_python
from kvstore.tables.kinds import Kind
from kvstore.tables.rows import array_made, cell_buffers

_TAGGED: Final = struct.Struct(">BQ")
_EIGHT_BYTES: Final = struct.Struct(">Q")
_OneElement = Callable[[Any], bytes]


class KeyCodec:
    """Keys of `prefix` and, behind it, the columns of `parts`."""

    def __init__(self, definition: Definition, prefix: bytes, parts: Sequence[KeyPart]) -> None:
        self.prefix = prefix
        self._where = definition.where
        self.columns = [definition.by_id[part.id] for part in parts]
        self.parts = tuple(parts)
        self._makers = [
            _maker(column.kind, is_falling=part.is_falling)
            for column, part in zip(self.columns, parts, strict=True)
        ]
        maker = KeyMaker(prefix, list(map(_made, self.columns, parts, self._makers)))
        self._make, self.fits = maker.make, maker.fits
        self._shapes = [
            (column.kind.key_kind, column.kind.tag[0], part.is_falling, column.kind.key_width)
            for column, part in zip(self.columns, parts, strict=True)
        ]

    def key(self, values: Sequence[Any]) -> bytes:
        """The key that begins with `values`, of some of the columns from the first on."""
        try:
            return self._make(values)
        except ValueError:
            self._refuse(values)

    def whole_key(self, values: Sequence[Any]) -> bytes:
        """The key of values for all columns, none of them null."""
        if len(values) != len(self._makers) or None in values:
            self._refuse_values(values)
        try:
            return self._make(values)
        except ValueError:
            self._refuse(values)

    def stored_key(self, values: Sequence[Any]) -> bytes:
        """As `whole_key`, also of a row that cannot be read: bytes stand for a text that is no
        UTF-8, and a number of days or units for a time that Python does not have."""
        try:
            return self.whole_key(values)
        except UsageError:
            if len(values) != len(self.columns) or None in values:
                raise
            elements = []
            for column, part, value in zip(self.columns, self.parts, values, strict=True):
                as_stored = replace(column.kind, stored=_stored_as_given(column.kind))
                try:
                    elements.append(_maker(as_stored, is_falling=part.is_falling)(value))
                except ValueError:
                    break
            else:
                return self.prefix + b"".join(elements)
            raise

    def named(self, key: bytes) -> str:
        """A key by its columns, for errors: `k=7, day=...`. Any value is shown as `stored_key`
        takes it; bytes that are no key are shown in hex."""
        try:
            arrays = self.arrays(binary_array([key]))
        except CorruptionError:
            return f"key {key.hex()}"
        values = (f"{as_python(array, 0)!r:.100}" for array in arrays)
        return ", ".join(
            f"{column.name}={value}" for column, value in zip(self.columns, values, strict=True)
        )

    def require(self, keys: Sequence[bytes]) -> None:
        """Raise `CorruptionError` for bytes that are no key."""
        self.arrays(binary_array(keys))

    def whole_keys(self, keys: Iterable[Any]) -> list[bytes]:
        """The keys of many tuples, or of the values of a key of one column."""
        return [
            self.whole_key(key if isinstance(key, tuple | list) else self._single(key))
            for key in key_list(keys)
        ]

    def _single(self, value: Any) -> tuple[Any]:
        if len(self.columns) > 1:
            names = ", ".join(column.name for column in self.columns)
            raise UsageError(f"{self._where}: {value!r:.100} is no key", f"pass ({names})")
        return (value,)

    def keys(self, batch: pa.RecordBatch) -> pa.Array:
        """The keys of the rows of a batch, binary."""
        columns = [
            (kind, tag, is_falling, *_key_buffers(column.kind, batch.column(column.name)))
            for column, (kind, tag, is_falling, _) in zip(self.columns, self._shapes, strict=True)
        ]
        encoded = encode_keys(self.prefix, columns, batch.num_rows)
        if encoded is None:
            raise UsageError(
                f"{self._where}: the keys of {batch.num_rows} rows have 2 GiB", "pass fewer rows"
            )
        keys = array_of(batch.num_rows, *encoded)
        lengths = np.diff(np.frombuffer(encoded[0], np.int32))
        if len(lengths) and lengths.max() > KEY_BYTES_MAX:
            at = int(lengths.argmax())
            raise UsageError(
                f"{self._where}: the key of row {at} has {lengths[at]} bytes",
                f"at most {KEY_BYTES_MAX} are allowed",
            )
        return keys

    def arrays(self, keys: pa.Array) -> list[pa.Array]:
        """The columns of keys. Raises `CorruptionError` for bytes that are no key. A key of an
        older release may have values that its columns do not hold."""
        made, ends = self._decoded(keys, len(self.columns))
        _, offsets, _ = keys.buffers()
        bounds = np.frombuffer(offsets or b"", np.int32)
        bounds = bounds[keys.offset + 1 : keys.offset + len(keys) + 1]
        wrong = np.flatnonzero(ends != bounds)
        if len(wrong):
            self._refuse_key(keys[int(wrong[0])].as_py())
        return [
            _key_array(column, buffers, len(keys), self._where)
            for column, buffers in zip(self.columns, made, strict=True)
        ]

    def reads(self, names: Collection[str]) -> list[contract.KeyRead]:
        """The columns as `RowDicts` takes them, to read the columns `names`."""
        return [
            (column.name if column.name in names else None, *shape, *_read_way(column.kind))
            for column, shape in zip(self.columns, self._shapes, strict=True)
        ]

    def row_keys(self, entries: Sequence[bytes], count: int, prefix: bytes) -> list[bytes]:
        """The keys of rows that entries of an index lead to, behind its first `count` columns. A
        row's key begins with `prefix`."""
        return row_keys(entries, len(self.prefix), self._shapes[:count], prefix, self._where)

    def part_ends(self, keys: pa.Array, count: int) -> list[int]:
        """Where the first `count` columns of each key end."""
        _, offsets, _ = keys.buffers()
        starts = np.frombuffer(offsets or b"", np.int32)[keys.offset : keys.offset + len(keys)]
        ends: list[int] = (self._decoded(keys, count)[1] - starts).tolist()
        return ends

    def _decoded(self, keys: pa.Array, count: int) -> tuple[Any, Any]:
        """The buffers of the first `count` columns of keys, and the offset within the bytes of
        `keys` at which they end in each."""
        _, offsets, data = keys.buffers()
        made, ends = decode_keys(
            *(offsets, data or b"", keys.offset, len(keys)),
            *(len(self.prefix), self._shapes[:count], self._where),
        )
        return made, np.frombuffer(ends, np.int32)

    def values(self, key: bytes) -> list[Any]:
        """The values of the columns of one key. Raises as `arrays`."""
        found: list[Any] = []
        end = 0
        for column, part, (element, end) in zip(  # noqa: B007  # the end of the last one counts
            self.columns, self.parts, elements(key, len(self.prefix)), strict=False
        ):
            value = element.value if isinstance(element, desc) else element
            found.append(_typed(column, value))
            if isinstance(element, desc) is not part.is_falling:
                self._refuse_key(key)
        if len(found) != len(self.columns) or end != len(key):
            self._refuse_key(key)
        return found

    def _refuse(self, values: Sequence[Any]) -> NoReturn:
        """Raise `UsageError` for values that make no key."""
        if len(values) > len(self._makers):
            self._refuse_values(values)
        for column, make, value in zip(self.columns, self._makers, values, strict=False):
            try:
                make(value)
            except ValueError as error:  # noqa: PERF203  # the values were refused
                raise UsageError(
                    f"{self._where}, column {column.name!r}: {error}", "correct the value"
                ) from None
        raise AssertionError("a key was refused, and each of its values is taken")

    def _refuse_key(self, key: bytes) -> NoReturn:
        raise CorruptionError(f"{self._where}, key {key.hex()}", "no key of its table")

    def _refuse_values(self, values: Sequence[Any]) -> NoReturn:
        names = ", ".join(column.name for column in self.columns)
        if len(values) != len(self._makers):
            raise UsageError(
                f"{self._where}: {len(values)} values for a key of {len(self._makers)}",
                f"the key is {names}",
            )
        null = self.columns[list(values).index(None)]
        raise UsageError(
            f"{self._where}, column {null.name!r}: a key is never null",
            "pass a value for each column of the key",
        )


def _made(column: Column, part: KeyPart, make: _OneElement) -> contract.KeyMade:
    """A column of keys as `KeyMaker` takes it. `make` makes the elements that the loops cannot
    make."""
    kind, least, most = column.kind, 0, 0
    way = contract.CALLED if kind.code == "f" else kind.way  # a float32 rounds
    if kind.key_kind in (contract.SIGNED, contract.UNSIGNED) and way == contract.STORED:
        if pa.types.is_integer(kind.type):
            is_signed = pa.types.is_signed_integer(kind.type)
            most = min((1 << 8 * kind.width - is_signed) - 1, SIGN - 1)
            least = -most - 1 if is_signed else 0
        else:
            way = contract.CALLED
    elif kind.key_kind == contract.FRAMED and kind.width:
        way = contract.CALLED
    return kind.key_kind, kind.tag[0], part.is_falling, way, least, most, make


def _read_way(kind: Kind) -> tuple[int, Callable[[Any], Any] | None]:
    """The way by which the loops turn an element into a value of Python, and the function that they
    call for `CALLED`."""
    value = kind.value
    if kind.key_kind == contract.WHOLE:
        assert value is not None
        return contract.CALLED, lambda cell: value(kind.stored(decode_decimal(cell)))
    return kind.way, value


def _maker(kind: Kind, *, is_falling: bool) -> _OneElement:
    """The function that makes an element of one value."""
    make = _plain_maker(kind)

    def falling(value: Any) -> bytes:
        return flip(NULL if value is None else make(value))

    def rising(value: Any) -> bytes:
        return NULL if value is None else make(value)

    return falling if is_falling else rising


def _stored_as_given(kind: Kind) -> Callable[[Any], Any]:
    """As `kind.stored`, and what `as_python` gives for a value that the column does not hold."""

    def stored(value: Any) -> Any:
        if kind.way == contract.TEXT and isinstance(value, bytes):
            return value
        if pa.types.is_temporal(kind.type) and type(value) is int and -SIGN <= value < SIGN:
            return value
        return kind.stored(value)

    return stored


def _plain_maker(kind: Kind) -> _OneElement:
    stored, tag = kind.stored, kind.tag
    number, pack = tag[0], _TAGGED.pack
    if kind.key_kind == contract.SIGNED:
        return lambda value: pack(number, stored(value) + SIGN)
    if kind.key_kind == contract.UNSIGNED:

        def unsigned(value: Any) -> bytes:
            found = stored(value)
            is_large = found >= SIGN
            return UNSIGNED + _EIGHT_BYTES.pack(found) if is_large else pack(number, found + SIGN)

        return unsigned
    if kind.key_kind == contract.DOUBLE:
        if kind.width == 4:  # as the column of floats has it
            single = struct.Struct("<f")
            return lambda value: tag + encode_double(single.unpack(single.pack(stored(value)))[0])
        return lambda value: tag + encode_double(stored(value))
    if kind.key_kind == contract.BOOLEAN:
        return lambda value: TRUE if stored(value) else FALSE
    if kind.key_kind == contract.FIXED:
        return lambda value: tag + stored(value)
    if kind.key_kind == contract.WHOLE:
        value_of = kind.value
        assert value_of is not None
        return lambda value: tag + encode_decimal(value_of(stored(value)))
    return lambda value: tag + frame(stored(value))


def _key_buffers(kind: Kind, column: pa.Array) -> contract.Column:
    """The buffers of a column as the loops of keys take it."""
    if kind.key_kind == contract.WHOLE:
        cells = [None if each is None else encode_decimal(each) for each in column.to_pylist()]
        return cell_buffers(pa.array(cells, pa.binary()), 0)
    if kind.key_kind == contract.DOUBLE:
        column = column.cast(pa.float64())
    elif kind.key_kind in (contract.SIGNED, contract.UNSIGNED) and kind.width < 8:
        if not pa.types.is_integer(column.type):
            column = column.cast(pa.int32())
        column = column.cast(pa.int64())
    elif kind.key_kind == contract.FRAMED and kind.width:
        column = column.cast(pa.binary())
    return cell_buffers(column, kind.key_width)


def _key_array(column: Column, buffers: contract.Made, count: int, where: str) -> pa.Array:
    """A column of a key from its buffers."""
    kind = column.kind
    if kind.key_kind == contract.WHOLE:
        try:
            return pa.array(_decimal_values(array_made(pa.binary(), buffers, count)), kind.type)
        except pa.ArrowInvalid as error:
            raise CorruptionError(f"{where}, column {column.name!r}", str(error)) from error
    if kind.key_kind in (contract.SIGNED, contract.UNSIGNED, contract.DOUBLE):
        if kind.width == 8:
            return array_made(kind.type, buffers, count)
        wide = pa.float64() if kind.key_kind == contract.DOUBLE else pa.int64()
        narrow = kind.type if pa.types.is_primitive(kind.type) else kind.storage
        found = array_made(wide, buffers, count)
        try:
            if not pa.types.is_integer(narrow) and kind.key_kind == contract.SIGNED:
                found = found.cast(pa.int32())
            return found.cast(narrow)
        except pa.ArrowInvalid as error:
            raise CorruptionError(f"{where}, column {column.name!r}", str(error)) from error
    if kind.key_kind == contract.FRAMED and kind.width:
        return array_made(pa.binary(), buffers, count).cast(kind.type)
    return array_made(kind.type, buffers, count)


def _decimal_values(cells: pa.Array) -> list[Any]:
    return [None if cell is None else decode_decimal(cell) for cell in cells.to_pylist()]


def _typed(column: Column, value: Any) -> Any:
    """A value of a tuple as its column has it."""
    kind = column.kind
    if value is None:
        return None
    if kind.key_kind == contract.WHOLE:
        assert kind.value is not None
        return kind.value(kind.stored(value))
    if type(value) is int and kind.value is not None:
        return kind.value(value)
    return value
