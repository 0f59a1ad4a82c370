"""Columns of rows: joined, cut, made into tuples, gathered and arranged."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.changes.index import column
from kvstore.errors import CorruptionError
from kvstore.loops.columns import arrange, cut, gather, join, join_writes, tuples
from kvstore.loops.shapes import ENTRY_HEAD
from tests.loops import raw

items = st.lists(st.binary(max_size=9), max_size=30)


class Made(NamedTuple):
    number: int
    name: bytes
    same: object


@given(
    st.lists(raw, max_size=40),
    st.sampled_from([b"", b"user:00", b"\x00" * 9]),
    st.lists(st.binary(max_size=12), max_size=40),
)
def test_arranging_is_sorting_by_key(few: list[bytes], prefix: bytes, many: list[bytes]) -> None:
    keys = [prefix + key for key in [*few, *many, *few]]
    places = list(range(len(keys)))
    assert arrange(places, keys) == sorted(places, key=keys.__getitem__)
    assert arrange(sorted(keys), sorted(keys)) == sorted(keys)


@given(
    st.dictionaries(raw, st.none() | raw, max_size=20),
    st.lists(st.tuples(raw, raw), max_size=3),
    st.integers(0, 6),
    st.binary(max_size=8),
    st.tuples(st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 64) - 1)),
)
def test_writes_are_joined_to_what_their_columns_are(
    points: dict[bytes, bytes | None],
    ranges: list[tuple[bytes, bytes]],
    longest: int,
    places: bytes,
    changeset: tuple[int, int],
) -> None:
    joined = join_writes(points, ranges, longest, places, b"\x05\x07\x09", 1 << 31, changeset)
    values = [value or b"" for value in points.values()]
    if any(len(value) > longest for value in values):
        assert joined is None
        return
    key_offsets, keys = column([*(start for start, _ in ranges), *points])
    value_offsets, data = column([*(end for _, end in ranges), *values])
    ops = b"\x05" * len(ranges) + bytes(9 if each is None else 7 for each in points.values())
    body = key_offsets + value_offsets + places + keys + data + ops
    assert joined == ENTRY_HEAD.pack(1 << 31, len(ops), len(body), *changeset) + body


@pytest.mark.parametrize(
    ("points", "ranges"),
    [
        *(({key: value}, []) for key, value in [(b"a", "text"), ("text", b"b"), (b"a", 3)]),
        *(({key: None}, []) for key in ("text", 4)),
        *(({b"a": b"b"}, [span]) for span in [(b"a", "text"), (1, b"b"), (b"a", None)]),
    ],
)
def test_writes_that_are_no_bytes_are_not_joined(points: Any, ranges: Any) -> None:
    with pytest.raises(TypeError):
        join_writes(points, ranges, 9, b"", b"\x05\x01\x03", 1, (0, 0))


@given(items)
def test_cutting_undoes_joining(given_items: list[bytes]) -> None:
    offsets, joined = join(given_items)
    for data in (joined, memoryview(joined), memoryview(pa.py_buffer(joined))):
        assert cut(memoryview(offsets).cast("i"), data) == given_items


@given(st.just([]) | st.lists(st.integers(-1, 6), min_size=2, max_size=5), st.binary(max_size=5))
def test_offsets_that_leave_their_bytes_are_damage(offsets: list[int], data: bytes) -> None:
    bounds = memoryview(array("i", offsets))
    if offsets and offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= len(data):
        assert cut(bounds, data) == [data[start:end] for start, end in pairwise(offsets)]
        return
    with pytest.raises(CorruptionError, match="offsets"):
        cut(bounds, data)


@given(items)
def test_tuples_have_an_item_of_each_list_and_all_else_whole(names: list[bytes]) -> None:
    same = object(), [1]
    numbers = list(range(1000, 1000 + len(names)))
    made = list(tuples(Made, len(names), [numbers, names, same]))
    gc.collect(1)  # young objects suffice; all objects of a test run would take 0.1 s
    assert made == [Made(1000 + at, name, same) for at, name in enumerate(names)]
    assert {type(each) for each in made} <= {Made}
    assert all(each.same is same for each in made)


def test_tuples_are_made_as_they_are_taken() -> None:
    names = [b"a", b"b", b"c"]
    made = tuples(Made, 3, [1, names, None])
    assert iter(made) is made
    assert next(made) == (1, b"a", None)
    names.clear()
    with pytest.raises((IndexError, ValueError)):
        list(made)


@pytest.mark.parametrize("fields", [[[1, 2, 3], 4, 5], [[1], [2, 3], 5]])
def test_columns_of_another_length_make_no_tuples(fields: Any) -> None:
    with pytest.raises(ValueError):  # each half has its own message
        list(tuples(Made, 2, fields))


def test_only_tuples_are_made() -> None:
    with pytest.raises(TypeError):
        list(tuples(list, 1, [1]))


@given(
    st.lists(st.tuples(st.integers(), st.none() | raw, st.none() | raw, raw), max_size=12),
    st.integers(0, 6),
    st.integers(0, 9),
)
def test_gathering_stops_at_either_bound_and_goes_on_from_there(
    rows: list[Any], count: int, bytes_max: int
) -> None:
    source, left = iter(rows), list(rows)
    while left and count:
        expected: list[Any] = []
        size = 0
        while left and len(expected) < count and not (expected and size >= bytes_max):
            expected.append(left.pop(0))
            size += sum(len(field or b"") for field in expected[-1][1:3])
        gathered: list[Any] = [0]
        assert gather(source, gathered, count, bytes_max, 1, 3) == size
        assert gathered == [0, *expected]
    assert gather(source, [], count, bytes_max, 1, 3) == 0
    assert list(source) == left


def test_what_a_source_raises_ends_the_gathering() -> None:
    def source() -> Iterator[Any]:
        yield 1, b"a"
        raise OSError("no")

    rows: list[Any] = []
    with pytest.raises(OSError, match="no"):
        gather(source(), rows, 9, 9, 1, 2)
    assert rows == [(1, b"a")]
    with pytest.raises(TypeError):
        gather(iter([(1, 2)]), rows, 9, 9, 1, 2)
