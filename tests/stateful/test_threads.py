"""Many threads on one store: every reader sees whole commits of one time, and all of the past.

Writers replace the same ten keys again and again, each time with one number: by a batch, by a batch
that deletes the range first, or by an import that may be reverted. So each read, at any time and by
any call, must give ten equal numbers.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import bulk
from kvstore.errors import HistoryGoneError, KVStoreError
from kvstore.store import Store
from kvstore.testing.model import state_after
from tests.harness.seeds import seed_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

KEYS = [b"k%d" % number for number in range(10)]
ROUNDS = 36


def require_whole(rows: Any) -> None:
    values = [value for _, value in rows]
    assert len(values) == len(KEYS), values
    assert len(set(values)) == 1, values


def write_batches(store: Store, rng: random.Random, place: Path) -> None:
    for _ in range(ROUNDS * 3):
        number = b"%d" % rng.getrandbits(60)
        with store.batch(durability=rng.choice(["async", "async", "group", "sync"])) as batch:  # type: ignore[arg-type]
            if rng.random() < 0.5:
                batch.delete_range(b"k", b"l")
            for key in rng.sample(KEYS, len(KEYS)):
                batch.put(key, number)


def write_imports(store: Store, rng: random.Random, place: Path) -> None:
    for _ in range(ROUNDS // 3):
        ident = rng.getrandbits(62) | 1
        made = bulk.Import.create(place / f"{ident}", import_id=ident)
        with made.writer() as writer:
            for key in KEYS:
                writer.put(key, b"%d" % ident)
        made.seal()
        bulk.ingest(store, made.staging)
        if rng.random() < 0.5:
            try:
                store.revert_import(ident)
            except HistoryGoneError as error:
                assert error.as_of <= store.since  # noqa: PT017  # GC overtook it


def read_now(store: Store, rng: random.Random, place: Path) -> None:
    for _ in range(ROUNDS):
        require_whole(store.scan(prefix=b"k"))
        require_whole(store.scan(b"k", b"l", reverse=True))
        require_whole(zip(KEYS, store.get_many(KEYS), strict=True))
        batches = list(store.scan_batches(b"k", b"l"))
        require_whole([tuple(row.values()) for batch in batches for row in batch.to_pylist()])


def read_past(store: Store, rng: random.Random, place: Path) -> None:
    for _ in range(ROUNDS):
        at = rng.randint(max(store.since, store.upper - 10_000_000), store.upper - 1)
        try:
            snapshot = store.snapshot(at)
        except HistoryGoneError as error:
            assert error.as_of < store.since  # noqa: PT017  # GC overtook it
            continue
        with snapshot:
            first = list(snapshot.scan(b"k", b"l"))
            assert len(first) in (0, len(KEYS))
            assert list(snapshot.scan(b"k", b"l", reverse=True)) == first[::-1]
            found = snapshot.get_many(KEYS)
            assert found == ([value for _, value in first] or [None] * len(KEYS))


def follow(store: Store, rng: random.Random, place: Path) -> None:
    """State at s plus the changes in (s, e] is the state at e, while all threads work."""
    for index in range(ROUNDS // 2):
        with store.snapshot() as before:
            state = dict(before.scan())
            with store.snapshot() as after:
                how: Any = {"order": rng.choice(["key", "time"])}
                how["revisions"] = rng.choice(["all", "latest"])
                rows = [tuple(r) for r in store.changes(before.as_of, after.as_of, **how)]
                assert state_after(state, rows) == dict(after.scan()), (index, how)


def collect(store: Store, rng: random.Random, place: Path) -> None:
    for _ in range(ROUNDS // 4):
        store.gc(before=max(store.since, store.upper - 2_000_000))


def restart_scans(store: Store, rng: random.Random, place: Path) -> None:
    """Scans that stay open while the other threads work."""
    for _ in range(ROUNDS // 2):
        running = store.scan(b"k", b"l")
        rows = [next(running)]
        store.get(rng.choice(KEYS))
        store.put(b"other/%d" % rng.randint(0, 9), b"x", durability="async")
        require_whole([*rows, *running])


WORK: list[Callable[[Store, random.Random, Path], None]] = [
    write_batches,
    write_batches,
    write_imports,
    read_now,
    read_past,
    follow,
    restart_scans,
]


@pytest.mark.parametrize(
    "work", [WORK, [*WORK, collect]], ids=["without collection", "with collection"]
)
def test_threads_see_whole_commits(
    tmp_path: Path, work: list[Callable[[Store, random.Random, Path], None]]
) -> None:
    seed = seed_of()
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work[number](store, random.Random(seed + number), tmp_path)
        except (AssertionError, KVStoreError) as error:
            failures.append(error)

    with kvstore.open(tmp_path / "store") as store:
        with store.batch() as batch:
            for key in KEYS:
                batch.put(key, b"first")
        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        state, upper = dict(store.scan()), store.upper
    with kvstore.open(tmp_path / "store") as store:
        assert dict(store.scan(as_of=upper - 1)) == state
        latest = [tuple(row) for row in store.changes(0, revisions="latest")]
        assert state_after({}, latest) == state


def test_what_is_listed_may_change_meanwhile(tmp_path: Path) -> None:
    """A store lists holds and imports while other threads take, release, prepare and abort some."""
    is_over = threading.Event()

    def change(worker: int) -> None:
        for number in range(150):
            ident = number * 10 + worker + 1
            with store.hold(f"h{ident % 70}", durable=False):
                store.imports.prepare(kvstore.ImportRecord(ident, "digest", 0, 0, ()))
            if number > 50:
                store.imports.abort(ident - 500)

    def look(list_all: Callable[[], object]) -> None:
        while not is_over.is_set():
            list_all()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with kvstore.open(None, engine="memory", durability="async") as store:
            lists = (store.holds.all, store.imports.all, store.stats)
            with ThreadPoolExecutor(5) as pool:
                looking = [pool.submit(look, each) for each in lists]
                changing = [pool.submit(change, worker) for worker in range(2)]
                wait(changing)
                is_over.set()
            for each in (*changing, *looking):
                each.result()  # raises what it raised
    finally:
        sys.setswitchinterval(before)
