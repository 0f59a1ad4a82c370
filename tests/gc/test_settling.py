"""Settling: old small imports become plain versions, and no read sees a difference."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import ManualClock, Span, Store, bulk
from kvstore.codec.keys import FIRST_TIMED_SUFFIX, TAIL_BYTES
from kvstore.engine.api import DATA, META, pairs
from kvstore.engine.rocks import RocksCursor
from kvstore.errors import HistoryGoneError, ImportRefusedError, UsageError
from tests.gc.garbage import readable
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

Rows = dict[bytes, bytes | None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvstore.open(tmp_path / "db", durability="async", clock=ManualClock(1)) as store:
        yield store


@pytest.fixture(params=["listed", "swept"])
def usual(request: pytest.FixtureRequest) -> Iterator[None]:
    """Usual limits of settling, with lists of keys or without, in batches of one row."""
    listed = 1 << 20 if request.param == "listed" else -1
    with bounds(
        SETTLE_ROWS_MAX=100,
        SETTLE_STEP_ROWS=1,
        IMPORT_KEYS_BYTES_MAX=listed,
        PAST_IMPORTS_MAX=100,
    ):
        yield


def add(store: Store, staging: Path, rows: Rows, import_id: int | None = None) -> int:
    made = bulk.Import.create(staging, import_id=import_id)
    with made.writer() as writer:
        for key, value in sorted(rows.items()):
            writer.delete(key) if value is None else writer.put(key, value)
    made.seal()
    bulk.ingest(store, staging)
    return made.import_id


def references(store: Store) -> int:
    """Stored rows that carry a reference to an import."""
    entries = pairs(parts_of(store).engine.cursor(DATA))
    return sum(key[-TAIL_BYTES:] < FIRST_TIMED_SUFFIX for key, _ in entries)


def records(store: Store, prefix: str) -> int:
    entries = pairs(parts_of(store).engine.cursor(META))
    return sum(key.startswith(prefix.encode()) for key, _ in entries)


def crossing(store: Store, place: Path) -> int:
    """Make imports that cross versions, each other and a range tombstone; returns the `since` to
    use."""
    store.put(b"b", b"before")
    store.put(b"x", b"never imported")
    add(store, place / "1", {b"a": b"1", b"b": b"1", b"c": None, b"\x00": b"1"}, 1)
    store.delete_range(b"c", b"d")
    add(store, place / "2", {b"b": None, b"c": b"2", b"y": b"2" * 3000}, 2)
    store.put(b"a", b"between")
    add(store, place / "3", {b"a": b"3", b"b": b"3"}, 3)
    since = int(store.upper) - 1
    store.put(b"b", b"after")
    add(store, place / "4", {b"a": b"4", b"d": b"4"}, 4)
    store.delete_range(b"c", b"cc")
    add(store, place / "5", {b"c": b"5", b"z": b"5"}, 5)
    store.revert_import(5)
    return since


@pytest.mark.usefixtures("usual")
def test_old_small_imports_become_plain_versions_and_every_read_stays(
    store: Store, tmp_path: Path
) -> None:
    since = crossing(store, tmp_path)
    upto = store.upper - 1
    before = readable(store, since, upto)
    report = store.gc(before=since)
    assert report.settled == 3
    assert readable(store, since, upto) == before
    assert sorted(each.import_id for each in store.imports.all()) == [4, 5]
    assert store.stats()["imports"] == 2
    assert references(store) == 4
    assert records(store, "import/") == 2
    assert records(store, "past-import/") == 3
    assert store.verify().problems == ()
    assert store.gc(before=since).settled == 0
    report = store.gc(before=store.upper - 1)
    assert (report.settled, report.imports) == (1, 1)
    assert references(store) == records(store, "import/") == records(store, "import-keys/") == 0
    assert dict(store.scan()) == dict(before[-3])  # type: ignore[call-overload]
    assert store.verify().problems == ()


@pytest.mark.usefixtures("usual")
def test_every_read_agrees_before_in_and_after_every_step(store: Store, tmp_path: Path) -> None:
    """Scans that began before a step continue after it; handles that open at a step read the
    same."""
    since = crossing(store, tmp_path)
    upto = store.upper - 1
    before = readable(store, since, upto)
    state = dict(store.scan(as_of=since))
    history = {key: store.history(key) for key in (b"a", b"b", b"d")}
    running = [store.scan(as_of=since), store.scan(as_of=since, reverse=True)]
    rows = [[next(scan)] for scan in running]
    batches = store.scan_batches(as_of=since, batch_rows=1)
    steps: list[str] = []

    def look(step: str) -> None:
        steps.append(step)
        assert readable(store, since, upto) == before
        assert store.get_many(sorted(state), since) == [state[key] for key in sorted(state)]
        assert [store.get(key, since) for key in sorted(state)] == [state[k] for k in sorted(state)]
        assert all(store.history(key)[0] == history[key][0] for key in history)
        for scan, seen in zip(running, rows, strict=True):
            seen.extend(islice(scan, 1))
        copy = tmp_path / f"copy-{len(steps)}"
        store.checkpoint(copy)
        with kvstore.open_read_only(copy) as opened:
            assert dict(opened.scan(as_of=since)) == state
            assert list(opened.changes(since)) == list(store.changes(since))

    parts_of(store).collector.at_step = look
    store.gc(before=since)
    assert steps.count("settled") >= 6
    for scan, seen, reverse in zip(running, rows, (False, True), strict=True):
        assert [*seen, *scan] == sorted(state.items(), reverse=reverse)
    read = [tuple(row.values()) for row in batches.read_all().to_pylist()]
    assert read == sorted(state.items())


@pytest.mark.usefixtures("usual")
def test_a_reader_of_an_old_view_and_one_of_the_new_agree(store: Store, tmp_path: Path) -> None:
    """A reader may take the view before entries settle, and read them afterwards."""
    since = crossing(store, tmp_path)
    versions = parts_of(store).versions
    former = versions.view
    keys = [b"a", b"b", b"c", b"y"]
    expected = versions.get_many(keys, since)
    store.gc(before=since)
    present = versions.view
    assert len(present.stamps) < len(former.stamps)
    versions.view = former
    assert versions.get_many(keys, since) == expected
    assert [row for chunk in versions.scan(Span(), since) for row in zip(*chunk, strict=True)] == (
        sorted(store.scan(as_of=since))
    )
    versions.view = present


class BetweenIterators(RocksCursor):
    """A pass that calls `happens` between the making of its two iterators."""

    happens: Callable[[], object]

    def __init__(self, family: Any, *arguments: Any, **options: Any) -> None:
        made: list[str] = []

        class Family:
            def __getattr__(self, name: str) -> Any:
                made.append(name)
                if len(made) == 2:
                    BetweenIterators.happens()
                return getattr(family, name)

        super().__init__(Family(), *arguments, **options)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("older", "newer"), [(0, 0), (40, 0), (0, 40), (40, 40)])
@pytest.mark.parametrize("first", [0, 1])
def test_an_import_that_settles_between_the_iterators_of_a_pass_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    reverse: bool,
    older: int,
    newer: int,
    first: int,
) -> None:
    """`first` rows are read by a kept reader, before the pass."""
    with (
        bounds(SETTLE_ROWS_MAX=9, IMPORT_KEYS_BYTES_MAX=9, FEW_ROWS_MAX=first),
        kvstore.open(tmp_path / "s", "rocksdb", durability="async", clock=ManualClock(1)) as store,
    ):
        for number in range(older):
            store.put(b"k", b"older %d" % number)
        add(store, tmp_path / "1", {b"k": b"row", b"l": b"row"})
        since = store.upper - 1
        for number in range(newer):
            store.put(b"k", b"newer %d" % number)
        parts_of(store).committer.move_since(since)
        parts = parts_of(store)
        BetweenIterators.happens = lambda: list(parts.collector.settling.run(since))
        with monkeypatch.context() as patched:
            patched.setattr("kvstore.engine.rocks.RocksCursor", BetweenIterators)
            chunks = parts.versions.scan(Span(), since, reverse=reverse)
        rows = [row for chunk in chunks for row in zip(*chunk, strict=True)]
        assert references(store) == 0
        assert sorted(rows) == [(b"k", b"row"), (b"l", b"row")]
        store.gc(before=since)


@pytest.mark.usefixtures("usual")
def test_what_may_still_change_does_not_settle(store: Store, tmp_path: Path) -> None:
    """An import above a hold, one that a revert above `since` hides, and a large one."""
    add(store, tmp_path / "1", {b"a": b"1"}, 1)
    add(store, tmp_path / "2", {b"b%d" % n: b"2" for n in range(101)}, 2)
    since = int(store.upper) - 1
    store.revert_import(1)
    store.hold("reader", at=store.put(b"k", b"v"))
    add(store, tmp_path / "3", {b"a": b"3"}, 3)
    upto = store.upper - 1
    before = readable(store, since, upto)
    assert store.gc(before=since).settled == 0
    assert readable(store, since, upto) == before
    assert store.gc(before=store.upper - 1).settled == 0
    assert sorted(each.import_id for each in store.imports.all()) == [2, 3]
    store.revert_import(3)
    store.hold("reader").release()
    assert (store.gc(before=store.upper - 1).settled, len(store.imports.all())) == (0, 1)
    assert references(store) == 101
    assert store.get(b"a") is None


@pytest.mark.usefixtures("usual")
def test_a_settled_import_is_known_and_cannot_be_reverted(store: Store, tmp_path: Path) -> None:
    add(store, tmp_path / "1", {b"a": b"1"}, 7)
    stamp = store.upper - 1
    add(store, tmp_path / "empty", {}, 8)
    store.put(b"a", b"newer")
    assert store.gc(before=store.upper - 1).settled == 2
    for _ in range(2):
        assert bulk.ingest(store, tmp_path / "1") == stamp
        known = store.imports.get(7)
        assert known is not None
        assert (known.added, known.rows, known.state) == (stamp, 1, "added")
        with pytest.raises(HistoryGoneError, match="delete its keys"):
            store.revert_import(7)
        with pytest.raises(UsageError, match="revert it instead"):
            store.imports.abort(7)
        with pytest.raises(ImportRefusedError, match="another manifest"):
            add(store, tmp_path / f"other {_}", {b"b": b"1"}, 7)
    assert store.get(b"a") == b"newer"


def test_imports_are_forgotten_because_others_came(store: Store, tmp_path: Path) -> None:
    with bounds(PAST_IMPORTS_MAX=2, SETTLE_ROWS_MAX=9, SETTLE_STEP_ROWS=9):
        for import_id in range(1, 8):
            add(store, tmp_path / f"{import_id}", {b"k": b"%d" % import_id}, import_id)
            store.gc(before=store.put(b"z", b"") - 1)
            store.gc(before=store.upper - 1)
            kept = records(store, "past-import/")
            assert kept <= 4
            newest = range(max(1, import_id - 1), import_id + 1)
            assert all(store.imports.get(each) for each in newest)
        assert store.imports.get(1) is None
        with pytest.raises(UsageError, match="forgotten"):
            store.revert_import(1)
        assert {each.import_id for each in parts_of(store).imports.past.all()} >= {6, 7}
        bulk.ingest(store, tmp_path / "1")
        assert store.get(b"k") == b"1"


@pytest.mark.usefixtures("usual")
def test_what_is_cleared_while_an_import_settles_does_not_come_back(
    store: Store, tmp_path: Path
) -> None:
    rows: Rows = {b"k%d" % number: b"row" for number in range(9)}
    add(store, tmp_path / "1", rows)
    collector = parts_of(store).collector

    def clear(step: str) -> None:
        if step == "settled":
            collector.at_step = lambda step: None
            store.clear_range(b"k2", b"k9", compact=False)

    collector.at_step = clear
    with bounds(SETTLE_STEP_ROWS=4):
        store.gc(before=store.upper - 1)
    assert set(store.scan()) == {(b"k0", b"row"), (b"k1", b"row")}
    assert references(store) == 0
    assert store.imports.all() == []


def test_work_on_a_small_import_passes_over_no_span(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys may lie among a billion others."""
    versions = parts_of(store).versions

    def fail(*_: object) -> None:
        raise AssertionError("a pass over the spans of an import")

    with bounds(SETTLE_ROWS_MAX=9, IMPORT_KEYS_BYTES_MAX=100):
        rows: Rows = {b"a": b"1", b"m": None, b"z": b"1"}
        store.put(b"k", b"between")
        add(store, tmp_path / "1", rows, 1)
        add(store, tmp_path / "2", rows, 2)
        monkeypatch.setattr(versions, "imported_keys", fail)
        monkeypatch.setattr(
            "kvstore.retention.gc.garbage_in_spans",
            lambda versions, spans, *_, **__: fail() if spans else iter(()),
        )
        monkeypatch.setattr("kvstore.retention.gc.chunks", fail)
        assert [change.key for change in store.changes(0, start=b"b", order="time")] == [
            b"k",
            *(b"m", b"z") * 2,
        ]
        store.revert_import(2)
        assert len(list(store.events(0))) == 1 + 3 + 3 + 3
        report = store.gc(before=store.upper - 1)
        assert (report.settled, report.imports) == (1, 1)
        assert references(store) == 0
        assert dict(store.scan()) == {b"a": b"1", b"k": b"between", b"z": b"1"}


@pytest.mark.usefixtures("usual")
def test_a_small_store_has_one_file_of_rows_behind_imports_that_settled(tmp_path: Path) -> None:
    """A look-up seeks in each file that overlaps others."""
    with kvstore.open(tmp_path / "s", "rocksdb", durability="async") as store:
        with store.batch() as batch:
            for number in range(100):
                batch.put(b"k%02d" % number, b"old")
        store.checkpoint(tmp_path / "flushes")
        add(store, tmp_path / "1", {b"k00": b"new", b"k50": None}, 1)
        state = dict(store.scan())
        opened = store.scan()
        rows = [next(opened)]
        assert store.stats()["data_files"] == 2
        assert store.gc(before=store.upper - 1).settled == 1
        assert store.stats()["data_files"] == 1
        assert [*rows, *opened] == list(state.items())
        assert store.get_many(list(state)) == list(state.values())
        add(store, tmp_path / "4", {b"k99": b"2"}, 4)
        files = store.stats()["data_files"]
        store.gc(before=0)
        assert store.stats()["data_files"] == files
        assert store.verify().problems == ()


def test_a_file_with_rows_that_it_does_not_tell_has_no_key_list(
    store: Store, tmp_path: Path
) -> None:
    record = kvstore.ImportRecord(7, "digest", 2, 10, (Span(b"a", b"c"),))
    store.imports.prepare(record, {b"a"})
    assert store.imports.keys_of(record) is None
    assert records(store, "import-keys/") == 0


CRASH = textwrap.dedent(
    """
    import os, signal, sys
    import kvstore
    from kvstore import ManualClock
    from tests.harness.bounds import bounds
    from tests.harness.parts import parts_of

    path, since, nth = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = kvstore.open(
        path, engine=os.environ["EACH_ENGINE"], durability="async", clock=ManualClock(1)
    )
    seen = []

    def die(name):
        seen.append(name)
        if seen.count("settled") == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    parts_of(store).collector.at_step = die
    with bounds(SETTLE_STEP_ROWS=1):
        store.gc(before=since)
    """
)


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("nth", range(1, 9))
def test_a_kill_after_each_batch_leaves_what_the_next_run_goes_on_with(
    tmp_path: Path, nth: int
) -> None:
    path = tmp_path / "db"
    with kvstore.open(path, durability="async", clock=ManualClock(1)) as store:
        since = crossing(store, tmp_path)
        upto = store.upper - 1
        before = readable(store, since, upto)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", CRASH, str(path), str(since), str(nth)], env=environment, check=False
    )
    assert child.returncode == -9
    with kvstore.open(path, durability="async", clock=ManualClock(1)) as store:
        assert 4 <= references(store) <= 9
        past = records(store, "past-import/")
        assert store.since == since
        assert store.verify().problems == ()
        assert readable(store, since, upto) == before
        assert store.gc(before=since).settled == 3 - past
        assert readable(store, since, upto) == before
        assert references(store) == 4
        assert records(store, "past-import/") == 3
        assert store.verify().problems == ()
