"""Columns of rows, compiled and plain: joined, cut, made into tuples, gathered and arranged."""

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

from kvstore.changes.entry import column
from kvstore.errors import CorruptionError
from kvstore.loops import ENTRY_HEAD
from tests.loops import both, raw

items = st.lists(st.binary(max_size=9), max_size=30)


class Made(NamedTuple):
    number: int
    name: bytes
    same: object


@both
@given(
    st.lists(raw, max_size=40),
    st.sampled_from([b"", b"user:00", b"\x00" * 9]),
    st.lists(st.binary(max_size=12), max_size=40),
)
def test_arranging_is_sorting_by_key(
    loops: Any, few: list[bytes], prefix: bytes, many: list[bytes]
) -> None:
    keys = [prefix + key for key in [*few, *many, *few]]
    places = list(range(len(keys)))
    assert loops.arrange(places, keys) == sorted(places, key=keys.__getitem__)
    assert loops.arrange(sorted(keys), sorted(keys)) == sorted(keys)


@both
@given(
    st.dictionaries(raw, st.none() | raw, max_size=20),
    st.lists(st.tuples(raw, raw), max_size=3),
    st.integers(0, 6),
    st.binary(max_size=8),
    st.tuples(st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 64) - 1)),
)
def test_writes_are_joined_to_what_their_columns_are(
    loops: Any,
    points: dict[bytes, bytes | None],
    ranges: list[tuple[bytes, bytes]],
    longest: int,
    places: bytes,
    changeset: tuple[int, int],
) -> None:
    joined = loops.join_writes(points, ranges, longest, places, b"\x05\x07\x09", 1 << 31, changeset)
    values = [value or b"" for value in points.values()]
    if any(len(value) > longest for value in values):
        assert joined is None
        return
    key_offsets, keys = column([*(start for start, _ in ranges), *points])
    value_offsets, data = column([*(end for _, end in ranges), *values])
    ops = b"\x05" * len(ranges) + bytes(9 if each is None else 7 for each in points.values())
    body = key_offsets + value_offsets + places + keys + data + ops
    assert joined == ENTRY_HEAD.pack(1 << 31, len(ops), len(body), *changeset) + body


@both
@pytest.mark.parametrize(
    ("points", "ranges"),
    [
        *(({key: value}, []) for key, value in [(b"a", "text"), ("text", b"b"), (b"a", 3)]),
        *(({key: None}, []) for key in ("text", 4)),
        *(({b"a": b"b"}, [span]) for span in [(b"a", "text"), (1, b"b"), (b"a", None)]),
    ],
)
def test_writes_that_are_no_bytes_are_not_joined(loops: Any, points: Any, ranges: Any) -> None:
    with pytest.raises(TypeError):
        loops.join_writes(points, ranges, 9, b"", b"\x05\x01\x03", 1, (0, 0))


@both
@given(items)
def test_cutting_undoes_joining(loops: Any, given_items: list[bytes]) -> None:
    offsets, joined = loops.join(given_items)
    for data in (joined, memoryview(joined), memoryview(pa.py_buffer(joined))):
        assert loops.cut(memoryview(offsets).cast("i"), data) == given_items


@both
@given(st.just([]) | st.lists(st.integers(-1, 6), min_size=2, max_size=5), st.binary(max_size=5))
def test_offsets_that_leave_their_bytes_are_damage(
    loops: Any, offsets: list[int], data: bytes
) -> None:
    bounds = memoryview(array("i", offsets))
    if offsets and offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= len(data):
        assert loops.cut(bounds, data) == [data[start:end] for start, end in pairwise(offsets)]
        return
    with pytest.raises(CorruptionError, match="offsets"):
        loops.cut(bounds, data)


@both
@given(items)
def test_tuples_have_an_item_of_each_list_and_all_else_whole(
    loops: Any, names: list[bytes]
) -> None:
    same = object(), [1]
    numbers = list(range(1000, 1000 + len(names)))
    made = list(loops.tuples(Made, len(names), [numbers, names, same]))
    gc.collect(1)  # young objects suffice; all objects of a test run would take 0.1 s
    assert made == [Made(1000 + at, name, same) for at, name in enumerate(names)]
    assert {type(each) for each in made} <= {Made}
    assert all(each.same is same for each in made)


@both
def test_tuples_are_made_as_they_are_taken(loops: Any) -> None:
    names = [b"a", b"b", b"c"]
    made = loops.tuples(Made, 3, [1, names, None])
    assert iter(made) is made
    assert next(made) == (1, b"a", None)
    names.clear()
    with pytest.raises((IndexError, ValueError)):
        list(made)


@both
@pytest.mark.parametrize("fields", [[[1, 2, 3], 4, 5], [[1], [2, 3], 5]])
def test_columns_of_another_length_make_no_tuples(loops: Any, fields: Any) -> None:
    with pytest.raises(ValueError):  # each half has its own message
        list(loops.tuples(Made, 2, fields))


@both
def test_only_tuples_are_made(loops: Any) -> None:
    with pytest.raises(TypeError):
        list(loops.tuples(list, 1, [1]))


@both
@given(
    st.lists(st.tuples(st.integers(), st.none() | raw, st.none() | raw, raw), max_size=12),
    st.integers(0, 6),
    st.integers(0, 9),
)
def test_gathering_stops_at_either_bound_and_goes_on_from_there(
    loops: Any, rows: list[Any], count: int, bytes_max: int
) -> None:
    source, left = iter(rows), list(rows)
    while left and count:
        expected: list[Any] = []
        size = 0
        while left and len(expected) < count and not (expected and size >= bytes_max):
            expected.append(left.pop(0))
            size += sum(len(field or b"") for field in expected[-1][1:3])
        gathered: list[Any] = [0]
        assert loops.gather(source, gathered, count, bytes_max, 1, 3) == size
        assert gathered == [0, *expected]
    assert loops.gather(source, [], count, bytes_max, 1, 3) == 0
    assert list(source) == left


@both
def test_what_a_source_raises_ends_the_gathering(loops: Any) -> None:
    def source() -> Iterator[Any]:
        yield 1, b"a"
        raise OSError("no")

    rows: list[Any] = []
    with pytest.raises(OSError, match="no"):
        loops.gather(source(), rows, 9, 9, 1, 2)
    assert rows == [(1, b"a")]
    with pytest.raises(TypeError):
        loops.gather(iter([(1, 2)]), rows, 9, 9, 1, 2)
