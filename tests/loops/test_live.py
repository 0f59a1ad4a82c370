"""Entries collected, decided and put into columns: what the history of each key says, however a
pass is cut."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from kvstore.codec.keys import VALUE, encode_reference, frame
from kvstore.errors import CorruptionError
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.loops.columns import join
from kvstore.loops.live import LiveColumns, LiveRows, collect
from kvstore.loops.shapes import Nearby
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.scan import Read
from tests.loops import raw, stored_key
from tests.mvcc.test_scan import STAMPS, by_history, entries_of, keys, ranges, reads, stored


@given(
    st.lists(st.tuples(raw, raw), max_size=12),
    st.integers(1, 14),
    st.one_of(st.integers(1, 20), st.just(1 << 40)),
)
def test_collect_takes_entries_up_to_a_count_or_to_bytes(
    entries: list[tuple[bytes, bytes]], count: int, bytes_max: int
) -> None:
    source = iter(entries)
    found_keys, found_values = [b"before"], [b"that"]
    may_be_more = collect(source, found_keys, found_values, count, bytes_max)
    taken = list(zip(found_keys, found_values, strict=True))[1:]
    assert taken == entries[: len(taken)]
    assert list(source) == entries[len(taken) :]
    sizes = [len(value) for _, value in taken]
    assert sum(sizes[:-1]) < bytes_max
    full = len(taken) == count or sum(sizes) >= bytes_max
    assert may_be_more == full
    assert full or taken == entries


def test_collect_hands_on_what_its_source_raises() -> None:
    def failing() -> Iterator[tuple[bytes, bytes]]:
        yield b"a", b"1"
        raise OSError("gone")

    found: list[bytes] = []
    with pytest.raises(OSError, match="gone"):
        collect(failing(), found, [], 9, 1 << 20)
    assert found == [b"a"]


@pytest.mark.parametrize("entry", ["no pair", ("a", "b", "c"), ("a", 1)])
def test_collect_lets_go_of_what_it_refuses(entry: object) -> None:
    refused = [entry]
    before = sys.getrefcount(entry)
    for _ in range(3):
        with pytest.raises((TypeError, ValueError)):
            collect(iter(refused), [], [], 1, 1)
    assert sys.getrefcount(entry) == before


def test_collect_takes_from_what_is_no_iterator_as_well() -> None:
    found: list[bytes] = []
    assert not collect([(b"a", b"1")], found, [], 2, 1 << 20)
    assert found == [b"a"]
    with pytest.raises(TypeError):
        collect(None, [], [], 2, 1)


def entries_in(found: list[Any]) -> list[tuple[bytes, bytes]]:
    """The rows that `LiveColumns` found."""
    return [
        row
        for count, key_offsets, joined_keys, value_offsets, joined_values in found
        for row in zip(
            binary(count, (key_offsets, joined_keys)),
            binary(count, (value_offsets, joined_values)),
            strict=True,
        )
    ]


@given(
    stored,
    ranges,
    reads,
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), max_size=8),
)
def test_live_is_the_same_however_a_pass_is_cut(
    drawn: Any, deleted: Any, as_of: int, reverse: bool, cuts: list[Any]
) -> None:
    fragments = Fragments.of(RangeTombstone(*parts) for parts in deleted)
    read = Read(as_of, STAMPS, fragments.nearby(as_of))
    entries = entries_of(drawn)[:: -1 if reverse else 1]
    whole = LiveRows(*read)
    assert not whole.pass_over(iter(entries), len(entries) + 1)
    whole.end()
    expected = list(zip(*whole.found(), strict=True))
    assert expected[:: -1 if reverse else 1] == by_history(drawn, fragments, as_of)
    rows, columns = LiveRows(*read), LiveColumns(*read)
    found_rows, found_columns = [], []
    passed, sources = 0, (iter(entries), iter(entries))
    for count, bytes_max, is_handed_out in cuts:
        taken: tuple[list[bytes], list[bytes]] = [], []
        more = collect(iter(entries[passed:]), *taken, count, bytes_max)
        passed += len(taken[0])
        for live, source in zip((rows, columns), sources, strict=True):
            assert live.pass_over(source, count, bytes_max) == more
            assert live.last == (entries[passed - 1][0] if passed else None)
        if is_handed_out:
            found_rows += zip(*rows.found(), strict=True)
            found_columns += entries_in(columns.found())
            assert columns.rows == columns.size == 0
    for live, source in zip((rows, columns), sources, strict=True):
        assert not live.pass_over(source, len(entries) + 1)
        live.end()
        live.end()
    rest = expected[len(found_columns) :]
    assert (columns.rows, columns.size) == (len(rest), sum(len(value) for _, value in rest))
    assert found_rows + list(zip(*rows.found(), strict=True)) == expected
    assert found_columns + entries_in(columns.found()) == expected
    assert rows.found() == ([], [])
    assert columns.found() == []


def test_columns_grow_and_what_was_handed_out_stays() -> None:
    live = LiveColumns(5, {})
    expected, found = [], []
    for size in [0, 1, 5000, 300, 0, 1, 70_000, 2, *range(2000)]:
        rows = [(b"%06d" % (len(expected) + row), bytes(size + row)) for row in range(3)]
        assert live.pass_over(iter([(stored_key(key), value) for key, value in rows]), 3)
        expected += rows
        if len(expected) % 7 == 0:
            found += live.found()
    live.end()
    assert entries_in(found + live.found()) == expected


def test_more_than_an_array_holds_becomes_several() -> None:
    live, value = LiveColumns(5, {}), bytes(VALUE_BYTES_MAX)
    assert live.pass_over(iter([(stored_key(b"%d" % row), value) for row in range(2)]), 2)
    live.end()
    pieces = live.found()
    assert [count for count, *_ in pieces] == [1, 1]
    assert all(memoryview(joined).nbytes == VALUE_BYTES_MAX for *_, joined in pieces)


@pytest.mark.parametrize("kind", [LiveRows, LiveColumns])
@pytest.mark.parametrize("key", [b"", b"\x00\x01", bytes(10)])
def test_live_refuses_what_is_no_stored_key(kind: Any, key: bytes) -> None:
    live = kind(5, {})
    with pytest.raises(CorruptionError, match="too short"):
        live.pass_over(iter([(stored_key(b"a"), b""), (key, b"")]), 2)


def test_live_hands_on_what_its_source_raises() -> None:
    def failing() -> Iterator[tuple[bytes, bytes]]:
        yield stored_key(b"a"), b"1"
        raise OSError("gone")

    for kind in (LiveRows, LiveColumns):
        with pytest.raises(OSError, match="gone"):
            kind(5, {}).pass_over(failing(), 9, 1 << 20)


def test_live_lets_go_of_what_it_was_given() -> None:
    """A live loop holds one entry and the last key until it is released."""
    entry = stored_key(b"a"), bytes(100)
    before = [sys.getrefcount(each) for each in (entry, *entry)]
    for kind in (LiveRows, LiveColumns):
        live = kind(5, {encode_reference(1): (2, 4)})
        for _ in range(3):
            assert live.pass_over(iter([entry]), 1)
            live.end()
        found = live.found()
        rows = entries_in(found) if kind is LiveColumns else list(zip(*found, strict=True))
        assert rows == [(b"a", bytes(100))] * 3
        del found, rows
        with pytest.raises((TypeError, ValueError)):
            live.pass_over(iter([entry[:1]]), 1)
        with pytest.raises((TypeError, ValueError)):
            live.pass_over(iter([(*entry, entry)]), 1)
        del live
    gc.collect()
    assert [sys.getrefcount(each) for each in (entry, *entry)] == before


def _near(bounds: list[bytes], newest: list[int], key: bytes) -> Nearby:
    return b"", None, bounds, newest


def test_live_looks_at_nothing_beyond_what_its_lists_and_stamps_hold() -> None:
    reference = encode_reference(1)
    of_import = [
        (frame(b"%02d" % row) + encode_reference(row + 1) + VALUE, b"") for row in range(100)
    ]

    class Emptying(dict[bytes, Any]):
        def get(self, key: bytes, default: Any = None) -> Any:
            for changed in (entries, starts, newest):
                changed.clear()
            live.found()
            live.end()
            return default

    for kind in (LiveRows, LiveColumns):
        with pytest.raises((ValueError, IndexError)):
            kind(5, {reference: ()}).pass_over(iter(of_import), 100)
        for timed in ([], [(stored_key(b"0"), b"")]):
            entries = [*timed, *of_import]
            starts, newest = [b"%02d" % row for row in range(50)], [0] * 51
            live = kind(5, Emptying(), partial(_near, starts, newest))
            with suppress(ValueError, IndexError):
                live.pass_over(iter(entries), 200)
                live.end()


@given(st.lists(raw, max_size=8))
def test_joined_items_are_an_arrow_array(items: list[bytes]) -> None:
    assert binary(len(items), join(items)) == items


def test_items_too_long_for_one_array_are_not_joined() -> None:
    item = bytes(1 << 20)
    assert join([item] * 2048) is None
    assert join([item] * 3) is not None


@given(keys)
def test_nothing_but_bytes_is_looked_into(key: bytes) -> None:
    with pytest.raises(TypeError):
        join([stored_key(key), "text"])
    for entry in (("text", b""), (stored_key(key), "text"), b"no pair"):
        for kind in (LiveRows, LiveColumns):
            with pytest.raises(TypeError):
                kind(5, {}).pass_over(iter([entry]), 1)
    with pytest.raises(TypeError):
        collect(iter([(b"", "text")]), [], [], 1, 1)
    with pytest.raises(TypeError):
        collect(iter([b"no pair"]), [], [], 1, 1)


def binary(count: int, buffers: tuple[Buffer, Buffer] | None) -> list[bytes]:
    assert buffers is not None
    parts = [None, *map(pa.py_buffer, buffers)]
    array = pa.Array.from_buffers(pa.binary(), count, parts)
    array.validate(full=True)
    found: list[bytes] = array.to_pylist()
    return found
