"""The loops over blocks give the answers of their oracle to any bytes."""

from __future__ import annotations

import random
from itertools import pairwise, takewhile
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore.codec.keys import TAIL_BYTES
from kvstore.loops import blocks
from kvstore.loops.blocks import block_handles, block_keys, referring_keys, unpack_lz4, xxh3
from tests.harness.varints import varint
from tests.loops import blocks_oracle, raw, stored_key

SUFFIX = b"\x01\x00"
LONGEST, MOST = 40, 4


def block(rows: dict[bytes, bytes], whole_each: int) -> bytes:
    """The contents of a block with the rows, as RocksDB makes it: the first key of each
    `whole_each` is whole."""
    entries, restarts, before = bytearray(), list[int](), b""
    for number, key in enumerate(sorted(rows)):
        stored = key + SUFFIX
        alike = (one == other for one, other in zip(before, stored, strict=False))
        shared = sum(takewhile(bool, alike))
        if number % whole_each == 0:
            restarts.append(len(entries))
            shared = 0
        fresh = stored[shared:]
        entries += varint(shared) + varint(len(fresh)) + varint(len(rows[key])) + fresh + rows[key]
        before = stored
    places = b"".join(at.to_bytes(4, "little") for at in restarts)
    return bytes(entries) + places + len(restarts).to_bytes(4, "little")


keys = st.binary(max_size=6) | st.binary(max_size=2).map(lambda tail: b"prefix" * 4 + tail)
rows = st.dictionaries(keys, st.binary(max_size=9) | st.just(bytes(300)), min_size=1, max_size=12)


@given(rows, st.integers(1, MOST))
def test_a_block_has_the_rows_that_were_written(rows: dict[bytes, bytes], whole_each: int) -> None:
    values: list[bytes] = []
    contents = block(rows, whole_each)
    assert block_keys(contents, SUFFIX, LONGEST, MOST, values) == sorted(rows)
    assert values == [rows[key] for key in sorted(rows)]
    assert block_keys(contents, SUFFIX, LONGEST, MOST) == sorted(rows)
    with_suffix = [key + SUFFIX for key in sorted(rows)]
    if with_suffix == sorted(with_suffix):
        assert block_keys(contents, b"", LONGEST, MOST) == with_suffix


@st.composite
def altered(draw: st.DrawFn) -> bytes:
    """Blocks of which some bytes are others, or missing, or too many."""
    contents = bytearray(block(draw(rows), draw(st.integers(1, MOST + 1))))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(contents) - 1))
        contents[at] = draw(st.integers(0, 255) | st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(contents)))
        contents[at:at] = draw(st.binary(max_size=3) | st.sampled_from([b"\xff" * 9, b"\x80" * 10]))
    return bytes(contents[draw(st.sampled_from([0, 0, 0, 1])) :])


def read(half: Any, contents: bytes) -> object:
    values: list[bytes] = []
    try:
        return half.block_keys(contents, SUFFIX, LONGEST, MOST, values), values
    except ValueError:
        return None


@given(altered() | st.binary(max_size=80))
def test_any_block_is_read_alike(contents: bytes) -> None:
    found = read(blocks, contents)
    assert found == read(blocks_oracle, contents)
    if found is not None:
        listed, values = found
        assert len(listed) == len(values) > 0
        assert all(before < after for before, after in pairwise(listed))
        assert max(map(len, listed)) + len(SUFFIX) <= LONGEST


@pytest.mark.parametrize(
    "number",
    [b"\x80" * 9 + b"\x02", b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x7f", b"\x80" * 10 + b"\x00"],
    ids=["2**64", "2**64 - 1", "2**70 - 1", "eleven bytes"],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_number_beyond_a_block_is_refused(number: bytes, at: int) -> None:
    """It must not come around to a small one."""
    heads = [b"\x00", b"\x03", b"\x00"]
    heads[at] = number
    contents = b"".join(heads) + b"k" + SUFFIX + bytes(4) + (1).to_bytes(4, "little")
    with pytest.raises(ValueError):  # each loop has its own words
        block_keys(contents, SUFFIX, LONGEST, MOST)


indexes = st.lists(
    st.tuples(st.binary(max_size=6), st.integers(0, 1 << 40), st.integers(0, 1 << 20)),
    min_size=1,
    max_size=9,
)


@given(indexes)
def test_entries_of_an_index_name_their_blocks(entries: list[tuple[bytes, int, int]]) -> None:
    index, places, expected = b"", [], []
    for key, offset, size in entries:
        places.append(len(index))
        index += varint(0) + varint(len(key)) + key + varint(offset) + varint(size)
        expected.append((offset, size, len(index)))
    assert block_handles(index, places) == expected
    assert block_handles(index + b"\xff", places[::-1]) == expected[::-1]


@given(
    st.binary(max_size=24)
    | st.lists(st.sampled_from([0, 1, 9, 0x80, 0xFF]), max_size=24).map(bytes),
    st.lists(st.integers(0, 30), max_size=3),
)
def test_any_index_is_read_alike(index: bytes, places: list[int]) -> None:
    """A number of more than 64 bits may be read as any that no file can have."""

    def read(half: Any) -> object:
        try:
            found = half.block_handles(index, places)
        except ValueError:
            return None
        return [[min(number, (1 << 64) - 1) for number in entry] for entry in found]

    assert read(blocks) == read(blocks_oracle)


references = st.integers(1, 3).map(lambda number: number.to_bytes(TAIL_BYTES - 1, "big"))


@given(st.lists(st.tuples(raw, references, st.booleans()), max_size=8), references)
def test_keys_that_refer_to_an_import_are_told_from_the_others(
    rows: list[tuple[bytes, bytes, bool]], reference: bytes
) -> None:
    stored = [
        stored_key(key)[:-TAIL_BYTES] + referred + bytes([is_row]) for key, referred, is_row in rows
    ]
    expected = [key for key, referred, _ in rows if referred == reference]
    assert referring_keys(stored, reference) == expected
    assert referring_keys([key[1:] for key in stored], b"") == []


@given(st.lists(raw | st.binary(max_size=12), max_size=4), references)
def test_keys_of_any_form_are_taken_alike(stems: list[bytes], reference: bytes) -> None:
    stored = [stem + reference + b"\x01" for stem in stems] + stems

    def read(half: Any) -> object:
        try:
            return half.referring_keys(stored, reference)
        except ValueError as error:
            return str(error)

    assert read(blocks) == read(blocks_oracle)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_checksums_are_those_of_xxhash(part: bytes, repeats: int) -> None:
    for data in (part, part * repeats):
        assert xxh3(data) == xxh3(memoryview(data)) == xxh3_64_intdigest(data)


def test_checksums_of_every_short_length() -> None:
    data = random.Random(3).randbytes(1_300)
    for size in range(len(data)):
        assert xxh3(data[:size]) == xxh3_64_intdigest(data[:size])


repeated = st.lists(
    st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 60)), max_size=12
).map(lambda parts: b"".join(part * count for part, count in parts))


@given(repeated | st.binary(max_size=400))
def test_a_block_unpacks_to_what_arrow_packed(data: bytes) -> None:
    block = pa.compress(data, codec="lz4_raw", asbytes=True)
    assert unpack_lz4(block, len(data)) == unpack_lz4(memoryview(block), len(data)) == data
    for wrong in {0, 1, len(data) - 1, len(data) + 1, 2 * len(data) + 9} - {len(data), -1}:
        with pytest.raises(ValueError, match="does not unpack"):
            unpack_lz4(block, wrong)


@given(
    st.binary(max_size=60) | st.lists(st.sampled_from([0, 1, 15, 240, 255]), max_size=40).map(bytes)
)
def test_any_block_unpacks_as_the_format_says(block: bytes) -> None:
    data = blocks_oracle.unpacked(block)
    if data is not None:
        assert unpack_lz4(block, len(data)) == data
    for size in {*range(40), 600} - {-1 if data is None else len(data)}:
        with pytest.raises(ValueError, match="does not unpack"):
            unpack_lz4(block, size)
