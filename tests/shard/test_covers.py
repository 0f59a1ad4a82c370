"""The newest range tombstones over sorted windows, against a model that looks at each key."""

from __future__ import annotations

import itertools

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kvstore.backup.shard.rows.rules import NO_TIME, Covers, StretchSearch, disjoint
from kvstore.mvcc import RangeTombstone

keys = st.binary(max_size=2)
spans = st.tuples(keys, keys).filter(lambda span: span[0] < span[1])
ranges = st.lists(
    st.tuples(spans, st.integers(0, 9)).map(lambda drawn: RangeTombstone(*drawn[0], drawn[1]))
)


def newest_over(key: bytes, found: list[RangeTombstone]) -> int:
    return max((r.timestamp for r in found if r.start <= key < r.end), default=NO_TIME)


@given(ranges, keys)
def test_disjoint_ranges_have_the_newest_time_over_each_key(
    found: list[RangeTombstone], key: bytes
) -> None:
    cut = disjoint(found)
    assert all(r.start < r.end for r in cut)
    assert all(
        one.end < two.start or (one.end == two.start and one.timestamp != two.timestamp)
        for one, two in itertools.pairwise(cut)
    )
    for each in {key, *(k for r in found for k in (r.start, r.end))}:
        assert newest_over(each, cut) == newest_over(each, found)


@given(ranges, st.lists(keys, min_size=1), st.integers(1, 4))
def test_each_window_gets_the_range_tombstones_of_the_windows_before(
    found: list[RangeTombstone], asked: list[bytes], size: int
) -> None:
    rows = sorted(asked)
    covers = Covers()
    coming = sorted(found)
    for at in range(0, len(rows), size):
        window = rows[at : at + size]
        covers.add(r for r in coming if r.start <= window[-1])
        coming = [r for r in coming if r.start > window[-1]]
        times = covers.newest(StretchSearch(pa.array(window, pa.binary()))).tolist()
        assert times == [newest_over(key, found) for key in window]


def test_a_hundred_thousand_deletes_of_one_span_are_one_range() -> None:
    found = [RangeTombstone(b"a", b"m", time) for time in range(100_000)]
    assert disjoint(found) == [found[-1]]


def test_many_range_tombstones_are_searched_in_a_list() -> None:
    found = [RangeTombstone(b"%04d" % at, b"%04d" % (at + 3), at) for at in range(1000)]
    covers = Covers()
    covers.add(found)
    window = [b"%04d" % at for at in range(0, 1010, 2)]
    times = covers.newest(StretchSearch(pa.array(window, pa.binary()))).tolist()
    assert times == [newest_over(key, found) for key in window]
