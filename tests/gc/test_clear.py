"""Clearing a span: it reads as empty afterwards, and no read before it gives a wrong answer."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import ManualClock, Position, Span, Store, Timestamp
from kvstore.engine.api import DATA, RANGES, pairs
from kvstore.errors import HistoryGoneError, HistoryHeldError, UsageError
from kvstore.limits import INLINE_VALUE_BYTES
from kvstore.mvcc import Fragments
from kvstore.mvcc.versions import stored_tombstones
from tests.harness.parts import parts_of
from tests.harness.soak import soaked
from tests.mvcc.invariants import check_fragments

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

KEYS = [bytes([letter]) for letter in b"abcdef"]


def fill(store: Store) -> int:
    for key in KEYS:
        last = store.put(key, b"v")
    return last


def test_cleared_span_reads_as_empty_and_the_rest_as_before(store: Store) -> None:
    before = fill(store)
    cleared = store.clear_range(b"b", b"e")
    assert [key for key, _ in store.scan()] == [b"a", b"e", b"f"]
    assert store.get(b"c") is None
    assert store.history(b"c") == []
    assert store.get(b"a", as_of=before) == b"v"
    assert list(store.scan(b"e", as_of=before)) == [(b"e", b"v"), (b"f", b"v")]
    assert list(store.changes(cleared)) == []
    store.put(b"c", b"again")
    assert [change.key for change in store.changes(cleared)] == [b"c"]


def test_reads_and_windows_that_start_before_a_clear_are_refused_with_span_and_remedy(
    store: Store,
) -> None:
    before = fill(store)
    cleared = store.clear_range(b"b", b"e")
    for read in (
        lambda: store.get(b"c", before),
        lambda: store.get_many([b"a", b"c"], before),
        lambda: store.scan(as_of=before),
        lambda: store.scan(b"d", b"z", as_of=before, reverse=True),
        lambda: store.scan_batches(as_of=before),
        lambda: store.changes(before),
        lambda: store.changes(0, before, revisions="latest"),
        lambda: store.revert_range(b"a", b"c", to=before),
        lambda: store.events(before),
        lambda: store.changes_batches(before),
        lambda: store.feeds.follow(before),
        lambda: store.feed("f", start=before),
        lambda: store.feed("f", start=Position(Timestamp(before))),
        lambda: store.feed("f", start=0, span=Span(b"d", b"z")),
        lambda: store.feeds.quiescent_points(before),
        lambda: store.put_if(b"c", b"w", unchanged_since=before),
        lambda: store.replication.export(since=before, upto=store.upper - 1),
    ):
        with pytest.raises(HistoryGoneError, match=r"\[b'b', b'e'\).*read at") as caught:
            read()
        assert caught.value.span == (b"b", b"e")
        assert caught.value.since == cleared
    assert list(store.changes(before, start=b"e")) == []
    assert store.holds.all() == []  # a refused feed leaves no hold
    beside = store.feed("f", start=0, span=Span(b"e", b"z"))
    assert [event.key for batch in beside for event in batch.events] == [b"e", b"f"]


def test_an_export_does_not_take_large_values_that_a_clear_took_for_damage(store: Store) -> None:
    before = fill(store)
    store.put(b"c", bytes(INLINE_VALUE_BYTES + 1))
    store.clear_range(b"b", b"e")
    with pytest.raises(HistoryGoneError, match="read at"):
        store.replication.export(since=before, upto=store.upper - 1)


def test_a_clear_between_the_call_and_the_first_row_refuses_the_pass(store: Store) -> None:
    before = fill(store)
    passes = [
        store.changes(before),
        store.events(before),
        store.feeds.follow(before),
        store.changes_batches(before),
    ]
    store.clear_range(b"b", b"e")
    for each in passes:
        with pytest.raises(HistoryGoneError, match="cleared"):
            next(iter(each))


def test_clear_is_refused_while_a_hold_or_reader_needs_the_history(store: Store) -> None:
    fill(store)
    hold = store.hold("nightly backup")
    with pytest.raises(HistoryHeldError, match="nightly backup"):
        store.clear_range(b"b", b"e")
    hold.release()
    with store.snapshot(), pytest.raises(HistoryHeldError, match="snapshot"):
        store.clear_range(b"b", b"e")
    with store.transaction() as txn:
        txn.get(b"a")
        with pytest.raises(HistoryHeldError):
            store.clear_range(b"b", b"e")
    assert store.get(b"c") == b"v"
    record = kvstore.ImportRecord(7, "digest", 1, 1, (Span(b"c", b"d"),))
    store.imports.prepare(record)
    with pytest.raises(HistoryHeldError, match="being added"):
        store.clear_range(b"b", b"e")
    store.clear_range(b"e", b"f")
    store.imports.abort(7)
    store.clear_range(b"b", b"e")
    assert store.get(b"c") is None


def test_clear_needs_an_end_and_a_span_that_is_not_empty(store: Store) -> None:
    for end in (None, b"a"):
        with pytest.raises(UsageError):
            store.clear_range(b"a", end)  # type: ignore[arg-type]


def test_range_tombstones_are_cut_exactly_on_disk_and_in_memory(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db", clock=ManualClock()) as store:
        wide = store.delete_range(b"a", b"z")
        left = store.delete_range(b"a", b"d")
        right = store.delete_range(b"d", b"z")
        store.clear_range(b"c", b"f")
        fragments = parts_of(store).versions.view.fragments
        assert list(fragments.pieces(Span())) == [
            (b"a", b"c", (left, wide)),
            (b"f", b"z", (right, wide)),
        ]
    with kvstore.open(tmp_path / "db", clock=ManualClock()) as store:
        assert parts_of(store).versions.view.fragments == fragments


def test_space_of_a_cleared_span_comes_back(store: Store) -> None:
    with store.batch() as batch:
        for number in range(2000):
            batch.put(b"%05d" % number, os.urandom(1000))
    parts_of(store).engine.compact(DATA)
    before = parts_of(store).engine.stats()["data_bytes"]
    store.clear_range(b"0", b"1")
    assert parts_of(store).engine.stats()["data_bytes"] < before / 10


def test_record_of_a_clear_goes_when_since_has_passed_it(store: Store) -> None:
    before = fill(store)
    cleared = store.clear_range(b"b", b"e")
    store.gc(before=before)
    assert parts_of(store).clears.all()
    store.gc(before=cleared)
    assert parts_of(store).clears.all() == ()
    with pytest.raises(HistoryGoneError) as caught:
        store.get(b"c", before)
    assert caught.value.since == cleared


def test_time_of_a_clear_is_never_taken_again_after_a_reopen(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    store = kvstore.open(tmp_path / "db", clock=clock)
    fill(store)
    cleared = store.clear_range(b"b", b"e")
    parts_of(store).engine.close()
    with kvstore.open(tmp_path / "db", clock=ManualClock(1)) as store:
        assert store.upper > cleared
        assert store.put(b"c", b"v") > cleared
        with pytest.raises(HistoryGoneError):
            store.get(b"c", cleared - 1)


@pytest.mark.parametrize("rounds", [60, *soaked(600)])
def test_readers_that_race_with_clears_and_gc_are_refused_or_right_never_wrong(
    store: Store, rounds: int
) -> None:
    """A clear writes `a` and `b` anew each time, in one batch: readers see both or neither."""
    store.put(b"a", b"0")
    store.put(b"b", b"0")
    stopping, wrong = threading.Event(), []

    def read() -> None:
        while not stopping.is_set():
            at = store.upper - 1
            try:
                one, other = store.get_many([b"a", b"b"], as_of=at)
                rows = dict(store.scan(as_of=at))
            except HistoryGoneError:
                continue
            if one != other or rows.get(b"a") != one or rows.get(b"b") != one:
                wrong.append((at, one, other, rows))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for round_ in range(rounds):
        with store.batch() as batch:
            batch.put(b"a", b"%d" % round_)
            batch.put(b"b", b"%d" % round_)
        if round_ % 3:
            store.gc(before=store.upper - 1)
        else:
            store.clear_range(b"a", b"c", compact=False)
    stopping.set()
    for reader in readers:
        reader.join()
    assert wrong == []


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=10),
    st.integers(0, 5),
    st.integers(1, 6),
)
def test_cut_on_disk_equals_cut_in_memory(
    tmp_path_factory: pytest.TempPathFactory,
    ranges: list[tuple[int, int, bool]],
    start: int,
    length: int,
) -> None:
    path = tmp_path_factory.mktemp("clear") / "db"
    with kvstore.open(path, durability="async", clock=ManualClock()) as store:
        for low, width, twice in ranges:
            with store.batch() as batch:
                batch.delete_range(bytes([low]), bytes([low + width]))
                if twice:
                    batch.delete_range(bytes([low + 7]), bytes([low + 8]))
        store.clear_range(bytes([start]), bytes([start + length]), compact=False)
        fragments = parts_of(store).versions.view.fragments
        check_fragments(fragments)
        assert store.verify().problems == ()
        assert Fragments.of(stored_tombstones(parts_of(store).engine)) == fragments
        assert not list(fragments.pieces(Span(bytes([start]), bytes([start + length]))))


def test_a_clear_passes_over_the_range_tombstones_near_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        store.delete_range(b"%03d" % number, b"%03d~" % number)
    passed, cursor = [], parts_of(store).engine.cursor

    def counted(family: str, *bounds: bytes | None, reverse: bool = False) -> object:
        if family == RANGES:
            passed.extend(found for found, _ in pairs(cursor(family, *bounds)))  # type: ignore[arg-type]
        return cursor(family, *bounds, reverse=reverse)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(parts_of(store).engine, "cursor", counted)
        store.clear_range(b"090", b"092", compact=False)  # two tombstones, and the one at its end
        assert len(passed) == 3
        passed.clear()
        store.clear_range(b"100", b"100a", compact=False)
        assert len(passed) == 1
        store.delete_range(b"110", b"190")
        passed.clear()
        store.clear_range(b"120", b"121", compact=False)
        assert len(passed) >= 10
    assert store.verify().problems == ()


CRASH = textwrap.dedent(
    """
    import os, signal, sys
    import kvstore
    from tests.harness.parts import parts_of
    from kvstore import ManualClock

    path, when = sys.argv[1:]
    store = kvstore.open(
        path, engine=os.environ["EACH_ENGINE"], durability="async", clock=ManualClock(1)
    )
    engine = parts_of(store).engine
    write, sync = engine.write, engine.sync

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "before":
        store._clearing._clears.stage = die
    else:
        engine.sync = die
    store.clear_range(b"b", b"e")
    """
)


@pytest.mark.parametrize("when", ["before", "after"])
def test_crash_in_a_clear_leaves_all_of_it_or_nothing(tmp_path: Path, when: str) -> None:
    path = tmp_path / "db"
    with kvstore.open(path, clock=ManualClock(1)) as store:
        before = fill(store)
        store.delete_range(b"c", b"f")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", CRASH, str(path), when], env=environment, check=False
    )
    assert child.returncode == -9
    with kvstore.open(path, clock=ManualClock(1)) as store:
        if parts_of(store).clears.all():
            with pytest.raises(HistoryGoneError):
                store.get(b"b", before)
            assert list(store.scan()) == [(b"a", b"v"), (b"f", b"v")]
        else:
            assert when == "before"
            assert store.get(b"c", before) == b"v"
            assert list(store.scan()) == [(b"a", b"v"), (b"b", b"v"), (b"f", b"v")]
        assert store.verify().problems == ()


def test_reads_of_many_times_name_the_first_label_whose_history_was_cleared(
    tmp_path: Path,
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        first = store.put(b"a", b"1")
        store.put(b"c", b"2")
        cleared = store.clear_range(b"b", b"d")
        assert store.get_many([b"a", b"c"], [first, cleared]) == [b"1", None]
        with pytest.raises(HistoryGoneError, match="row 1, key b'c'") as refused:
            store.get_many([b"a", b"c", b"c"], [first, first, first])
        assert (refused.value.as_of, refused.value.since) == (first, cleared)
        assert store.floor_many([b"a", b"az"], [first, first]) == [(b"a", b"1")] * 2
        assert store.floor(b"a", first) == (b"a", b"1")
        with pytest.raises(HistoryGoneError, match="row 1, key b'd'"):
            store.floor_many([b"a", b"d"], [first, first])
        assert store.floor(b"d", first, prefix=b"d") is None
        assert store.floor(b"d", cleared) == (b"a", b"1")
