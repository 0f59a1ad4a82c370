"""The first rows of a scan, by a reader that is kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.codec.keys import TOMBSTONE, VALUE, encode_suffix, frame, span_bounds
from kvstore.limits import FEW_ROWS_MAX
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.scan import Read, few_rows
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of
from tests.loops.test_timed import ListReader
from tests.mvcc.test_scan import (
    STAMPS,
    by_history,
    entries_of,
    keys,
    ranges,
    reads,
    stored,
)

ALL = (b"", b"\xff")


class ListEngine:
    """Lends one reader over a list."""

    def __init__(self, entries: list[tuple[bytes, bytes]]) -> None:
        self.reader = ListReader(entries)
        self.lent = self.checked = 0

    def borrow(self) -> tuple[None, ListReader]:
        self.lent += 1
        return None, self.reader

    def give_back(self, ticket: None, reader: ListReader) -> None:
        assert reader is self.reader
        self.lent -= 1

    def check(self, reader: ListReader) -> None:
        assert reader.key() is None
        self.checked += 1


@given(
    stored,
    ranges,
    reads,
    keys,
    keys,
    st.booleans(),
    st.integers(0, 9),
    st.integers(1, 4) | st.just(100),
)
def test_they_are_the_first_ones_of_the_whole_scan(
    drawn: Any,
    deleted: Any,
    as_of: int,
    start: bytes,
    end: bytes,
    reverse: bool,
    limit: int,
    passed: int,
) -> None:
    fragments = Fragments.of(RangeTombstone(*parts) for parts in deleted)
    read = Read(as_of, STAMPS, fragments.nearby(as_of))
    engine: Any = ListEngine(entries_of(drawn))
    span = span_bounds(start, end)
    with bounds(VERSIONS_PASSED_MAX=passed):
        found = few_rows(engine, span, read, limit, reverse=reverse)
    wanted = [row for row in by_history(drawn, fragments, as_of) if start <= row[0] < end]
    wanted = wanted[::-1] if reverse else wanted
    rows = list(zip(found.keys, found.values, strict=True))
    assert rows == wanted[: len(rows)]
    assert len(rows) <= limit
    if found.is_passed:
        assert len(rows) == min(limit, len(wanted))
    else:
        assert len(rows) == limit or passed < 100
    assert engine.lent == 0


@pytest.mark.parametrize("reverse", [False, True])
def test_they_are_not_looked_for_behind_many_dead_entries(reverse: bool) -> None:
    dead = [(frame(b"%04d" % row) + encode_suffix(1) + TOMBSTONE, b"") for row in range(5000)]
    alive = [(frame(key) + encode_suffix(1) + VALUE, b"v") for key in (b"!", b"x")]
    engine: Any = ListEngine(sorted([*dead, *alive]))
    found = few_rows(engine, ALL, Read(1, {}, None), 2, reverse=reverse)
    assert (found.keys, found.is_passed) == ([b"x" if reverse else b"!"], False)
    assert engine.reader.steps < 200
    assert engine.lent == 0


@pytest.mark.parametrize("as_of", [1, 500, 1000])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_run_of_versions_is_passed_by_a_seek(reverse: bool, as_of: int) -> None:
    versions = [(b"b", time) for time in range(1, 1001)]
    engine: Any = ListEngine(
        sorted(
            (frame(key) + encode_suffix(time) + VALUE, b"%d" % time)
            for key, time in [(b"a", 1), *versions, (b"c", 1)]
        )
    )
    found = few_rows(engine, ALL, Read(as_of, {}, None), 1, reverse=reverse)
    assert found == ([b"c" if reverse else b"a"], [b"1"], False)
    assert engine.reader.steps < 150


def test_the_entry_behind_the_last_row_is_the_last_that_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [
        (frame(key) + encode_suffix(time) + VALUE, b"%d" % time)
        for key in (b"a", b"b", b"c", b"d")
        for time in (3, 2, 1)
    ]
    engine: Any = ListEngine(entries)
    values, value = [], engine.reader.value

    def counted() -> bytes:
        values.append(value())
        return values[-1]

    monkeypatch.setattr(engine.reader, "value", counted)
    found = few_rows(engine, ALL, Read(2, {}, None), 2, reverse=False)
    assert found == ([b"a", b"b"], [b"2", b"2"], False)
    assert engine.reader.steps == 2 * 3 + 1
    assert values == [b"2", b"2"]


def test_large_values_come_one_by_one() -> None:
    megabytes = bytes(3 << 20)
    entries = [(frame(b"%04d" % row) + encode_suffix(1) + VALUE, megabytes) for row in range(99)]
    engine: Any = ListEngine(entries)
    found = few_rows(engine, ALL, Read(1, {}, None), 50, reverse=False)
    assert not found.is_passed
    assert 0 < len(found.keys) < 10
    assert engine.reader.steps < 10


@pytest.mark.usefixtures("each_engine")
def test_a_short_scan_makes_no_pass(store: kvstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.batch() as batch:
        for number in range(500):
            batch.put(b"%03d" % number, b"v")
    store.delete_range(b"003", b"005")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pass was made")

    monkeypatch.setattr(parts_of(store).engine, "cursor", refuse)
    assert list(store.scan(b"002", limit=2)) == [(b"002", b"v"), (b"005", b"v")]
    assert list(store.scan(b"002", b"006", limit=9)) == [(b"002", b"v"), (b"005", b"v")]
    assert list(store.scan(prefix=b"00", reverse=True))[-2:] == [(b"001", b"v"), (b"000", b"v")]
    assert list(store.scan(end=b"006", reverse=True, limit=1)) == [(b"005", b"v")]
    assert list(store.scan(reverse=True, limit=1)) == [(b"499", b"v")]
    assert list(store.scan(prefix=b"9", limit=1)) == []
    assert len(list(store.scan(limit=FEW_ROWS_MAX))) == FEW_ROWS_MAX
    with pytest.raises(AssertionError, match="a pass was made"):
        store.scan(limit=FEW_ROWS_MAX + 1)
