"""GC removes what no reader at or above `since` can see, and looks only at what changed."""

from __future__ import annotations

import contextlib
import itertools
import os
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import ManualClock, Store
from kvstore.base.meters import WorkCount
from kvstore.codec.keys import frame
from kvstore.engine.api import CHANGES, DATA, RANGES, EntryReader
from kvstore.errors import HistoryGoneError, UsageError
from kvstore.mvcc.passes import stored_keys
from kvstore.retention.gc import garbage, garbage_of_keys
from tests.gc.garbage import KEYS, add_import, left_over, readable, stored
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_reads_below_since_are_refused_and_above_are_as_before(store: Store) -> None:
    first = store.put(b"k", b"1")
    second = store.put(b"k", b"2")
    report = store.gc(before=second)
    assert (report.versions, report.since) == (1, second)
    assert store.get(b"k", as_of=second) == b"2"
    assert [version.value for version in store.history(b"k")] == [b"2"]
    for read in (
        lambda: store.get(b"k", first),
        lambda: store.get_many([b"k"], first),
        lambda: store.scan(as_of=first),
        lambda: store.scan_batches(as_of=first),
        lambda: store.snapshot(first),
        lambda: store.changes(first),
    ):
        with pytest.raises(HistoryGoneError):
            read()


def test_range_tombstone_goes_with_all_it_covers_and_nothing_comes_back(store: Store) -> None:
    for key in KEYS:
        store.put(key, b"v")
    store.delete_range(b"b", b"e")
    report = store.gc(before=store.now())
    assert (report.versions, report.range_tombstones) == (3, 1)
    assert [key for key, _ in store.scan()] == [b"a", b"e", b"f"]
    assert (stored(store, DATA), stored(store, RANGES), stored(store, CHANGES)) == (3, 0, 0)


def test_gc_looks_at_each_change_once(store: Store) -> None:
    for _ in range(3):
        for key in KEYS:
            store.put(key, b"v")
    assert store.gc(before=store.now()).change_entries == 3 * len(KEYS)
    again = store.gc(before=store.now())
    assert (again.change_entries, again.versions) == (0, 0)
    store.put(b"a", b"v")
    assert store.gc(before=store.now()).change_entries == 1


def test_files_shrink_after_gc_with_compaction(store: Store) -> None:
    value = os.urandom(1000)
    for _ in range(4):
        with store.batch() as batch:
            for number in range(500):
                batch.put(b"%05d" % number, value + os.urandom(1000))
    parts_of(store).engine.compact(DATA)
    parts_of(store).engine.compact(CHANGES)
    before = parts_of(store).engine.stats()
    store.gc(before=store.now(), compact=True)
    after = parts_of(store).engine.stats()
    assert after["data_bytes"] < before["data_bytes"] / 3
    assert after["changes_bytes"] < before["changes_bytes"] / 10
    assert sum(1 for _ in store.scan()) == 500


@pytest.mark.parametrize("entries_max", [1, 2, 3, 100])
def test_keys_that_changed_are_looked_up_in_pieces(store: Store, entries_max: int) -> None:
    """GC removes all versions of a deleted key, and all but the newest of a live key, the oldest
    entry first. Keys with neighbouring bytes are not mixed up."""
    keys = [b"", b"\x00", b"\x00\x01", b"a", b"a\x00", b"a\x00\xff", b"a\xff", b"b"]
    for number in range(3):
        for key in keys:
            store.put(key, b"%d" % number)
    for key in keys[::2]:
        store.delete(key)
    since = store.upper - 1
    for key in keys[:4]:
        store.put(key, b"above")
    found = list(garbage_of_keys(parts_of(store).versions, keys, since, entries_max=entries_max))
    expected = []
    for key, entries in stored_keys(parts_of(store).engine.cursor(DATA)):
        tails = garbage([tail for tail, _ in entries], {}, (), since=since)
        expected += [frame(key) + tail for tail in tails]
    assert found == expected
    assert len(found) == 4 * 2 + 4 * 4


@pytest.mark.usual_limits
@pytest.mark.parametrize(
    ("limits", "sorted_together"),
    [({}, 20), ({"GC_SORTED_KEYS_MAX": 6}, 6), ({"GC_SORTED_KEYS_BYTES_MAX": 12}, 6)],
    ids=["usual", "keys", "bytes"],
)
def test_changed_keys_are_sorted_before_they_are_looked_up(
    tmp_path: Path, limits: dict[str, int], sorted_together: int
) -> None:
    """Many batches remove the garbage of one sorted set of keys. Each batch tells an estimate of
    the whole work."""
    keys = [b"%02d" % (number * 7 % 20) for number in range(20)]
    removed: list[bytes] = []
    told: list[WorkCount] = []
    with kvstore.open(tmp_path / "db", durability="async", clock=ManualClock(1)) as store:
        store.put_many(dict.fromkeys(keys, b"old"))
        store.gc(before=store.upper - 1)
        for key in keys:
            store.put(key, b"new")

        def note(step: str) -> None:
            if step == "versions":
                found = stored_keys(parts_of(store).engine.cursor(DATA))
                single = (key for key, entries in found if len(entries) == 1)
                removed.extend(key for key in single if key not in removed)

        parts_of(store).collector.at_step = note
        parts_of(store).collector.keys_per_step = 2
        with bounds(limits):
            store.gc(before=store.upper - 1, progress=told.append)
    sets = [keys[at : at + sorted_together] for at in range(0, 20, sorted_together)]
    assert removed == [key for each in sets for key in sorted(each)]
    assert told == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert all(15 <= (count.total or 0) <= 25 for count in told[3:])


def test_gc_takes_one_of_before_and_keep(store: Store) -> None:
    for call in ({}, {"before": 1, "keep": timedelta(1)}, {"keep": timedelta(-1)}):
        with pytest.raises(UsageError):
            store.gc(**call)  # type: ignore[arg-type]


def test_gc_of_a_store_that_is_read_only_is_refused_and_removes_no_file(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db", engine="rocksdb") as store:
        store.put(b"k", b"v")
    left = tmp_path / "db" / "ingest" / "00000000000000aa"
    left.mkdir(parents=True)
    os.utime(left, ns=(0, 0))
    with kvstore.open_read_only(tmp_path / "db") as store:
        with pytest.raises(UsageError, match="read only"):
            store.gc(before=0)
        assert store.verify().ok
    assert left.exists()


OPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(KEYS), st.binary(max_size=2)),
    st.tuples(st.just("delete"), st.sampled_from(KEYS)),
    st.tuples(st.just("delete_range"), st.sampled_from(KEYS), st.integers(1, 3)),
    st.tuples(st.just("replace"), st.sampled_from(KEYS), st.binary(max_size=2)),
    st.tuples(st.just("import"), st.sets(st.sampled_from(KEYS), min_size=1)),
    st.tuples(st.just("revert"), st.integers(0, 3)),
    st.tuples(st.just("gc"), st.integers(0, 12)),
)
NUMBERS = itertools.count()


def apply(store: Store, tmp_path: Path, added: list[int], op: tuple) -> None:  # type: ignore
    if op[0] == "put":
        store.put(op[1], op[2])
    elif op[0] == "delete":
        store.delete(op[1])
    elif op[0] == "delete_range":
        store.delete_range(op[1], bytes([op[1][0] + op[2]]))
    elif op[0] == "replace":
        with store.batch() as batch:
            batch.delete_range(op[1], b"z")
            batch.put(op[1], op[2])
    elif op[0] == "import":
        rows = dict.fromkeys(op[1], b"row")
        added.append(add_import(store, tmp_path / f"in{next(NUMBERS)}", rows)[0])
    elif op[0] == "revert" and added:
        with contextlib.suppress(HistoryGoneError, UsageError):
            store.revert_import(added[op[1] % len(added)])


@given(st.lists(OPS, max_size=25))
def test_no_reader_notices_gc_and_no_garbage_stays(
    tmp_path_factory: pytest.TempPathFactory,
    ops: list[tuple],  # type: ignore[type-arg]
) -> None:
    tmp_path = tmp_path_factory.mktemp("gc")
    added: list[int] = []
    with (
        bounds(GC_SORTED_KEYS_MAX=3),
        kvstore.open(tmp_path / "db", durability="async", clock=ManualClock(1)) as store,
    ):
        parts_of(store).collector.keys_per_step = 2
        for op in [*ops, ("gc", 3), ("gc", 0)]:
            if op[0] != "gc":
                apply(store, tmp_path, added, op)
                continue
            upto = store.upper - 1
            since = max(store.since, upto - op[1])
            before = readable(store, since, upto)
            store.gc(before=since)
            assert readable(store, since, upto) == before
            assert left_over(store, since) == []
            assert not parts_of(store).versions.view.fragments.tombstones(
                kvstore.Span(), since=0, upto=since
            )
            assert store.verify().problems == ()


@pytest.mark.parametrize("most", [9, 10])
def test_gc_looks_only_at_keys_that_changed_and_spans_that_were_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    with store.batch() as batch:
        for number in range(3000):
            batch.put(b"%05d" % number, b"v")
    store.gc(before=store.now())
    store.put(b"00007", b"w")
    store.delete_range(b"01000", b"01010")
    store.put(b"00009", b"w")
    engine, sought, passed = parts_of(store).engine, [], []
    cursor, borrow, give_back = engine.cursor, engine.borrow, engine.give_back

    class Sought:
        def __init__(self, reader: EntryReader) -> None:
            self.reader = reader

        def seek(self, key: bytes) -> None:
            sought.append(key)
            self.reader.seek(key)

        def __getattr__(self, name: str) -> object:
            return getattr(self.reader, name)

    def lend() -> tuple[object, Sought]:
        ticket, reader = borrow()
        return ticket, Sought(reader)

    def counted(family: str, start: bytes = b"", end: bytes | None = None, **how: bool) -> object:
        if family == DATA:
            passed.append((start, end))
        return cursor(family, start, end, **how)

    monkeypatch.setattr(engine, "cursor", counted)
    monkeypatch.setattr(engine, "borrow", lend)
    monkeypatch.setattr(engine, "give_back", lambda ticket, lent: give_back(ticket, lent.reader))
    with bounds(GC_SHORT_SPAN_ENTRIES=most):
        assert store.gc(before=store.now()).versions == 12
    assert sorted(sought) == [frame(b"00007"), frame(b"00009"), b"01000"]
    assert passed == ([(b"01000", b"01010")] if most == 9 else [])
