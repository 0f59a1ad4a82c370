"""Columns of Arrow as rows of the online store, without an object for a row.

A row has the bytes that `OnlineStore.online_write_batch` writes. Each feature is one field of a
`RepeatedValue` of Feast, so a row is its head and the pieces of its features, joined by Arrow:

    piece := 0x0a | length of Value, varint | Value
    Value := nothing, for a null | number of the field and wire type, one byte | payload
    payload := varint | 4 bytes | 8 bytes | length, varint, and bytes

    entity key := number of join keys u32 | names, each: STRING u32, length u32, UTF-8
                  | values in the order of the names, each: type u32, length u32, bytes

Types of features that are no plain scalars, such as arrays and structs, are converted by Feast, a
column at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from feast.infra.key_encoding_utils import serialize_entity_key_prefix
from feast.protos.feast.types.Value_pb2 import RepeatedValue, Value
from feast.type_map import VALUE_TYPE_TO_PROTO_VALUE_MAP, python_values_to_proto_values
from feast.value_type import ValueType

from kvstore.feast.online import HEAD, FeatureNames

_PIECE: Final = 0x0A
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
"""Wire types of protobuf."""
_VARINT_BYTES_MAX: Final = 10
_INTEGERS: Final = {ValueType.INT32: pa.int32(), ValueType.INT64: pa.int64()}
_FLOATS: Final = {ValueType.FLOAT: ("<f4", _FOUR), ValueType.DOUBLE: ("<f8", _EIGHT)}
_TEXTS: Final = {ValueType.STRING: pa.string(), ValueType.BYTES: pa.binary()}

_Bytes = npt.NDArray[np.uint8]
_Lengths = npt.NDArray[np.int64]


def entity_keys(
    prefix: bytes, columns: Mapping[str, pa.Array], kinds: Mapping[str, ValueType]
) -> pa.Array | None:
    """The keys of the rows of entities: binary, `prefix` first. `columns` are the join keys. None
    if a key is null, or has a type of another kind than Feast's: Feast converts or refuses it."""
    names = sorted(columns)
    pieces: list[Any] = [prefix + serialize_entity_key_prefix(names, 3)]
    for name in names:
        kind = kinds[name]
        column = _exact(columns[name], {**_INTEGERS, **_TEXTS}.get(kind))
        if column is None or column.null_count:
            return None
        head = struct.pack("<I", kind.value)
        if kind in _INTEGERS:
            numbers = column.to_numpy().astype("<i4" if kind is ValueType.INT32 else "<i8")
            width = numbers.itemsize
            pieces += [head + struct.pack("<I", width), _fixed(_as_bytes(numbers), width)]
        else:
            sizes = _sizes(column).astype("<u4")
            pieces += [head, _fixed(_as_bytes(sizes), 4), column.cast(pa.binary())]
    return pc.binary_join_element_wise(*pieces, b"")


def row_values(
    heads: pa.Array, columns: Sequence[pa.Array], kinds: Sequence[ValueType]
) -> pa.Array:
    """The values of rows: their heads and the pieces of their features."""
    pieces = [heads]
    for column, kind in zip(columns, kinds, strict=True):
        pieces += _pieces(column, kind)
    return pc.binary_join_element_wise(*pieces, b"")


_HEADS: Final = np.dtype([("event", "<i8"), ("created", "<i8"), ("layout", "V8")])
assert _HEADS.itemsize == HEAD.size


def row_heads(events: Any, created: Any, layout: FeatureNames) -> pa.Array:
    """What rows begin with; times are microseconds."""
    heads = np.zeros(len(events), _HEADS)
    heads["event"], heads["created"] = events, created
    heads["layout"] = np.void(layout.digest)
    return _fixed(_as_bytes(heads), HEAD.size)


def times_of(values: pa.Array) -> Any:
    """The event times and the times of creation of stored rows: two columns of microseconds."""
    heads = pc.binary_slice(values, 0, HEAD.size).cast(pa.binary(HEAD.size))
    data = heads.buffers()[1]
    found = np.frombuffer(data, _HEADS, len(heads), heads.offset * HEAD.size)
    return found["event"], found["created"]


def _pieces(column: pa.Array, kind: ValueType) -> list[pa.Array]:
    """Columns of bytes that make the pieces of one feature, side by side."""
    if kind in _INTEGERS and (plain := _exact(column, _INTEGERS[kind])) is not None:
        numbers = plain.cast(pa.int64()).fill_null(0).to_numpy()
        return [_varint_pieces(numbers, kind, _validity(plain))]
    if kind is ValueType.UNIX_TIMESTAMP and pa.types.is_timestamp(column.type):
        # As Feast has it, a null is the smallest number here.
        seconds = column.to_numpy(zero_copy_only=False).astype("datetime64[s]").astype(np.int64)
        return [_varint_pieces(seconds, kind, np.ones(len(column), bool))]
    if kind is ValueType.BOOL and pa.types.is_boolean(column.type):
        numbers = column.cast(pa.int8()).fill_null(0).to_numpy().astype(np.int64)
        return [_varint_pieces(numbers, kind, _validity(column))]
    if kind in _FLOATS and _is_float_of(column.type, kind):
        return [_float_pieces(column, kind)]
    if kind in _TEXTS and (plain := _exact(column, _TEXTS[kind])) is not None:
        return _text_pieces(plain.cast(pa.binary()), kind)
    as_feast_reads = pa.array(column.to_pandas(), from_pandas=True).to_numpy(zero_copy_only=False)
    values = python_values_to_proto_values(as_feast_reads, kind)
    return [
        pa.array([RepeatedValue(val=[value]).SerializeToString() for value in values], pa.binary())
    ]


def _exact(column: pa.Array, kind: pa.DataType | None) -> pa.Array | None:
    """A column as a type to which it converts without a loss; None otherwise."""
    if kind is None:
        return None
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    given = column.type
    if given == kind:
        return column
    is_same_kind = (
        pa.types.is_integer(given)
        if pa.types.is_integer(kind)
        else pa.types.is_large_string(given)
        if pa.types.is_string(kind)
        else pa.types.is_large_binary(given) or pa.types.is_fixed_size_binary(given)
    )
    try:
        return column.cast(kind) if is_same_kind else None
    except pa.ArrowInvalid:  # a number is too large: Feast refuses it
        return None


def _is_float_of(given: pa.DataType, kind: ValueType) -> bool:
    """Whether Feast takes these numbers for a feature."""
    return bool(
        pa.types.is_float64(given) or (kind is ValueType.FLOAT and pa.types.is_float32(given))
    )


def _varint_pieces(
    numbers: npt.NDArray[np.int64], kind: ValueType, valid: npt.NDArray[np.bool_]
) -> pa.Array:
    varints, lengths = _varints(numbers.view(np.uint64))
    pieces = np.zeros((len(numbers), 3 + varints.shape[1]), np.uint8)
    pieces[:, 0] = _PIECE
    pieces[:, 1] = np.where(valid, 1 + lengths, 0)
    pieces[:, 2] = _tag(kind, _VARINT)
    pieces[:, 3:] = varints
    return _ragged(pieces, np.where(valid, 3 + lengths, 2))


def _float_pieces(column: pa.Array, kind: ValueType) -> pa.Array:
    form, wire = _FLOATS[kind]
    with np.errstate(over="ignore"):  # infinity, as protobuf has it
        numbers = column.to_numpy(zero_copy_only=False).astype(form)
    width = numbers.itemsize
    is_null = np.isnan(column.to_numpy(zero_copy_only=False))  # as Feast has it
    pieces = np.empty((len(numbers), 3 + width), np.uint8)
    pieces[:, 0] = _PIECE
    pieces[:, 1] = np.where(is_null, 0, 1 + width)
    pieces[:, 2] = _tag(kind, wire)
    pieces[:, 3:] = _as_bytes(numbers).reshape(-1, width)
    return _ragged(pieces, np.where(is_null, 2, 3 + width))


def _text_pieces(texts: pa.Array, kind: ValueType) -> list[pa.Array]:
    valid, sizes = _validity(texts), _sizes(texts)
    own, own_lengths = _varints(sizes.astype(np.uint64))
    whole, whole_lengths = _varints((1 + own_lengths + sizes).astype(np.uint64))
    heads = np.zeros((len(texts), 2 + whole.shape[1] + own.shape[1]), np.uint8)
    at = np.arange(len(texts))
    heads[:, 0] = _PIECE
    heads[:, 1 : 1 + whole.shape[1]] = whole
    heads[at, 1 + whole_lengths] = _tag(kind, _BYTES)
    for place in range(own.shape[1]):
        heads[at, 2 + whole_lengths + place] = own[:, place]
    heads[~valid, 1] = 0
    lengths = np.where(valid, 2 + whole_lengths + own_lengths, 2)
    return [_ragged(heads, lengths), texts.fill_null(b"")]


def _tag(kind: ValueType, wire: int) -> int:
    number: int = Value.DESCRIPTOR.fields_by_name[VALUE_TYPE_TO_PROTO_VALUE_MAP[kind]].number
    return number << 3 | wire


def _varints(numbers: npt.NDArray[np.uint64]) -> tuple[_Bytes, _Lengths]:
    """Each number as a varint: bytes of one width, and how many of them count."""
    top = int(numbers.max()) if len(numbers) else 0
    width = min(max(-(-top.bit_length() // 7), 1), _VARINT_BYTES_MAX)
    found = np.empty((len(numbers), width), np.uint8)
    lengths = np.ones(len(numbers), np.int64)
    rest = numbers
    for place in range(width):
        more = rest > 0x7F
        found[:, place] = (rest & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7)
        lengths += more
        rest = rest >> np.uint64(7)
    return found, lengths


def _validity(column: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return found


def _sizes(texts: pa.Array) -> _Lengths:
    """Bytes of each text; a null has none."""
    found: _Lengths = pc.binary_length(texts).fill_null(0).to_numpy().astype(np.int64)
    return found


def _as_bytes(numbers: Any) -> _Bytes:
    return np.ascontiguousarray(numbers).view(np.uint8)


def _fixed(data: _Bytes, width: int) -> pa.Array:
    """Texts of one width."""
    count = data.size // width
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def _ragged(rows: _Bytes, lengths: _Lengths) -> pa.Array:
    """The first bytes of each row, as many as `lengths` tells."""
    count, width = rows.shape
    if count and int(lengths.min()) == width:
        return _fixed(rows.reshape(-1), width)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    data = rows[np.arange(width) < lengths[:, None]]
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
