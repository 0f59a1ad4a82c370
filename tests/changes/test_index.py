"""The index and the pass over the versions give the same answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import bulk
from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.changes import Change, ChangeIndex, ChangeReader
from kvstore.changes.index import FIRST_STREAM
from kvstore.codec.keys import encode_change_key
from kvstore.engine import CHANGES
from kvstore.limits import CHANGE_CHUNK_BYTES, INLINE_VALUE_BYTES
from kvstore.mvcc import Versions
from kvstore.mvcc.key_history import Revision
from kvstore.store import Store
from kvstore.testing.strategies import bounds, ops, rows
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", clock=kvstore.ManualClock(1000)) as store:
        yield store


def commit(store: Store, writes: list[Any]) -> int:
    with store.batch(durability="async") as batch:
        for op, *args in writes:
            getattr(batch, op)(*(arg for arg in args if arg is not None))
    assert batch.timestamp is not None
    return batch.timestamp


def read(store: Store, floor: int, since: int, upto: int, bound: Any, **how: Any) -> list[Change]:
    """The changes of a window, from the index if it is complete from `floor` on, else by a pass."""
    reader = ChangeReader(parts_of(store).versions, parts_of(store).index, store.imports.rows_in)
    return list(reader.changes(Span(*bound), since=since, upto=upto, index_floor=floor, **how))


def canonical(change: Change) -> tuple[int, bool, bytes]:
    return change.timestamp, change.op != "delete_range", change.key


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ops, min_size=1, max_size=6), st.data())
def test_both_ways_of_reading_agree(
    tmp_path: Path, history: list[list[Any]], data: st.DataObject
) -> None:
    """Every window, span, order and revision; with an import in the middle that is reverted."""
    place = tmp_path / str(len(list(tmp_path.iterdir())))
    with kvstore.open(place / "store", durability="async") as store:
        moments = [0]
        imported = data.draw(rows)
        for number, writes in enumerate(history):
            moments.append(commit(store, writes))
            if number == len(history) // 2:
                made = bulk.Import.create(place / "staged")
                with made.writer() as writer:
                    for key in sorted(imported):
                        value = imported[key]
                        writer.delete(key) if value is None else writer.put(key, value)
                made.seal()
                moments.append(bulk.ingest(store, made.staging))
        if data.draw(st.booleans()):
            moments.append(store.revert_import(made.import_id))
        since, upto = sorted(data.draw(st.lists(st.sampled_from(moments), min_size=2, max_size=2)))
        bound = data.draw(bounds)
        for revisions in ("all", "latest"):
            for order in ("key", "time"):
                how = {"revisions": revisions, "order": order}
                indexed = read(store, 0, since, upto, bound, **how)
                passed = read(store, TIMESTAMP_MAX, since, upto, bound, **how)
                # within a commit the pass knows the keys, and not the order of the changes
                if order == "time":
                    indexed.sort(key=canonical)
                    passed.sort(key=canonical)
                assert indexed == passed


def test_changes_of_a_batch_come_in_the_order_they_took_effect(store: Store) -> None:
    writes = [("put", b"z", b"1"), ("delete_range", b"k", b"m"), ("delete", b"a", None)]
    at = commit(store, writes)
    assert list(store.changes(0, order="time")) == [
        Change(at, "delete_range", b"k", b"m", None),
        Change(at, "put", b"z", None, b"1"),
        Change(at, "delete", b"a", None, None),
    ]


def test_large_values_are_read_from_the_versions(store: Store) -> None:
    large = b"x" * (INLINE_VALUE_BYTES + 1)
    first = store.put(b"k", large)
    store.put(b"k", b"small")
    store.delete_range(b"a", b"z")
    stored = parts_of(store).engine.get(CHANGES, encode_change_key(FIRST_STREAM, first))
    assert stored is not None
    assert len(stored) < 100
    assert next(store.changes(0, order="time")).value == large


@pytest.mark.usual_limits
def test_a_large_commit_is_cut_into_chunks_and_comes_back_whole(store: Store) -> None:
    value = b"v" * INLINE_VALUE_BYTES
    count = 3 * CHANGE_CHUNK_BYTES // INLINE_VALUE_BYTES
    with store.batch() as batch:
        batch.delete_range(b"key", b"kez")
        for number in range(count):
            batch.put(b"key%08d" % number, value)
    chunks = list(ChangeIndex(parts_of(store).engine).read(since=0, upto=store.upper))
    assert [chunk.chunk for chunk in chunks] == list(range(len(chunks)))
    assert len(chunks) == 4
    assert [chunk.entry.is_last for chunk in chunks] == [False, False, False, True]
    found = list(store.changes(0, order="time"))
    assert found[0].op == "delete_range"
    assert [change.key for change in found[1:]] == [b"key%08d" % n for n in range(count)]
    assert {change.timestamp for change in found} == {batch.timestamp}


def test_chained_windows_neither_skip_nor_repeat(store: Store) -> None:
    moments = [store.put(b"k%d" % (n % 3), b"%d" % n) for n in range(20)]
    whole = list(store.changes(0, order="time"))
    edges = [0, moments[4], moments[4], moments[11] - 1, moments[11], moments[19]]
    chained = [
        change
        for since, upto in pairwise(edges)
        for change in store.changes(since, upto, order="time")
    ]
    assert chained == whole
    assert [change.timestamp for change in whole] == moments


def test_latest_from_the_beginning_is_the_state_and_later_keeps_deletions(store: Store) -> None:
    store.put(b"a", b"1")
    middle = store.put(b"b", b"2")
    store.delete(b"a")
    store.delete_range(b"b", b"c")
    at = store.put(b"c", b"3")
    assert list(store.changes(0, revisions="latest")) == [Change(at, "put", b"c", None, b"3")]
    ops_later = [change.op for change in store.changes(middle, revisions="latest")]
    assert ops_later == ["delete", "delete_range", "put"]


def test_a_window_larger_than_memory_allows_is_read_by_a_pass(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        store.put(b"k%d" % (number % 7), b"v", durability="async")
    expected = list(store.changes(5))
    monkeypatch.setattr("kvstore.changes.windows.SORTED_CHANGES_MAX", 10)
    assert list(store.changes(5)) == expected
    assert len(expected) == 50


def noting(method: Callable[..., Iterator[Any]], noted: list[object]) -> Any:
    """The method, with a note of each item that a caller takes from it."""

    def taken(*arguments: Any) -> Iterator[Any]:
        for item in method(*arguments):
            noted.append(item)
            yield item

    return taken


def test_the_latest_changes_in_time_order_read_the_history_of_each_key_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = store.put(b"k0", b"v", durability="async")
    for number in range(60):
        store.put(b"k%d" % (number % 3), b"%d" % number, durability="async")
    asked: list[bytes] = []
    revisions = Versions.revisions

    def noted(self: Versions, key: bytes) -> list[Revision]:
        asked.append(key)
        return revisions(self, key)

    monkeypatch.setattr(Versions, "revisions", noted)
    monkeypatch.setattr("kvstore.changes.windows.SORTED_CHANGES_MAX", 1000)
    found = list(store.changes(since, revisions="latest", order="time"))
    assert [change.value for change in found] == [b"57", b"58", b"59"]
    assert sorted(asked) == [b"k0", b"k1", b"k2"]


@pytest.mark.parametrize("streams", [1, 3])
def test_a_small_span_is_read_without_the_changes_beside_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    """A window of many commits, few of them in the span: the read leaves the index early."""
    if streams > 1:
        store.reshard(streams)
    store.put(b"key", b"1", durability="async")
    since = store.delete_range(b"a", b"z")
    assert since is not None
    store.put(b"key", b"2", durability="async")
    for number in range(200):
        store.put(b"x%d" % (number % 7), b"v", durability="async")
    store.delete(b"key", durability="async")
    last = store.put(b"key", b"3", durability="async")
    span: dict[str, Any] = {"start": b"key", "end": b"key\0"}
    expected = list(store.changes(since, **span))
    newest = list(store.changes(since, revisions="latest", **span))
    assert [change.value for change in expected] == [b"2", None, b"3"]
    assert newest == [Change(last, "put", b"key", None, b"3")]

    read: list[object] = []
    for name in ("commits_in", "rows_in"):
        monkeypatch.setattr(ChangeIndex, name, noting(getattr(ChangeIndex, name), read))
    monkeypatch.setattr("kvstore.changes.windows.SCAN_CHUNK", 8)
    monkeypatch.setattr("kvstore.changes.windows.SORTED_CHANGES_MAX", 1000)
    assert list(store.changes(since, **span)) == expected
    assert list(store.changes(since, revisions="latest", **span)) == newest
    assert len(read) == 16, "eight rows of the index for each, then the entries of the span"
    assert store.revert_range(b"key", b"key\0", since) is not None
    assert store.get(b"key") is None
    assert len(read) == 24
