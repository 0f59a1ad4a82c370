"""Pages of scans and differences: joined, they are the whole, whatever the limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import ManualClock, Span, Store
from kvstore.errors import UsageError
from kvstore.mvcc import Difference, Fragments, RangeTombstone, diff_page, row_page
from tests.harness.strategies import bounds, ops

pytestmark = pytest.mark.usefixtures("each_engine")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvstore.open(tmp_path / "db", durability="async", clock=ManualClock(1)) as opened:
        yield opened


def test_rows_end_at_a_row_or_byte_limit_and_go_on_exactly_there(store: Store) -> None:
    for key in (b"a", b"b", b"c", b"d"):
        store.put(key, b"12345")
    store.delete(b"c")
    versions, now = store._versions, store.upper - 1
    page = row_page(versions, Span(), now, rows_max=2)
    assert page == ([(b"a", b"12345"), (b"b", b"12345")], Span(b"d"))
    assert row_page(versions, Span(b"d"), now, rows_max=2).rest is None
    page = row_page(versions, Span(), now, bytes_max=11, reverse=True)
    assert page == ([(b"d", b"12345")], Span(b"", b"b\x00"))
    assert row_page(versions, Span(), now, rows_max=3).rest is None


def test_row_larger_than_the_byte_limit_comes_alone(store: Store) -> None:
    store.put(b"a", b"large" * 10)
    store.put(b"b", b"1")
    page = row_page(store._versions, Span(), store.upper - 1, bytes_max=1)
    assert [key for key, _ in page.rows] == [b"a"]
    assert page.rest == Span(b"b")


def test_range_tombstone_is_cut_exactly_at_the_end_of_a_page(store: Store) -> None:
    deleted = store.delete_range(b"a", b"z")
    first = store.put(b"c", b"1")
    second = store.put(b"c", b"2")
    last = store.put(b"m", b"3")
    window = {"since": 0, "upto": last}
    page = diff_page(store._versions, Span(), rows_max=2, **window)
    assert page.differences == [
        (b"a", b"m", deleted),
        (b"c", first, b"1"),
        (b"c", second, b"2"),
    ]
    assert page.rest == Span(b"m")
    rest = diff_page(store._versions, page.rest, rows_max=2, **window)
    assert rest == ([(b"m", b"z", deleted), (b"m", last, b"3")], None)
    page = diff_page(store._versions, Span(), rows_max=2, reverse=True, **window)
    assert page == ([(b"c\x00", b"z", deleted), (b"m", last, b"3")], Span(b"", b"c\x00"))


def test_limits_below_one_are_refused(store: Store) -> None:
    for limits in ({"rows_max": 0}, {"bytes_max": 0}):
        with pytest.raises(UsageError):
            row_page(store._versions, Span(), 1, **limits)
        with pytest.raises(UsageError):
            diff_page(store._versions, Span(), since=0, upto=1, **limits)


def joined(differences: list[Difference]) -> tuple[list[Difference], Fragments]:
    """Versions in their order, and the range tombstones as what they cover."""
    ranges = [found for found in differences if isinstance(found, RangeTombstone)]
    return [found for found in differences if found not in ranges], Fragments.of(ranges)


@given(
    st.lists(ops, max_size=6),
    bounds,
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 4)),
    st.one_of(st.none(), st.integers(1, 40)),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
def test_pages_joined_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple]],  # type: ignore[type-arg]
    bound: tuple[bytes, bytes | None],
    reverse: bool,
    latest: bool,
    rows_max: int | None,
    bytes_max: int | None,
    window: tuple[int, int],
) -> None:
    path = tmp_path_factory.mktemp("page") / "db"
    with kvstore.open(path, durability="async", clock=ManualClock(1)) as store:
        for writes in batches:
            with store.batch() as batch:
                for op, *args in writes:
                    getattr(batch, op)(*(arg for arg in args if arg is not None))
        versions, (since, upto) = store._versions, sorted(window)
        limits = {"reverse": reverse, "rows_max": rows_max, "bytes_max": bytes_max}
        whole = [
            row
            for keys, values in versions.scan(Span(*bound), upto, reverse=reverse)
            for row in zip(keys, values, strict=True)
        ]
        rows, rest = [], Span(*bound)
        while rest is not None:
            page = row_page(versions, rest, upto, **limits)
            assert page.rows or page.rest is None
            rows += page.rows
            rest = page.rest
        assert rows == whole
        window_of = {"since": since, "upto": upto, "latest": latest}
        ascending = list(versions.diff(Span(*bound), **window_of))
        found, rest = [], Span(*bound)
        while rest is not None:
            part = diff_page(versions, rest, **window_of, **limits)
            assert part.differences or part.rest is None
            found += part.differences
            rest = part.rest
        assert joined(found)[1] == joined(ascending)[1]
        in_order = sorted(joined(found)[0]) if reverse else joined(found)[0]
        assert in_order == joined(ascending)[0]
