"""The packed entry: golden bytes, round trips, and refusal of fields that do not agree."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.changes.index import (
    OP_DELETE,
    OP_DELETE_RANGE,
    OP_IMPORT,
    OP_PUT,
    OP_PUT_LARGE,
    OP_REVERT,
    Commit,
    PackedColumn,
    Row,
    column,
    pack,
    pack_writes,
    peek,
    unpack,
)
from kvstore.changes.windows import of_puts
from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.limits import COMPRESS_FROM_BYTES

keys = st.binary(max_size=40)
nothing = st.just(b"")
row = st.one_of(
    st.builds(Row, st.just(OP_PUT), keys, st.binary(max_size=400)),
    st.builds(Row, st.sampled_from([OP_DELETE, OP_PUT_LARGE]), keys, nothing),
    st.builds(
        lambda start, more: Row(OP_DELETE_RANGE, start, start + more), keys, st.binary(min_size=1)
    ),
    st.builds(
        Row,
        st.sampled_from([OP_IMPORT, OP_REVERT]),
        st.binary(min_size=8, max_size=8),
        nothing,
    ),
)
rows = st.lists(row)


def columns(found: list[Row]) -> tuple[PackedColumn, PackedColumn]:
    return column([row.key for row in found]), column([row.value for row in found])


def packed(found: list[Row], *, is_last: bool = True) -> bytes:
    ops = bytes(row.op for row in found)
    return pack(ops, *columns(found), is_last=is_last)


def test_golden_entry() -> None:
    entry = pack(
        bytes([OP_DELETE_RANGE, OP_PUT, OP_DELETE]),
        column([b"a", b"bc", b""]),
        column([b"z", b"v", b""]),
        changeset=(1, 2),
    )
    assert entry.hex() == (
        "01000100"
        "03000000"
        "28000000"  # version, codec, flags, count, body bytes
        "0100000000000000"
        "0200000000000000"  # domain, changeset
        "00000000"
        "01000000"
        "03000000"
        "03000000"  # key offsets
        "00000000"
        "01000000"
        "02000000"
        "02000000"  # value offsets
        "616263"
        "7a76"
        "050103"  # keys, values, ops
    )


def test_golden_entry_of_a_commit_over_several_streams() -> None:
    keys, values = column([b"a", b"b"]), column([b"", b"v"])
    entry = pack(bytes([OP_PUT, OP_PUT]), keys, values, is_last=False, sequence=[1, 258])
    assert entry.hex() == (
        "01000200"
        "02000000"
        "25000000"  # version, codec, flags: not the last, sequenced; count, body bytes
        "0000000000000000"
        "0000000000000000"  # no changeset
        "00000000"
        "01000000"
        "02000000"  # key offsets
        "00000000"
        "00000000"
        "01000000"  # value offsets
        "01000000"
        "02010000"  # sequence
        "6162"
        "76"
        "0101"  # keys, values, ops
    )


@given(rows.filter(bool), st.integers(0, (1 << 31) - 100))
def test_sequences_come_back_and_headers_can_be_read_alone(found: list[Row], first: int) -> None:
    numbers = list(range(first, first + len(found)))
    entry = pack(
        bytes(row.op for row in found),
        *columns(found),
        changeset=(3, first),
        sequence=numbers,
    )
    opened = unpack(entry, where="here")
    assert opened.sequence is not None
    assert opened.sequence.tolist() == numbers
    assert list(opened.rows()) == found
    assert peek(entry, where="here") == (len(found), (3, first))


@pytest.mark.parametrize("count", [1, 127, 400])
def test_columns_say_how_long_their_longest_item_is(count: int) -> None:
    found = [Row(OP_PUT, b"k" * (n % 7), b"v" * (n % 5)) for n in range(count)]
    assert list(unpack(packed(found), where="here").rows()) == found
    assert columns(found)[0].longest() == min(count - 1, 6)


@pytest.mark.parametrize("count", [1, 128])
def test_columns_of_nothing_but_empty_items(count: int) -> None:
    found = [Row(OP_DELETE, b"", b"")] * count
    assert list(unpack(packed(found), where="here").rows()) == found
    assert columns(found)[0].longest() == 0


@pytest.mark.parametrize("count", [1, 128])
def test_a_missing_item_is_no_column(count: int) -> None:
    with pytest.raises(TypeError):
        column([b"v"] * (count - 1) + [None])  # type: ignore[list-item]


@given(rows, st.booleans())
def test_entries_come_back(found: list[Row], is_last: bool) -> None:
    entry = unpack(packed(found, is_last=is_last), where="here")
    assert list(entry.rows()) == found
    assert (entry.count, entry.is_last) == (len(found), is_last)


@given(
    st.dictionaries(st.binary(max_size=3), st.none() | st.binary(max_size=5), max_size=9),
    st.lists(st.tuples(st.binary(max_size=3), st.binary(max_size=9)), max_size=2),
    st.booleans(),
)
def test_writes_are_packed_as_their_columns_are(
    points: dict[bytes, bytes | None], ranges: list[tuple[bytes, bytes]], is_sequenced: bool
) -> None:
    count = len(ranges) + len(points)
    sequence = range(7, 7 + count) if is_sequenced else None
    packed = pack_writes(points, ranges, 4, (3, 4), sequence)
    values = [value or b"" for value in points.values()]
    if any(len(value) > 4 for value in values):
        assert packed is None
        return
    of_points = (OP_DELETE if value is None else OP_PUT for value in points.values())
    ops = bytes([*[OP_DELETE_RANGE] * len(ranges), *of_points])
    columns = column([*(a for a, _ in ranges), *points]), column([*(b for _, b in ranges), *values])
    assert packed == pack(ops, *columns, changeset=(3, 4), sequence=sequence)


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_writes_are_compressed_as_their_columns_are(beyond: int) -> None:
    offsets, op = 16, 1
    value = b"v" * (COMPRESS_FROM_BYTES - offsets - len(b"k") - op + beyond)
    packed = pack_writes({b"k": value}, (), len(value))
    assert packed == pack(bytes([OP_PUT]), column([b"k"]), column([value]))
    assert (packed is not None and len(packed) < len(value)) == (beyond >= 0)


def test_an_entry_of_no_rows_has_no_events() -> None:
    entry = unpack(pack(b"", column([]), column([])), where="here")
    assert list(of_puts(Commit(5, 0, entry), "post")) == []


def test_large_entries_are_compressed_and_come_back() -> None:
    found = [Row(OP_PUT, b"key%06d" % n, b"value" * 5) for n in range(5000)]
    entry = packed(found)
    assert len(entry) < sum(len(row.key) + len(row.value) for row in found) / 2
    assert list(unpack(entry, where="here").rows()) == found
    assert len(packed(found[:1])) < COMPRESS_FROM_BYTES


@given(rows.filter(bool), st.data())
def test_cut_entries_are_corruption(found: list[Row], data: st.DataObject) -> None:
    entry = packed(found)
    cut = data.draw(st.integers(0, len(entry) - 1))
    with pytest.raises(CorruptionError) as error:
        unpack(entry[:cut], where="here")
    assert error.value.where == "here"


@pytest.mark.parametrize(("at", "value"), [(0, 2), (0, 0), (1, 7)])
def test_unknown_versions_and_codecs_are_refused_by_name(at: int, value: int) -> None:
    entry = bytearray(packed([Row(OP_PUT, b"k", b"v")]))
    entry[at] = value
    with pytest.raises(FormatVersionError):
        unpack(bytes(entry), where="here")


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (4, 1 << 31),  # count
        (4, 2),
        (8, 1 << 31),  # body bytes
        (28, 1),  # first key offset
        (32, 1 << 30),  # last key offset
        (32, (1 << 32) - 5),  # negative
        (36, 1),  # first value offset
        (40, (1 << 32) - 1),
        (0, 1 | 4 << 16),  # flags
        (0, 1 | 1 << 24),  # the reserved byte
        (16, 1 << 31),  # domain, upper half
        (49, OP_DELETE),  # an operation without a value
        (49, OP_IMPORT),  # an operation whose key has eight bytes
        (49, 2),  # no operation
        (49, 255),
    ],
)
def test_numbers_that_do_not_add_up_are_corruption(offset: int, value: int) -> None:
    entry = bytearray(packed([Row(OP_PUT, b"key", b"value")]))
    struct.pack_into("<I", entry, offset, value)
    with pytest.raises(CorruptionError):
        unpack(bytes(entry), where="here")


def test_damaged_compression_is_corruption() -> None:
    entry = bytearray(packed([Row(OP_PUT, b"key%06d" % n, b"v" * 50) for n in range(200)]))
    for broken in (entry[:-20], entry[:28] + b"\xff" * (len(entry) - 28)):
        with pytest.raises(CorruptionError):
            unpack(bytes(broken), where="here")


def test_an_epoch_can_end_above_every_serial() -> None:
    for serial, is_one in (((1 << 64) - 2, True), ((1 << 64) - 1, False)):
        entry = pack(bytes([OP_PUT]), column([b"k"]), column([b"v"]), changeset=(1, serial))
        for read in (unpack, peek):
            if is_one:
                read(entry, where="here")
            else:
                with pytest.raises(CorruptionError):
                    read(entry, where="here")


def entry_of(body: bytes, count: int, *, flags: int = 1, codec: int = 0, size: int = -1) -> bytes:
    """An entry with a body of any kind."""
    stated = len(body) if size < 0 else size
    return struct.pack("<BBBBIIQQ", 1, codec, flags, 0, count, stated, 0, 0) + body


def body_of(
    count: int, keys: list[int], values: list[int], ops: bytes, places: list[int] | None = None
) -> bytes:
    """A body with these offsets, and as many bytes as the last offset says."""
    numbers = struct.pack(f"<{2 * count + 2}i", *keys, *values)
    numbers += b"" if places is None else struct.pack(f"<{count}i", *places)
    return numbers + b"k" * keys[-1] + b"v" * values[-1] + ops


MANY = 600
"""The number of rows from which on record batches take an entry as a whole."""


@pytest.mark.parametrize("column_at", ["keys", "values"])
@pytest.mark.parametrize("wrong", [-1, -(1 << 31), 1 << 30, (1 << 31) - 1, 3 * MANY + 1])
@pytest.mark.parametrize("place", [0, 1, MANY // 2, MANY - 1, MANY])
def test_inner_offsets_that_do_not_ascend_are_corruption(
    column_at: str, wrong: int, place: int
) -> None:
    offsets = {"keys": [3 * n for n in range(MANY + 1)], "values": [2 * n for n in range(MANY + 1)]}
    body = body_of(MANY, **offsets, ops=bytes([OP_PUT]) * MANY)
    assert unpack(entry_of(body, MANY), where="here").count == MANY
    damaged = bytearray(body)
    at = 4 * place + (4 * (MANY + 1) if column_at == "values" else 0)
    struct.pack_into("<i", damaged, at, wrong)
    with pytest.raises(CorruptionError) as raised:
        unpack(entry_of(bytes(damaged), MANY), where="here")
    assert raised.value.where == "here"


@pytest.mark.parametrize("places", [[1, 0], [1, 1], [-1, 0], [0, -1], [-(1 << 31), (1 << 31) - 1]])
def test_places_that_do_not_ascend_are_corruption(places: list[int]) -> None:
    body = body_of(2, [0, 1, 2], [0, 1, 2], bytes([OP_PUT]) * 2, places)
    with pytest.raises(CorruptionError, match="places"):
        unpack(entry_of(body, 2, flags=3), where="here")


@pytest.mark.parametrize(
    "found",
    [
        Row(OP_DELETE, b"k", b"v"),
        Row(OP_PUT_LARGE, b"k", b"v"),
        Row(OP_DELETE_RANGE, b"k", b"k"),
        Row(OP_DELETE_RANGE, b"k", b"a"),
        Row(OP_DELETE_RANGE, b"k1", b"k"),
        Row(OP_DELETE_RANGE, b"", b""),
        Row(OP_IMPORT, b"1234567", b""),
        Row(OP_IMPORT, b"12345678", b"v"),
        Row(OP_REVERT, b"", b""),
        Row(0, b"k", b"v"),
        Row(2, b"k", b""),
        Row(66, b"k", b""),
    ],
)
def test_rows_that_do_not_fit_their_operation_are_corruption(found: Row) -> None:
    good = Row(OP_PUT, b"k", b"v")
    with pytest.raises(CorruptionError, match=f"row 1 .* operation {found.op}"):
        unpack(packed([good, found, good]), where="here")


BLOCK = pa.compress(body_of(1, [0, 40_000], [0, 1], bytes([OP_PUT])), codec="lz4_raw", asbytes=True)


@pytest.mark.parametrize("size", [0, 1, 40_017, 40_019, 100_000, (1 << 32) - 1])
def test_a_size_that_is_not_the_blocks_costs_no_memory(size: int) -> None:
    """The decoder would allocate as many bytes as the entry declares, and leave the rest
    uninitialised."""
    unpack(entry_of(BLOCK, 1, codec=1, size=40_018), where="here")
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptionError):
        unpack(entry_of(BLOCK, 1, codec=1, size=size), where="here")
    assert pa.total_allocated_bytes() == before
    assert pa.default_memory_pool().max_memory() <= max(peak, before + 100_000)
