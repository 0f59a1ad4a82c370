"""GC on real stores: nobody at or above `since` notices, the space comes back, crashes heal."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bulk
import kvstore
from kvstore import GcPolicy, ManualClock, Store
from kvstore.codec.keys import TAIL_BYTES, split_data_key
from kvstore.codec.ordered import frame, unframe
from kvstore.engine.api import CHANGES, DATA, RANGES
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import HistoryGoneError, HoldLostError, StorageError, UsageError
from kvstore.gc.rules import garbage
from kvstore.gc.search import garbage_of_keys
from kvstore.mvcc.versions import stored_tombstones

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

KEYS = [bytes([letter]) for letter in b"abcdef"]


def stored(store: Store, family: str) -> int:
    """Entries that a family holds."""
    cursor, total = store._engine.cursor(family), 0
    while keys := cursor.take(1000)[0]:
        total += len(keys)
    return total


def add_import(store: Store, staging: Path, rows: dict[bytes, bytes]) -> tuple[int, int]:
    staged = bulk.Import.create(staging)
    with staged.writer() as writer:
        for key, value in sorted(rows.items()):
            writer.put(key, value)
    staged.seal()
    return staged.import_id, bulk.ingest(store, staging)


def readable(store: Store, since: int, upto: int) -> list[object]:
    """All that readers at or above `since` can ask, up to the time `upto`."""
    states: list[object] = [list(store.scan(as_of=t)) for t in range(since, upto + 1)]
    states.append(list(store.changes(since, upto, order="time")))
    states.append(list(store.changes(since, upto, revisions="latest")))
    return states


def left_over(store: Store, since: int) -> list[bytes]:
    """Stored entries that are garbage at `since`."""
    tails: dict[bytes, list[bytes]] = {}
    cursor = store._engine.cursor(DATA)
    while keys := cursor.take(1000)[0]:
        for key in keys:
            framed, _, _ = split_data_key(key)
            tails.setdefault(unframe(framed), []).append(key[-TAIL_BYTES:])
    fragments, stamps = store._versions.view
    return [
        key
        for key, of_key in tails.items()
        if garbage(of_key, stamps, fragments.stack(key), since=since)
    ]


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


def test_reverted_import_goes_whole_with_its_record(store: Store, tmp_path: Path) -> None:
    store.put(b"b", b"below")
    import_id, _ = add_import(store, tmp_path / "in", dict.fromkeys(KEYS, b"row"))
    store.revert_import(import_id)
    report = store.gc(before=store.now())
    assert (report.versions, report.imports) == (len(KEYS), 1)
    assert list(store.scan()) == [(b"b", b"below")]
    assert store.imports() == []


def test_record_of_an_import_stays_while_a_row_or_a_change_entry_is_left(
    store: Store, tmp_path: Path
) -> None:
    import_id, _ = add_import(store, tmp_path / "in", {b"a": b"row", b"b": b"row"})
    store.put(b"a", b"newer")
    store.gc(before=store.now())
    assert [record.import_id for record in store.imports()] == [import_id]
    assert list(store.scan()) == [(b"a", b"newer"), (b"b", b"row")]
    with pytest.raises(HistoryGoneError, match="delete its keys"):
        store.revert_import(import_id)
    gone = store.delete(b"b")
    store.gc(before=gone - 1)
    assert store.imports()
    store.gc(before=store.now())
    assert store.imports() == []


def test_hold_and_open_snapshot_keep_since_back(store: Store) -> None:
    held = store.put(b"k", b"1")
    hold = store.hold("backup", at=held)
    pinned = store.put(b"k", b"2")
    snapshot = store.snapshot()
    store.put(b"k", b"3")
    report = store.gc(before=store.now())
    assert report.held_back
    assert store.since == held
    hold.release()
    store.gc(before=store.now())
    assert store.since == pinned
    assert snapshot.get(b"k") == b"2"
    snapshot.close()
    assert not store.gc(before=store.now()).held_back
    assert store.since > pinned


def test_hold_over_its_budget_is_lost_and_its_owner_told(tmp_path: Path) -> None:
    clock = ManualClock()
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        store.put(b"k", b"1")
        hold = store.hold("slow", max_age=timedelta(seconds=5))
        clock.advance(6_000_000_000)
        report = store.gc(keep=timedelta(seconds=1))
        assert [lost.name for lost in report.lost_holds] == ["slow"]
        assert store.since == clock.wall_ns() - 1_000_000_000
        with pytest.raises(HoldLostError, match="budget"):
            hold.move(store.upper - 1)


def test_pass_over_changes_that_is_open_stays_valid_while_gc_runs(store: Store) -> None:
    start = store.put(b"k0", b"v" * 5000)
    for number in range(1, 20):
        store.put(b"k%d" % number, b"v" * 5000)
    changes = store.changes(start, order="time")
    first = next(changes)
    store.batch()
    for number in range(1, 20):
        store.delete(b"k%d" % number)
    store.gc(before=store.now())
    assert store.since == start
    assert [first.key, *(change.key for change in changes)] == [b"k%d" % n for n in range(1, 20)]
    store.gc(before=store.now())
    assert store.since > start


def test_scans_that_are_open_see_their_state_through_gc_compaction_and_imports(
    store: Store, tmp_path: Path
) -> None:
    with store.batch() as batch:
        for number in range(20_000):
            batch.put(b"%08d" % number, b"old")
    forward, backward = store.scan(), store.scan(reverse=True)
    columns = iter(store.scan_batches(batch_rows=100))
    seen, turned, first = [next(forward)], [next(backward)], next(columns)
    store.delete_range(b"0", b"1")
    add_import(store, tmp_path / "in", {b"%08d" % number: b"new" for number in range(0, 20_000, 7)})
    store.gc(before=store.now(), compact=True)
    assert stored(store, DATA) == sum(1 for _ in store.scan()) == 2_858
    seen.extend(forward)
    turned.extend(backward)
    assert seen == turned[::-1] == [(b"%08d" % number, b"old") for number in range(20_000)]
    assert first.num_rows + sum(batch.num_rows for batch in columns) == 20_000


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
    store._engine.compact(DATA)
    store._engine.compact(CHANGES)
    before = store._engine.stats()
    store.gc(before=store.now(), compact=True)
    after = store._engine.stats()
    assert after["data_bytes"] < before["data_bytes"] / 3
    assert after["changes_bytes"] < before["changes_bytes"] / 10
    assert sum(1 for _ in store.scan()) == 500


def test_stale_import_and_leftover_files_are_taken_back(tmp_path: Path) -> None:
    clock = ManualClock(2_000_000_000_000_000_000)
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        record = kvstore.ImportRecord(7, "digest", 0, 0, (kvstore.Span(b"a", b"b"),))
        store.prepare_import(record)
        left = tmp_path / "db" / "ingest" / "00000000000000aa"
        left.mkdir(parents=True)
        os.utime(left, ns=(0, 0))
        plain = tmp_path / "db" / "ingest" / "plain"
        plain.touch()
        os.utime(plain, ns=(0, 0))
        link = tmp_path / "db" / "ingest" / "link"
        outside = tmp_path / "outside"
        outside.mkdir()
        link.symlink_to(outside)
        os.utime(link, ns=(0, 0), follow_symlinks=False)
        waiting = tmp_path / "db" / "ingest" / f"{7:016x}"
        waiting.mkdir()
        os.utime(waiting, ns=(0, 0))
        store.gc(before=0)
        assert waiting.exists()
        assert not left.exists()
        assert not plain.exists()
        assert not link.is_symlink()
        assert outside.exists()
        clock.advance(25 * 3600 * 1_000_000_000)
        assert store.gc(before=0).imports == 1
        assert store.imports() == []
        assert not waiting.exists()


@pytest.mark.parametrize("call", ["stat", "listdir"])
def test_a_disk_that_fails_under_leftover_files_is_an_error_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with kvstore.open(tmp_path / "db") as store:
        place = tmp_path / "db" / "ingest"
        place.mkdir()
        real = getattr(os, call)

        def fail(path: object, *rest: object, **options: object) -> object:
            if str(path) == str(place):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *rest, **options)

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(StorageError):
            store.gc(before=0)
        monkeypatch.undo()
        store.gc(before=0)


def test_who_hears_of_a_run_may_close_the_store(tmp_path: Path) -> None:
    closed = threading.Event()

    def close(report: object) -> None:
        store.close()
        closed.set()

    store = kvstore.open(tmp_path / "db", durability="async")
    forever = timedelta.max
    store.start_gc(GcPolicy(keep=timedelta(0), every=forever), after_run=close).wake()
    assert closed.wait(30)
    kvstore.open(tmp_path / "db").close()


def test_files_are_left_over_by_the_clock_that_dates_them(tmp_path: Path) -> None:
    """The store's clock was days ahead once: what is being staged now is not days old for that."""
    clock = ManualClock(time.time_ns() + 3 * 24 * 3600 * 1_000_000_000)
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        staging = tmp_path / "db" / "ingest" / "staging-of-a-job-under-way"
        staging.mkdir(parents=True)
        store.gc(before=0)
        assert staging.exists()


def test_files_whose_owner_removes_them_do_not_disturb_a_run(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db") as store:
        ingest = tmp_path / "db" / "ingest"
        ingest.mkdir()
        (ingest / "gone-when-looked-at").symlink_to("nowhere")
        store.gc(before=0)


def test_an_import_being_added_is_not_stale_however_long_ago_it_was_begun(tmp_path: Path) -> None:
    clock = ManualClock()
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        staged = bulk.Import.create(tmp_path / "staged")
        with staged.writer() as writer:
            writer.put(b"a", b"1")
        staged.seal()

        def killed(step: str) -> None:
            if step == "add":
                raise RuntimeError("killed here")

        with pytest.raises(RuntimeError):
            bulk.ingest(store, tmp_path / "staged", move=True, progress=killed)
        clock.advance(25 * 3600 * 1_000_000_000)
        runs = []

        def collect(step: str) -> None:
            runs.append(store.gc(before=0).imports)

        bulk.ingest(store, tmp_path / "staged", move=True, progress=collect)
        assert store.gc(before=0).imports == 0  # added meanwhile
        assert runs == [0, 0, 0]
        assert store.get(b"a") == b"1"
        store.verify().require_ok()


def test_a_run_goes_on_where_an_import_was_added_since_it_looked(store: Store) -> None:
    record = kvstore.ImportRecord(7, "digest", 0, 0, ())
    store.prepare_import(record)
    leftovers = store._collector._leftovers
    imports = leftovers._imports
    stale = imports.all()
    store.add_import(record)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(imports, "all", lambda: stale)
        assert leftovers.abort_stale(-1) == 0


@pytest.mark.parametrize("call", [Store.close, Store.verify, lambda store: store.gc(before=0)])
def test_what_would_wait_for_a_run_is_refused_in_its_own_progress(
    store: Store, call: Callable[[Store], object]
) -> None:
    for value in (b"1", b"2"):
        newest = store.put(b"a", value)
    told: list[int] = []

    def progress(count: int) -> None:
        told.append(count)
        call(store)

    with pytest.raises(UsageError, match="its own end"):
        store.gc(before=newest, progress=progress)
    assert told == [1]
    assert store.gc(before=newest).since == newest
    assert store.get(b"a") == b"2"


@pytest.mark.usual_limits
def test_a_run_that_its_progress_calls_off_is_made_good_by_the_next(store: Store) -> None:
    for key in KEYS:
        store.put(key, b"old")
    newest = [store.put(key, b"new") for key in KEYS][-1]
    told: list[int] = []

    def call_off(versions: int) -> None:
        told.append(versions)
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError):
        store.gc(before=newest, progress=call_off)
    assert told == [len(KEYS)]
    store.gc(before=newest, progress=told.append)
    assert stored(store, DATA) == len(KEYS)
    assert dict(store.scan()) == dict.fromkeys(KEYS, b"new")
    store.verify().require_ok()


@pytest.mark.parametrize("entries_max", [1, 2, 3, 100])
def test_keys_that_changed_are_looked_up_in_pieces(store: Store, entries_max: int) -> None:
    """Deleted keys go whole, others but for the newest, the oldest entry first; keys that are
    neighbours of each other's bytes are not mixed up."""
    keys = [b"", b"\x00", b"\x00\x01", b"a", b"a\x00", b"a\x00\xff", b"a\xff", b"b"]
    for number in range(3):
        for key in keys:
            store.put(key, b"%d" % number)
    for key in keys[::2]:
        store.delete(key)
    since = store.upper - 1
    for key in keys[:4]:
        store.put(key, b"above")
    found = list(garbage_of_keys(store._versions, keys, since, entries_max=entries_max))
    expected = []
    for key in keys:
        tails = garbage(store._versions.tails(key), {}, (), since=since)
        expected += [frame(key) + tail for tail in tails]
    assert found == expected
    assert len(found) == 4 * 2 + 4 * 4


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


def test_background_policy_collects_and_is_stopped_by_close(tmp_path: Path) -> None:
    policy = GcPolicy(keep=timedelta(0), every=timedelta(hours=1))
    done = threading.Event()
    store = kvstore.open(tmp_path / "db", clock=ManualClock())
    worker = store.start_gc(policy, after_run=lambda report: done.set())
    store.put(b"k", b"1")
    store.put(b"k", b"2")
    worker.wake()
    assert done.wait(30)
    assert len(store.history(b"k")) == 1
    store.close()
    assert not worker._thread.is_alive()
    with kvstore.open(tmp_path / "db", gc=policy) as again:
        assert again.get(b"k") == b"2"


# -- random histories -----------------------------------------------------------------------

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
    with kvstore.open(tmp_path / "db", durability="async", clock=ManualClock(1)) as store:
        store._collector.keys_per_step = 2
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
            assert not store._versions.view.fragments.tombstones(
                kvstore.Span(), since=0, upto=since
            )
            assert store.verify().problems == ()


# -- crashes --------------------------------------------------------------------------------

CRASH = textwrap.dedent(
    """
    import os, signal, sys
    import kvstore
    from kvstore import ManualClock

    path, step, nth = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = kvstore.open(
        path, engine=os.environ["EACH_ENGINE"], durability="async", clock=ManualClock(1)
    )
    seen = []

    def die(name):
        seen.append(name)
        if seen.count(step) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    store._collector.at_step = die
    store._collector.keys_per_step = 2
    store.gc(before=store.upper - 4)
    """
)


@pytest.mark.parametrize(
    ("step", "nth"),
    [("since", 1), ("versions", 1), ("versions", 3), ("ranges", 1), ("index", 1), ("imports", 1)],
)
def test_crash_at_each_step_leaves_junk_at_most_and_the_next_run_resumes(
    tmp_path: Path, step: str, nth: int
) -> None:
    path = tmp_path / "db"
    with kvstore.open(path, durability="async", clock=ManualClock(1)) as store:
        for key in KEYS:
            store.put(key, b"1")
            store.put(key, b"2")
        import_id, _ = add_import(store, tmp_path / "in", {b"a": b"row", b"c": b"row"})
        store.revert_import(import_id)
        store.delete_range(b"d", b"f")
        for key in KEYS[:2]:
            store.put(key, b"3")
        store.put(b"z", b"z")
        since, upto = store.upper - 4, store.upper - 1
        before = readable(store, since, upto)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", CRASH, str(path), step, str(nth)], env=environment, check=False
    )
    assert child.returncode == -9
    with kvstore.open(path, durability="async", clock=ManualClock(1)) as store:
        assert store.since == since
        assert store.verify().problems == ()
        assert readable(store, since, upto) == before
        store.gc(before=since)
        assert readable(store, since, upto) == before
        assert left_over(store, since) == []
        stored = list(stored_tombstones(store._engine))
        assert len(stored) == (1 if store._versions.view.fragments else 0)


def test_import_without_rows_is_left_alone_by_every_run(store: Store, tmp_path: Path) -> None:
    made = bulk.Import.create(tmp_path / "empty")
    made.seal()
    stamp = bulk.ingest(store, tmp_path / "empty")
    for _ in range(2):
        store.put(b"k", b"v")
        assert store.gc(before=store.now()).imports == 0
    assert bulk.ingest(store, tmp_path / "empty") == stamp
    assert store.verify().problems == ()


def test_gc_looks_only_at_keys_that_changed_and_spans_that_were_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.batch() as batch:
        for number in range(3000):
            batch.put(b"%05d" % number, b"v")
    store.gc(before=store.now())
    store.put(b"00007", b"w")
    store.delete_range(b"01000", b"01010")
    store.put(b"00009", b"w")
    looked, tails = [], store._versions.tails
    monkeypatch.setattr(store._versions, "tails", lambda key: looked.append(key) or tails(key))
    passed, cursor = [], store._engine.cursor

    def counted(family: str, start: bytes = b"", end: bytes | None = None, **how: bool) -> object:
        if family == DATA:
            passed.append((start, end))
        return cursor(family, start, end, **how)

    monkeypatch.setattr(store._engine, "cursor", counted)
    assert store.gc(before=store.now()).versions == 12
    assert looked == [b"00007", b"00009"]
    assert passed == [(b"01000", b"01010")]


def test_snapshots_stay_whole_while_writers_and_gc_run(store: Store) -> None:
    """Each commit writes one number to all keys; a snapshot sees one number, however long."""
    wrong = []

    def write() -> None:
        for number in range(200):
            with store.batch() as batch:
                batch.delete_range(b"a", b"z")
                for key in KEYS:
                    batch.put(key, b"%d" % number)

    def collect() -> None:
        while writer.is_alive():
            store.gc(before=store.upper - 1)

    with store.batch() as batch:
        for key in KEYS:
            batch.put(key, b"0")
    writer = threading.Thread(target=write)
    collector = threading.Thread(target=collect)
    writer.start()
    collector.start()
    while writer.is_alive():
        with store.snapshot() as snapshot:
            first, values = dict(snapshot.scan()), snapshot.get_many(KEYS)
            again = dict(snapshot.scan(reverse=True))
            if first != again or len({*values, *first.values()}) != 1 or len(first) != len(KEYS):
                wrong.append((snapshot.as_of, first, values, again))
    writer.join()
    collector.join()
    assert wrong == []
    assert store.verify().problems == ()


@pytest.mark.parametrize("step_ns", [0, -5, 7])
def test_a_hold_taken_for_the_next_sync_is_on_disk_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_ns: int
) -> None:
    """Also where no time has passed since the last sync, or the clock has gone back."""
    clock = ManualClock(1_700_000_000 * 10**9)
    with kvstore.open(tmp_path / "store", engine="rocksdb", clock=clock) as store:
        store.put(b"k", b"v")
        store.sync()
        calls: list[str] = []
        for name in ("write", "sync"):
            monkeypatch.setattr(RocksEngine, name, _noted(getattr(RocksEngine, name), name, calls))
        store.hold("backup", durable=False)
        assert calls == ["write"]
        clock.set(clock.wall_ns() + step_ns)
        store.sync()
        assert calls[-1] == "sync"


def _noted(call: Callable[..., None], name: str, calls: list[str]) -> Callable[..., None]:
    def noted(*args: object) -> None:
        calls.append(name)
        call(*args)

    return noted
