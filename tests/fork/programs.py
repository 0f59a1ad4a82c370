"""Small programs that fork, each in a process of its own: `python -m tests.fork.programs NAME ...`.

Each program ends with status 0 and an empty standard error if all its assertions hold.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore

import kvstore
from kvstore import bulk
from kvstore.bulk.pushes import Pushes
from kvstore.errors import ForkedError, LockedError
from kvstore.storage.object_store import ObjectBlob
from kvstore.store import Store
from kvstore.tasks import Tasks, Worker
from tests.harness.bounds import bounds
from tests.harness.forks import STATUS, reap
from tests.pushes.made import push

ROWS = 5_000
SCANNED_ROWS = 30_000
"""Rows of a store that several threads scan."""

SERVED: dict[str, Store] = {}
"""Stores in the memory that the workers of a pool inherit."""


def fork(body: Callable[[], object]) -> int:
    """The status of a child that does `body`, and then ends like a program at its last line."""
    child = os.fork()
    if child == 0:
        body()
        sys.exit(STATUS)
    status = reap(child)
    assert status is not None, "the child hung"
    return status


def refused(call: Callable[[], object], *, owner: int | None = None) -> None:
    """Assert that `call` raises `ForkedError`, of the process `owner` (default: the parent)."""
    with pytest.raises(ForkedError) as refusal:
        call()
    assert refusal.value.owner == (os.getppid() if owner is None else owner)


def fill(store: Store, count: int = ROWS) -> None:
    """Write rows that closing the store has to flush."""
    with store.batch(durability="async") as batch:
        for number in range(count):
            batch.put(b"%08d" % number, os.urandom(1000))


def opens_anew(place: Path) -> None:
    """Beside an open store a child can read. Calls that need RocksDB's threads are refused."""
    with kvstore.open(place / "store") as store:
        fill(store)

        def child() -> None:
            assert repr(store).endswith(f"of process {parent}>")
            refused(lambda: kvstore.open(place / "store"))
            refused(lambda: kvstore.open(place / "other"))
            with kvstore.open_read_only(place / "store") as reader:
                assert len(list(reader.scan())) == ROWS
            with kvstore.open(place / "mine", engine="memory") as mine:
                mine.put(b"k", b"v")
            assert fork(lambda: refused(lambda: kvstore.open(place / "x"), owner=parent)) == STATUS

        parent = os.getpid()
        assert fork(child) == STATUS
        store.put(b"k", b"v")


def opens_after_close(place: Path) -> None:
    """Once the parent has closed all its handles, children open stores to write, flush and
    close."""
    with kvstore.open(place / "store") as store:
        fill(store)

    def child() -> None:
        with kvstore.open(place / "store") as store:
            fill(store)

    assert fork(child) == STATUS
    assert fork(child) == STATUS
    with kvstore.open(place / "store") as store:
        fill(store)
        assert len(list(store.scan())) == ROWS
        assert store.verify().ok


def locks_end(place: Path) -> None:
    """A child that stays alive keeps no lock of its parent."""
    for engine in ("memory", "rocksdb"):
        near, far = os.pipe()
        with kvstore.open(place / engine, engine=engine):
            child = os.fork()
            if child == 0:
                os.close(far)
                os.read(near, 1)
                os._exit(STATUS)
        with kvstore.open(place / engine, engine=engine) as store:
            store.put(b"k", b"v")
        os.close(far)
        assert reap(child) == STATUS


def scans(place: Path) -> None:
    """A scan by threads continues over a fork: its threads and files are the parent's."""
    with bounds(COLUMNS_FLUSH_BYTES_MIN=0), kvstore.open(place / "store") as store:
        fill(store, SCANNED_ROWS)
        batches = iter(store.scan_batches(workers=2))
        rows = next(batches).num_rows

        def child() -> None:
            refused(lambda: list(batches))

        assert fork(child) == STATUS
        assert fork(lambda: None) == STATUS
        assert rows + sum(batch.num_rows for batch in batches) == SCANNED_ROWS


def handler(place: Path) -> None:
    """A task's handler forks, and its child leaves through the worker."""
    with Tasks.open(place / "tasks") as tasks:
        tasks.insert("queue")

        def handle(job: Any) -> None:
            def child() -> None:
                refused(lambda: job.renew())
                refused(lambda: tasks.insert("queue"))

            assert fork(child) == STATUS

        outcome = Worker(tasks, {"queue": handle}).run_one()
        assert outcome is not None
        assert outcome.value == "done", tasks.list("queue")


def daemon(place: Path) -> None:
    """The parent forks, ends in order, and the child's child works without it."""
    owner = os.getpid()
    store = kvstore.open(place / "store")
    other = kvstore.open(place / "other", engine="memory")
    store.put(b"k", b"v")
    near, far = os.pipe()
    if os.fork():
        with store, other:
            return
    if os.fork():
        os._exit(0)
    os.close(far)
    os.read(near, 1)  # returns when the parent ends
    refused(lambda: store.get(b"k"), owner=owner)
    refused(lambda: kvstore.open(place / "store"), owner=owner)
    with kvstore.open_read_only(place / "store") as reader:
        assert reader.get(b"k") == b"v"
    with kvstore.open(place / "other", engine="memory") as other:
        other.put(b"k", b"v")
    print("the daemon goes on")


def subprocesses(place: Path) -> None:
    """Running another program leaves the store alone, also where Python forks for it."""
    with kvstore.open(place / "store") as store:
        store.put(b"k", b"v")
        subprocess.run([sys.executable, "-c", ""], check=True)
        subprocess.run([sys.executable, "-c", ""], check=True, preexec_fn=os.getpid)
        assert os.system("true") == 0
        multiprocessing.get_context("spawn")
        assert store.get(b"k") == b"v"
        store.put(b"k", b"w")


def at_once(place: Path) -> None:
    """Several threads fork at once, while others open and close handles with locks."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def opening(number: int) -> None:
        while not stop.is_set():
            with kvstore.open(place / f"{number}", engine="memory") as store:
                store.put(b"k", b"v")

    def forking() -> None:
        try:
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    os._exit(STATUS)
                assert reap(child) == STATUS
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    with kvstore.open(place / "store") as store:
        openers = [threading.Thread(target=opening, args=(number,)) for number in range(2)]
        forkers = [threading.Thread(target=forking) for _ in range(3)]
        for thread in (*openers, *forkers):
            thread.start()
        for thread in forkers:
            thread.join()
        stop.set()
        for thread in openers:
            thread.join()
        assert not failed, failed
        store.put(b"k", b"v")


def object_stores(place: Path) -> None:
    """The client of object stores has threads: a child is refused, also with a client of its own.
    A child that was forked before the first request can use a client of its own."""
    place.mkdir(exist_ok=True)

    def use() -> None:
        blob = ObjectBlob(LocalStore(place), "blob")
        blob.put(f"by-{os.getpid()}", b"x")
        assert blob.get(f"by-{os.getpid()}") == b"x"

    assert fork(use) == STATUS
    use()
    assert fork(lambda: refused(use)) == STATUS
    use()


def from_c(place: Path) -> None:
    """A program that forks in C, as uWSGI does, and tells Python in the child alone."""
    with kvstore.open(place / "store") as store:
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            refused(lambda: store.get(b"k"))
            refused(lambda: kvstore.open(place / "other"))
            sys.exit(STATUS)
        assert reap(child) == STATUS
        store.put(b"k", b"v")


def exit_handlers(place: Path) -> None:
    """The exit of a child leaves the scratch directory of a Spark session alone."""
    from kvstore.spark.sessions import remove_scratch

    scratch = place / "scratch"
    scratch.mkdir()
    atexit.register(remove_scratch, scratch, os.getpid())
    assert fork(lambda: None) == STATUS
    assert scratch.exists()


def live_readers(place: Path) -> None:
    """A child cannot use a live reader of its parent, and follows the store by a reader of its
    own."""
    with kvstore.open(place / "store") as store:
        store.put(b"k", b"1")
        with kvstore.follow(place / "store", max_staleness=0.001) as reader:

            def child() -> None:
                refused(lambda: reader.get(b"k"))
                refused(lambda: reader.refresh())
                refused(lambda: reader.wait_beyond(0))
                reader.close()
                with kvstore.follow(place / "store") as own:
                    assert own.get(b"k") == b"1"

            for _ in range(5):
                assert fork(child) == STATUS
            reader.wait_beyond(store.put(b"k", b"2"))
            assert reader.get(b"k") == b"2"


def pullers(place: Path) -> None:
    """A child cannot use the puller of its parent, leaves its `with` block at once, and can push.
    The puller continues."""
    pushes = Pushes(place / "pushes")
    with (
        kvstore.open(place / "store") as store,
        bulk.pull(store, place / "pushes", name="s", every=0.001) as puller,
    ):

        def child() -> None:
            with puller:
                refused(lambda: puller.step())
                refused(lambda: puller.status)
                refused(lambda: puller.wait(1))
            push(pushes, {b"k": b"child"})

        for number in (1, 2):
            assert fork(child) == STATUS
            puller.wait(number)
        push(pushes, {b"k": b"parent"})
        puller.wait(3)
        assert store.get(b"k") == b"parent"


def serve_row(key: bytes) -> bytes | None:
    """A task of a pool, by a store that its parent has opened."""
    return SERVED["store"].get(key)


def serve_path(place: Path) -> str:
    """A task of a pool, by the path."""
    with kvstore.open_read_only(place / "store") as reader:
        assert reader.get(b"k") == b"v"
    try:
        kvstore.open(place / "store")
    except LockedError as error:
        return error.owner
    return "nobody"


def pools(place: Path) -> None:
    """Pools of processes: forked ones are refused, others find the store locked, and read it."""
    fresh = multiprocessing.get_context("forkserver")
    forkserver.ensure_running()
    with kvstore.open(place / "store") as store:
        store.put(b"k", b"v")
        SERVED["store"] = store
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            error = pool.submit(serve_row, b"k").exception()
            assert isinstance(error, ForkedError)
            assert error.owner == os.getpid()
        with context.Pool(2) as workers:
            refused(lambda: workers.map(serve_row, [b"k"]), owner=os.getpid())
        with ProcessPoolExecutor(1, mp_context=fresh) as pool:
            assert pool.submit(serve_path, place).result() == "another process"
        assert store.get(b"k") == b"v"


def main() -> None:
    globals()[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
