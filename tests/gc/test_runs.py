"""Runs of GC: background runs, calls from the progress callback of a run, and a crash at each
step."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore import GcPolicy, ManualClock, Span, Store
from kvstore.engine.api import DATA
from kvstore.errors import ClosedError, UsageError
from kvstore.mvcc.versions import stored_tombstones
from tests.gc.garbage import KEYS, add_import, collecting, left_over, readable, stored
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_who_hears_of_a_run_may_close_the_store(tmp_path: Path) -> None:
    closed = threading.Event()

    def close(report: object) -> None:
        store.close()
        closed.set()

    store = kvstore.open(tmp_path / "db", durability="async")
    forever = timedelta.max
    store.upkeep.start_gc(GcPolicy(keep=timedelta(0), every=forever), after_run=close).wake()
    assert closed.wait(120)
    kvstore.open(tmp_path / "db").close()


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


def test_a_run_that_ends_between_range_tombstones_leaves_memory_and_disk_alike(
    store: Store,
) -> None:
    collector = parts_of(store).collector
    runs = 0

    def end(step: str) -> None:
        if step == "ranges":
            raise InterruptedError

    with bounds(STRETCHES_MAX=3, GC_LEAVES_PER_STEP=1):
        for number in range(0, 40, 2):
            store.put(b"%03d" % number, b"v")
            store.delete_range(b"%03d" % number, b"%03d" % (number + 1))
        store.delete_range(b"010", b"030")
        since = store.upper - 1
        store.delete_range(b"005", b"035")
        collector.at_step = end
        while parts_of(store).versions.view.fragments.tombstones(Span(), since=0, upto=since):
            with pytest.raises(InterruptedError):
                store.gc(before=since)
            runs += 1
            assert store.verify().problems == ()
    assert runs >= 3
    collector.at_step = lambda step: None
    store.gc(before=since)
    assert len(parts_of(store).versions.view.fragments) == 2


def test_a_run_that_finds_no_garbage_ends_at_its_next_step_once_it_is_stopped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, engine = parts_of(store).collector, parts_of(store).engine
    collector.keys_per_step = 2
    store.put_many({b"%d" % number: b"v" for number in range(20)})
    stopping = threading.Thread(target=collector.stop)
    lend, lent = engine.borrow, 0

    def borrow() -> object:
        nonlocal lent
        lent += 1
        if lent == 1:
            stopping.start()
            with suppress(ClosedError):
                while True:  # until the stop has been asked for
                    collector.require_running()
        return lend()

    monkeypatch.setattr(engine, "borrow", borrow)
    with pytest.raises(ClosedError):
        store.gc(before=store.upper - 1)
    stopping.join()
    assert lent == 1


def test_background_policy_collects_and_is_stopped_by_close(tmp_path: Path) -> None:
    policy = GcPolicy(keep=timedelta(0), every=timedelta(hours=1))
    done = threading.Event()
    store = kvstore.open(tmp_path / "db", clock=ManualClock())
    worker = store.upkeep.start_gc(policy, after_run=lambda report: done.set())
    store.put(b"k", b"1")
    store.put(b"k", b"2")
    worker.wake()
    assert done.wait(120)
    assert len(store.history(b"k")) == 1
    store.close()
    assert collecting() == []
    with kvstore.open(tmp_path / "db", gc=policy) as again:
        assert again.get(b"k") == b"2"


CRASH = textwrap.dedent(
    """
    import os, signal, sys
    import kvstore
    from tests.harness.bounds import bounds
    from tests.harness.parts import parts_of
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

    parts_of(store).collector.at_step = die
    parts_of(store).collector.keys_per_step = 2
    with bounds(GC_SORTED_KEYS_MAX=3):
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
        stored = list(stored_tombstones(parts_of(store).engine))
        assert len(stored) == (1 if parts_of(store).versions.view.fragments else 0)
