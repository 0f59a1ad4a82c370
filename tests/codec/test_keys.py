"""Bytes of keys: golden, in order, and checked when they come from outside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.codec.keys import (
    IMPORT_ID_MAX,
    TOMBSTONE,
    U64_MAX,
    VALUE,
    check,
    check_data_key,
    decode_change_key,
    decode_suffix,
    encode_change_key,
    encode_range_key,
    encode_reference,
    encode_suffix,
    escape,
    frame,
    is_reference,
    span_bounds,
    split_data_key,
    unescape,
    unframe,
    unframe_all,
)
from kvstore.errors import CorruptionError

raw = st.lists(st.sampled_from([0, 1, 2, 97, 254, 255]), max_size=6).map(bytes) | st.binary()
timestamps = st.integers(0, TIMESTAMP_MAX)
import_ids = st.integers(1, IMPORT_ID_MAX)
suffixes = st.one_of(timestamps.map(encode_suffix), import_ids.map(encode_reference))


def data_key(key: bytes, suffix: bytes, kind: bytes = VALUE) -> bytes:
    return frame(key) + suffix + kind


# -- golden bytes: a change here is a new format version ---------------------------------------


@pytest.mark.parametrize(
    ("key", "golden"),
    [
        (data_key(b"", encode_suffix(1)), "0001fffffffffffffffe01"),
        (data_key(b"a\x00b", encode_suffix(0)), "6100ff620001ffffffffffffffff01"),
        (data_key(b"k", encode_suffix(TIMESTAMP_MAX), TOMBSTONE), "6b0001800000000000000000"),
        (data_key(b"k", encode_reference(1)), "6b0001000000000000000101"),
        (data_key(b"k", encode_reference(IMPORT_ID_MAX)), "6b00017fffffffffffffff01"),
        (encode_range_key(b"a\x00", 258), "6100ff0001fffffffffffffefd"),
        (
            encode_change_key(bytes(15) + b"\x01", 258, 3),
            "00000000000000000000000000000001000000000000010200000003",
        ),
    ],
)
def test_golden_keys(key: bytes, golden: str) -> None:
    assert key.hex() == golden


# -- framing -----------------------------------------------------------------------------------


@given(raw)
def test_framed_keys_come_back(key: bytes) -> None:
    assert unframe(frame(key)) == unescape(escape(key)) == key
    check(frame(key), where="here")


@given(st.lists(st.binary(max_size=6)))
def test_many_framed_keys_are_read_at_once(keys: list[bytes]) -> None:
    assert unframe_all([frame(key) for key in keys]) == keys


@given(raw, raw, suffixes, suffixes)
def test_framed_keys_sort_as_keys_whatever_follows(
    a: bytes, b: bytes, after_a: bytes, after_b: bytes
) -> None:
    if a != b:
        assert (frame(a) + after_a < frame(b) + after_b) == (a < b)
        assert not frame(a).startswith(frame(b))


@given(raw, raw, raw | st.none(), suffixes)
def test_bounds_of_a_span_hold_exactly_its_keys(
    key: bytes, start: bytes, end: bytes | None, suffix: bytes
) -> None:
    low, high = span_bounds(start, end)
    stored = data_key(key, suffix)
    assert (low <= stored) == (start <= key)
    assert high is None or (stored < high) == (key < end)
    assert stored != high


@given(st.binary())
def test_only_what_frame_makes_is_accepted(stored: bytes) -> None:
    if stored.endswith(b"\x00\x01") and frame(unframe(stored)) == stored:
        check(stored, where="here")
        return
    with pytest.raises(CorruptionError) as found:
        check(stored, where="here")
    assert found.value.where == "here"


# -- suffixes ----------------------------------------------------------------------------------


@given(timestamps, timestamps)
def test_newer_versions_sort_first(a: int, b: int) -> None:
    assert (encode_suffix(a) < encode_suffix(b)) == (a > b)
    assert decode_suffix(encode_suffix(a)) == a


@given(timestamps, import_ids)
def test_references_sort_before_all_times_and_are_told_apart(timestamp: int, ident: int) -> None:
    assert encode_reference(ident) < encode_suffix(timestamp)
    assert is_reference(encode_reference(ident))
    assert not is_reference(encode_suffix(timestamp))


@given(raw, suffixes, st.sampled_from([TOMBSTONE, VALUE]))
def test_data_keys_split_and_check(key: bytes, suffix: bytes, kind: bytes) -> None:
    stored = data_key(key, suffix, kind)
    check_data_key(stored)
    assert split_data_key(stored) == (frame(key), suffix, kind)


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\x00\x01",
        frame(b"k") + encode_suffix(1),
        data_key(b"k", encode_suffix(1), b"\x02"),
        data_key(b"k", bytes(8)),
        b"k" + encode_suffix(1) + VALUE,
        b"k\x00\x02\x00\x01" + encode_suffix(1) + VALUE,
    ],
)
def test_malformed_data_keys_are_corruption(stored: bytes) -> None:
    with pytest.raises(CorruptionError) as found:
        check_data_key(stored)
    assert stored.hex() in found.value.where


@given(st.binary(min_size=16, max_size=16), timestamps, st.integers(0, (1 << 32) - 1))
def test_change_keys_come_back_and_sort_by_time(stream: bytes, timestamp: int, chunk: int) -> None:
    key = encode_change_key(stream, timestamp, chunk)
    assert decode_change_key(key) == (stream, timestamp, chunk)
    assert key < encode_change_key(stream, timestamp + 1, 0)
    with pytest.raises(CorruptionError):
        decode_change_key(key[:-1])


def test_the_largest_change_bound_fits() -> None:
    assert encode_change_key(bytes(16), TIMESTAMP_MAX + 1) > encode_change_key(
        bytes(16), TIMESTAMP_MAX, U64_MAX >> 32
    )
