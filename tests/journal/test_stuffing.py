"""The codec: vectors byte for byte, every short string under tiny limits, and damage."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.storage.journal.framing import (
    PAIR,
    Blocks,
    StuffingError,
    block_ends,
    find_pair,
    stuff,
    stuff_behind,
    unstuff,
    unstuff_prefix,
)

LONG = bytes(range(250)) * 300  # no FE in it
VECTORS = [
    (b"", b""),
    (b"A very short message", PAIR + b"\x14A very short message"),
    (b"short" + PAIR, PAIR + b"\x05short\0\0"),
    (PAIR + b"short", PAIR + b"\0" + b"\x05\0short"),
    (LONG[:252], PAIR + b"\xfc" + LONG[:252]),
    (LONG[:252] + PAIR, PAIR + b"\xfc" + LONG[:252] + b"\0\0" + b"\0\0"),
    (LONG[:250] + PAIR, PAIR + b"\xfa" + LONG[:250] + b"\0\0"),
    (LONG[:251] + PAIR, PAIR + b"\xfc" + LONG[:251] + b"\xfe" + b"\x01\0\xfd"),
    (LONG[: 252 + 64008], PAIR + b"\xfc" + LONG[:252] + b"\xfc\xfc" + LONG[252 : 252 + 64008]),
]
AWKWARD = st.binary(max_size=600) | st.lists(
    st.sampled_from([b"\xfe", b"\xfd", PAIR, b"\0", b"x" * 251, b"y" * 252]), max_size=12
).map(b"".join)


@pytest.mark.parametrize(("data", "framed"), VECTORS)
def test_vectors_hold_byte_for_byte(data: bytes, framed: bytes) -> None:
    assert stuff(data) == framed
    if data:
        assert unstuff(framed[2:]) == data


@pytest.mark.parametrize(
    ("length", "overhead"),
    [(1, 3), (252, 3), (253, 5), (64260, 5), (64261, 7), (64260 + 64008, 7), (1 << 20, 37)],
)
def test_overhead_is_3_then_5_then_2_per_64008(length: int, overhead: int) -> None:
    assert len(stuff(b"a" * length)) == length + overhead
    assert len(stuff(PAIR * (length // 2))) <= length + overhead


@pytest.mark.parametrize("first_max", [2, 3, 4])
@pytest.mark.parametrize("later_max", [2, 3, 5])
def test_every_short_string_survives_tiny_blocks(first_max: int, later_max: int) -> None:
    blocks = Blocks(first_max, later_max)
    for length in range(8):
        alphabet = (0xFE, 0xFD, 0x00, 0xFC) if length < 7 else (0xFE, 0xFD, 0x01)
        for data in map(bytes, product(alphabet, repeat=length)):
            framed = stuff(data, blocks)
            if not data:
                assert framed == b""
                continue
            assert framed.startswith(PAIR)
            assert find_pair(framed, 1) < 0
            assert unstuff(framed[2:], blocks) == data
            assert list(block_ends(framed[2:], blocks))[-1] == (len(framed) - 2, len(data))
            for cut in range(2, len(framed)):
                prefix, announced, _ = unstuff_prefix(framed[2:cut], blocks)
                assert data.startswith(prefix)
                assert announced or prefix != data


@given(AWKWARD)
def test_any_bytes_survive(data: bytes) -> None:
    framed = stuff(data)
    assert find_pair(framed, 1) < 0
    if data:
        assert unstuff(framed[2:]) == data


@given(st.lists(AWKWARD.filter(bool), max_size=5))
def test_records_can_be_cut_apart_at_their_pairs(items: list[bytes]) -> None:
    raws = b"".join(map(stuff, items)).split(PAIR)[1:]
    assert list(map(unstuff, raws)) == items


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "cut off"),
        (b"\x05abc", "cut off"),
        (b"\xfd" + b"a" * 253, "block size 253"),
        (b"\x01a\xfd\0", "digit"),
        (b"\x01a\0\xfe", "digit"),
        (b"\x01a\x01", "cut off"),
        (b"\x01a\x02\0b", "cut off"),
    ],
)
def test_framing_no_encoder_writes_is_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(StuffingError, match=problem):
        unstuff(raw)


@given(st.binary(max_size=300))
def test_decoding_garbage_gives_bytes_or_a_stuffing_error(raw: bytes) -> None:
    with suppress(StuffingError):
        assert len(unstuff(raw)) <= len(raw)


def test_data_behind_a_front_is_framed_as_both_together_wherever_a_pair_lies() -> None:
    front = LONG[:33]
    for length in (300, 252 - 33 + 64008, 64008 * 2 + 500):
        plain = LONG[:length] * (length // len(LONG) + 1)
        for at in [*range(225), length - 2, length - 1, 64226, 64227, 64228]:
            data = (plain[:at] + PAIR + plain[at:])[:length]
            assert stuff_behind(front, data) == stuff(front + data)


@given(AWKWARD.map(lambda data: data + b"z" * 253))
def test_awkward_data_behind_a_front_is_framed_as_both_together(data: bytes) -> None:
    assert stuff_behind(b"head", data) == stuff(b"head" + data)
