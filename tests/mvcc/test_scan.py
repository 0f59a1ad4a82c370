"""A scan agrees with the history of each key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec.keys import TOMBSTONE, VALUE, encode_reference, encode_suffix, frame
from kvstore.limits import SCAN_CHUNK_BYTES
from kvstore.loops.live import Live
from kvstore.mvcc import scan as scan_module
from kvstore.mvcc.arrow import row_batches
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.key_history import Lifetime, newest_at, timeline
from kvstore.mvcc.passes import KeyColumns
from kvstore.mvcc.scan import Read, live_columns, live_rows
from tests.harness.bounds import bounds

Entries = list[tuple[bytes, bytes]]

IMPORTS = {1: Lifetime(3), 2: Lifetime(5, 8), 7: Lifetime(9, 11), (1 << 63) - 1: Lifetime(12)}
"""Ids of imports; any other id was never added."""
STAMPS = {encode_reference(number): lifetime for number, lifetime in IMPORTS.items()}
TAKEN = {time for life in IMPORTS.values() for time in life}

# Few letters, among them zero bytes and the bytes of the escape. So keys repeat, extend one
# another, and agree in their first or last eight bytes.
letters = st.sampled_from([b"\x00", b"\x01", b"\xff", b"a", b"a" * 8, b"\x00" * 8])
keys = st.lists(letters, max_size=4).map(b"".join)
times = st.integers(1, 14).filter(lambda time: time not in TAKEN)
suffixes = st.one_of(
    times.map(encode_suffix),
    st.sampled_from([*IMPORTS, 4, 9_999]).map(encode_reference),
)
stored = st.lists(
    st.tuples(keys, suffixes, st.sampled_from([VALUE, VALUE, TOMBSTONE])),
    unique_by=itemgetter(0, 1),
    max_size=60,
)
ranges = st.lists(
    st.tuples(keys, keys, times).filter(lambda drawn: drawn[0] < drawn[1]), max_size=4
)
reads = st.integers(0, 14)


class ListCursor:
    """A cursor over a list, which is in the order of the pass."""

    def __init__(self, entries: Entries) -> None:
        self._all = entries
        self._entries = self._from(0)
        self.closed = False
        self.passed = 0

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        taken = list(islice(self._entries, count))
        return [key for key, _ in taken], [value for _, value in taken]

    def feed(self, live: Live, count: int) -> bool:
        has_more = live.pass_over(self._entries, count, SCAN_CHUNK_BYTES)
        if live.ahead is not None:
            target, is_floor = live.ahead
            ascending = sorted(self._all)
            if is_floor:
                (at,) = [entry for entry in ascending if entry[0] <= target][-1:] or [None]
            else:
                (at,) = [entry for entry in ascending if entry[0] >= target][:1] or [None]
            self._entries = self._from(len(self._all) if at is None else self._all.index(at))
        return has_more

    def _from(self, first: int) -> Iterator[tuple[bytes, bytes]]:
        for entry in self._all[first:]:
            self.passed += 1
            yield entry

    def close(self) -> None:
        self.closed = True


def entries_of(drawn: list[tuple[bytes, bytes, bytes]]) -> Entries:
    return sorted(
        (frame(key) + suffix + kind, b"" if kind == TOMBSTONE else key + suffix)
        for key, suffix, kind in drawn
    )


def by_history(
    drawn: list[tuple[bytes, bytes, bytes]], fragments: Fragments, as_of: int
) -> list[tuple[bytes, bytes]]:
    """The live rows by `timeline`, the one rule for the versions of a key."""
    rows = []
    for key in sorted({key for key, _, _ in drawn}):
        mine = sorted(
            (suffix + kind, key + suffix) for other, suffix, kind in drawn if other == key
        )
        newest = newest_at(timeline(mine, STAMPS, fragments.stack(key)), as_of)
        if newest is not None and newest[1] is not None:
            rows.append((key, newest[1]))
    return rows


@given(stored)
def test_repeats_are_neighbours_with_one_user_key(drawn: Any) -> None:
    chunk = [key for key, _ in entries_of(drawn)]
    if chunk:
        stems = [key[:-9] for key in chunk]
        expected = [False, *(a == b for a, b in pairwise(stems))]
        assert KeyColumns(chunk).repeats.tolist() == expected


@given(stored, ranges, reads, st.booleans(), st.integers(1, 9), st.integers(1, 4))
def test_scan_is_what_the_history_of_each_key_says(
    drawn: Any, deleted: Any, as_of: int, reverse: bool, chunk: int, passed: int
) -> None:
    fragments = Fragments.of(RangeTombstone(*parts) for parts in deleted)
    read = Read(as_of, STAMPS, fragments.nearby(as_of))
    entries = entries_of(drawn)
    expected = by_history(drawn, fragments, as_of)
    with (
        patched(_FIRST_CHUNK=chunk),
        bounds(SCAN_CHUNK=chunk, VERSIONS_PASSED_MAX=passed),
    ):
        cursor = ListCursor(entries[::-1] if reverse else entries)
        chunks = list(live_rows(cursor, read))
        rows = [row for pair in chunks for row in zip(*pair, strict=True)]
        assert rows == (expected[::-1] if reverse else expected)
        assert cursor.closed
        cursor = ListCursor(entries[::-1] if reverse else entries)
        columns = live_columns(cursor, read, chunk=chunk)
        batches = list(row_batches(columns))
    table = [row for batch in batches for row in zip(*map(list, batch.columns), strict=True)]
    assert [(key.as_py(), value.as_py()) for key, value in table] == rows
    assert all(0 < batch.num_rows <= chunk for batch in batches)


def test_chunks_of_large_values_hold_few_of_them() -> None:
    megabyte = bytes(1 << 20)
    entries = [(frame(b"%04d" % row) + encode_suffix(1) + VALUE, megabyte) for row in range(200)]
    read = Read(1, {}, None)
    sizes = [len(values) for _, values in live_rows(ListCursor(entries), read)]
    assert sum(sizes) == 200
    assert max(sizes) <= 17
    columns = live_columns(ListCursor(entries), read, chunk=4096)
    sizes = [batch.num_rows for batch in row_batches(columns)]
    assert sum(sizes) == 200
    assert max(sizes) <= 32


def test_batches_of_a_long_scan_are_whole() -> None:
    entries = [(frame(b"%05d" % row) + encode_suffix(1) + VALUE, b"") for row in range(20_000)]
    read = Read(1, {}, None)
    columns = live_columns(ListCursor(entries), read, chunk=4096)
    sizes = [batch.num_rows for batch in row_batches(columns)]
    assert sum(sizes) == 20_000
    assert all(2048 < size <= 4096 for size in sizes[:-1])


@pytest.mark.parametrize("limit", [1, 500, 1_000, 1_400, 4_000])
def test_a_scan_with_a_limit_reads_little_behind_it(limit: int) -> None:
    entries = [
        (frame(b"%05d" % row) + encode_suffix(time) + VALUE, b"%d" % time)
        for row in range(20_000)
        for time in (2, 1)
    ]
    read = Read(2, {}, None)
    cursor = ListCursor(entries)
    chunks = live_rows(cursor, read, limit=limit)
    rows = list(islice((row for chunk in chunks for row in zip(*chunk, strict=True)), limit))
    assert rows == [(b"%05d" % row, b"2") for row in range(limit)]
    assert cursor.passed < 2.6 * limit + 100


def test_a_row_behind_many_that_are_dead_is_not_looked_for_one_by_one() -> None:
    dead = [(frame(b"%05d" % row) + encode_suffix(1) + TOMBSTONE, b"") for row in range(10_000)]
    alive = (frame(b"x") + encode_suffix(1) + VALUE, b"v")
    read = Read(1, {}, None)
    feeds = 0

    class Counting(ListCursor):
        def feed(self, live: Live, count: int) -> bool:
            nonlocal feeds
            feeds += 1
            return super().feed(live, count)

    columns = live_columns(Counting([*dead, alive]), read, chunk=1)
    assert [batch.num_rows for batch in row_batches(columns)] == [1]
    assert feeds < 200


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("as_of", [0, 1, 5000, 10_000])
def test_a_scan_seeks_past_long_runs_of_versions(reverse: bool, as_of: int) -> None:
    """The middle key has 10,000 versions, its neighbours one each."""
    versions = [(b"b", time) for time in range(1, 10_001)]
    entries = sorted(
        (frame(key) + encode_suffix(time) + VALUE, b"%d" % time)
        for key, time in [(b"a", 1), *versions, (b"c", 1)]
    )
    cursor = ListCursor(entries[::-1] if reverse else entries)
    chunks = list(live_rows(cursor, Read(as_of, {}, None)))
    rows = [row for pair in chunks for row in zip(*pair, strict=True)]
    assert sorted(rows) == ([(b"a", b"1"), (b"b", b"%d" % as_of), (b"c", b"1")] if as_of else [])
    assert cursor.passed < 1000


@contextmanager
def patched(**values: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkey:
        for name, value in values.items():
            monkey.setattr(scan_module, name, value)
        yield
