"""Merging and the rules against a model that follows the definition row by row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.backup.shard.rows.batch_reader import ONE_ROW, merge_sorted, read_batches
from kvstore.backup.shard.rows.batch_writer import (
    BatchDesc,
    concat_batches,
    part_names,
    write_batch,
)
from kvstore.backup.shard.rows.rules import AsOf, Compact, View, Window
from kvstore.backup.shard.state.trace import ShardBatch
from kvstore.base.span import Span
from kvstore.mvcc.arrow import key_words
from kvstore.storage.memory_storage import MemoryBlob
from tests.shard.rows import (
    Row,
    delete,
    delete_range,
    in_order,
    model_state,
    put,
    rows_of,
    state_of,
    versions,
)

KEYS = [
    b"",
    b"a",
    b"a\0",
    b"ab",
    b"abcdefghij",
    b"abcdefghik",
    b"b",
    b"prefix/1",
    b"prefix/2",
    b"\xff",
]
UPPER = 20

keys = st.sampled_from(KEYS)
times = st.integers(0, UPPER - 1)


@st.composite
def histories(draw: st.DrawFn) -> list[Row]:
    """Any versions and range tombstones. A key has at most one point version at each time."""
    points = draw(st.dictionaries(st.tuples(keys, times), st.booleans(), max_size=40))
    rows = [
        put(k, t, f"{t}".encode()) if alive else delete(k, t) for (k, t), alive in points.items()
    ]
    spans = st.tuples(keys, keys, times).filter(lambda span: span[0] < span[1])
    rows += [delete_range(*span) for span in draw(st.sets(spans, max_size=12))]
    return rows


class Store:
    """Batches of a history cut at times, in one memory blob."""

    def __init__(self) -> None:
        self.blob = MemoryBlob()
        self.names = part_names("s")

    def batch(
        self, lower: int, upper: int, batches: list[pa.RecordBatch], since: int = 0
    ) -> ShardBatch:
        desc = BatchDesc(lower, upper, since)
        return write_batch(self.blob, desc, batches, names=self.names)

    def cut(self, rows: list[Row], edges: list[int], *, size: int = 3) -> list[ShardBatch]:
        bounds = [0, *sorted(set(edges) - {0, UPPER}), UPPER]
        return [
            self.batch(
                low, high, versions([r for r in rows if low <= r.timestamp < high], size=size)
            )
            for low, high in itertools.pairwise(bounds)
        ]

    def read(
        self, batches: list[ShardBatch], view: View, span: Span | None = None
    ) -> list[pa.RecordBatch]:
        return list(read_batches(self.blob, batches, view=view, span=span))

    def compacted(self, batches: list[ShardBatch], since: int) -> ShardBatch:
        lower, upper = batches[0].lower, batches[-1].upper
        return self.batch(lower, upper, self.read(batches, Compact(lower, since)), since)


edges = st.lists(times, max_size=4)


@settings(deadline=None, max_examples=150)
@given(histories(), edges, times)
def test_the_state_of_merged_batches_is_the_models(
    rows: list[Row], cuts: list[int], at: int
) -> None:
    store = Store()
    batches = store.cut(rows, cuts)
    assert state_of(store.read(batches, AsOf(at))) == model_state(rows, at)


@settings(deadline=None, max_examples=100)
@given(histories(), edges, times, times)
def test_a_window_gives_every_version_in_it_once_in_order(
    rows: list[Row], cuts: list[int], since: int, upto: int
) -> None:
    store = Store()
    found = rows_of(store.read(store.cut(rows, cuts), Window(since, upto)))
    wanted = in_order(row for row in rows if since < row.timestamp <= upto)
    assert sorted(found) == sorted(wanted)
    assert [r[:3] for r in found] == [r[:3] for r in wanted]


@settings(deadline=None, max_examples=150)
@given(histories(), edges, times, st.data())
@example([put(b"a", 1), delete_range(b"", b"b", 5), put(b"a", 3)], [3], 6, None)
def test_compaction_changes_no_reader_at_or_after_since(
    rows: list[Row], cuts: list[int], since: int, data: st.DataObject | None
) -> None:
    store = Store()
    batches = store.cut(rows, cuts)
    first = 0 if data is None else data.draw(st.integers(0, len(batches) - 1))
    last = len(batches) if data is None else data.draw(st.integers(first + 1, len(batches)))
    output = store.compacted(batches[first:last], since)
    assert output.rows <= sum(batch.rows for batch in batches[first:last])
    after = [*batches[:first], output, *batches[last:]]
    for as_of in range(since, UPPER):
        assert state_of(store.read(after, AsOf(as_of))) == model_state(rows, as_of)
    changed = sorted(rows_of(store.read(after, Window(since, UPPER))))
    assert changed == sorted(row for row in rows if row.timestamp > since)


@settings(deadline=None, max_examples=60)
@given(histories(), edges, times)
def test_a_full_compaction_keeps_only_what_can_be_seen(
    rows: list[Row], cuts: list[int], since: int
) -> None:
    store = Store()
    found = rows_of(store.read([store.compacted(store.cut(rows, cuts), since)], Window(-1, UPPER)))
    old = [row for row in found if row.timestamp <= since]
    assert {row.key: row.value for row in old} == model_state(rows, since)
    assert len(old) == len(model_state(rows, since))


@settings(deadline=None, max_examples=100)
@given(histories(), edges, times, keys, st.none() | keys)
def test_a_span_reads_what_lies_in_it_range_tombstones_cut_to_it(
    rows: list[Row], cuts: list[int], at: int, start: bytes, end: bytes | None
) -> None:
    if end is not None and start >= end:
        return
    span = Span(start, end)
    store = Store()
    batches = store.cut(rows, cuts)
    wanted = {k: v for k, v in model_state(rows, at).items() if k in span}
    assert state_of(store.read(batches, AsOf(at), span)) == wanted
    history = rows_of(store.read(batches, Window(-1, at), span))
    assert all(row.key in span for row in history)
    assert model_state(history, at) == wanted
    assert all(end is None or (row.end_key or b"") <= end for row in history)


def test_at_equal_times_the_version_wins_over_the_range() -> None:
    store = Store()
    batches = [store.batch(0, UPPER, versions([put(b"a", 5), delete_range(b"a", b"b", 5)]))]
    assert state_of(store.read(batches, AsOf(5))) == {b"a": b"v"}
    compacted = store.compacted(batches, 7)
    assert rows_of(store.read([compacted], Window(-1, 9))) == [put(b"a", 5)]


def test_above_the_first_batch_tombstones_survive_compaction() -> None:
    store = Store()
    base = store.batch(0, 5, versions([put(b"a", 1), put(b"b", 1)]))
    later = store.batch(5, UPPER, versions([delete(b"a", 6), delete_range(b"b", b"c", 7)]))
    compacted = store.compacted([later], 9)
    assert compacted.rows == 2
    assert state_of(store.read([base, compacted], AsOf(9))) == {}


def test_a_range_tombstone_reaches_over_many_windows() -> None:
    store = Store()
    numbered = [f"{i:05}".encode() for i in range(5000)]
    base = store.batch(0, 5, versions([put(k, 1) for k in numbered], size=100))
    cut = store.batch(5, 9, versions([delete_range(b"00010", b"04990", 6), put(b"02000", 7)]))
    left = state_of(store.read([base, cut], AsOf(8)))
    assert list(left) == [*numbered[:10], b"02000", *numbered[4990:]]


# -- merging ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 10).flatmap(
        lambda least: st.lists(st.binary(min_size=least, max_size=least + 12), min_size=1)
    ),
    st.integers(0, 14),
)
def test_key_words_never_order_against_the_keys(found: list[bytes], skip: int) -> None:
    prefix = b"p" * skip
    array = pa.array(sorted(prefix + key for key in found), pa.binary())
    words = key_words(array, skip=skip)
    assert words.tolist() == [
        int.from_bytes(key[skip : skip + 8].ljust(8, b"\0"), "big") for key in array.to_pylist()
    ]
    sliced = key_words(array.slice(1), skip=skip)
    assert np.array_equal(sliced, words[1:])


def test_windows_hold_whole_keys_and_all_rows_in_order() -> None:
    rng = random.Random(7)
    rows = [put(f"k{rng.randrange(300):03}".encode(), t) for t in range(2000)]
    sources = [versions(rows[i::5], size=rng.randrange(1, 60)) for i in range(5)]
    windows = [w.whole() for w in merge_sorted([(iter(source), ONE_ROW) for source in sources])]
    assert rows_of(windows) == in_order(rows)
    ends = [(w.column(0)[0].as_py(), w.column(0)[-1].as_py()) for w in windows]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))
    assert len(windows) > 5


def test_a_merge_buffers_a_few_batches_of_each_source_however_long_they_are() -> None:
    pulled = 0

    def counted(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        nonlocal pulled
        for batch in batches:
            pulled += batch.num_rows
            yield batch

    rows = [put(f"{i * 7919 % 20_000:05}".encode(), i) for i in range(20_000)]
    sources = [(counted(versions(rows[i::10], size=50)), ONE_ROW) for i in range(10)]
    passed = most = 0
    for window in merge_sorted(sources):
        most = max(most, pulled - passed)
        passed += window.whole().num_rows
    assert passed == 20_000
    assert most <= 10 * 2 * 50


def test_small_runs_beside_a_large_one_do_not_make_windows_small() -> None:
    blob, names = MemoryBlob(), part_names("s")
    rows = [put(b"%06d" % i, 1) for i in range(30_000)]
    batches = [write_batch(blob, BatchDesc(0, 2), versions(rows), names=names)]
    for number in range(2, 22):
        few = [put(b"%06d" % i, number) for i in range(number, 30_000, 300)]
        desc = BatchDesc(number, number + 1)
        batches.append(write_batch(blob, desc, versions(few), names=names))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.backup.shard.rows.batch_reader.MERGE_ROWS_MAX", 16_000)
        patch.setattr("kvstore.backup.shard.rows.batch_reader.MERGE_SOURCE_ROWS_MIN", 1)
        found = [w.num_rows for w in read_batches(blob, batches, view=Window(0, 99))]
    assert sum(found) == 32_000
    assert len(found) < 10


def test_a_merge_of_large_values_buffers_a_bounded_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("batch_reader", "batch_writer"):
        monkeypatch.setattr(f"kvstore.backup.shard.rows.{module}.ROW_GROUP_BYTES_MAX", 4 << 20)
    monkeypatch.setattr("kvstore.backup.shard.rows.batch_reader.MERGE_BYTES_MAX", 32 << 20)
    blob, names = MemoryBlob(), part_names("s")
    value, batches = bytes(1 << 20), []
    for number in range(4):
        rows = [put(b"%06d" % i, number + 1, value) for i in range(number, 200, 4)]
        desc = BatchDesc(number + 1, number + 2)
        batches.append(write_batch(blob, desc, versions(rows, size=4), names=names))
    before, most, found = pa.total_allocated_bytes(), 0, 0
    for window in read_batches(blob, batches, view=Window(0, 99)):
        most = max(most, pa.total_allocated_bytes() - before)
        found += window.num_rows
    assert found == 200
    # The sources buffer and decode. Two windows are held at once, and each of them unsorted as
    # well.
    assert most < 4 * (32 << 20)


def test_one_key_with_more_versions_than_a_batch_stays_in_one_window() -> None:
    rows = [put(b"hot", t) for t in range(1000)] + [put(b"z", 1)]
    sources = [versions(rows[i::3], size=10) for i in range(3)]
    windows = [w.whole() for w in merge_sorted([(iter(source), ONE_ROW) for source in sources])]
    assert rows_of(windows) == in_order(rows)
    assert windows[0].num_rows == 1000


def test_runs_of_several_writers_read_as_one_batch() -> None:
    store = Store()
    even = store.batch(0, 5, versions([put(b"a", 1), put(b"c", 1)]))
    odd = store.batch(0, 5, versions([put(b"b", 1), put(b"d", 1)]))
    both = concat_batches([even, odd])
    assert list(state_of(store.read([both], AsOf(4)))) == [b"a", b"b", b"c", b"d"]


def test_no_batches_read_as_nothing() -> None:
    assert list(read_batches(MemoryBlob(), [], view=AsOf(5))) == []
