"""State at s plus the feed over (s, e] is the state at e: random histories, threads, crashes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore import Store
from kvstore.changes.events import Event
from kvstore.errors import HistoryGoneError, UsageError
from kvstore.feeds.feed import FeedBatch, Share
from tests.feed.replica import Replica, add_import, replay

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

KEYS = [b"%d" % number for number in range(8)] + [b"", b"\x00", b"1\x00", b"\xff"]
keys = st.sampled_from(KEYS)
values = st.one_of(st.binary(max_size=4), st.just(b"large" * 300))
point = st.one_of(
    st.tuples(st.just("put"), keys, values),
    st.tuples(st.just("delete"), keys),
    st.tuples(st.just("delete_range"), keys, keys),
)
step = st.one_of(
    point,
    st.tuples(st.just("batch"), st.lists(point, max_size=6)),
    st.tuples(st.just("import"), st.dictionaries(keys, values, min_size=1, max_size=6)),
    st.tuples(st.just("revert")),
    st.tuples(st.just("reshard"), st.integers(1, 5)),
    st.tuples(st.just("read")),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("gc")),
)


class History:
    """Carries out random steps on a store."""

    def __init__(self, directory: Path, engine: str = "rocksdb") -> None:
        self.directory = directory
        self.engine = engine
        self.store = kvstore.open(directory / "store", engine, durability="async")
        self.imports: list[int] = []

    def point(self, target: object, op: str, *arguments: bytes) -> None:
        if op == "delete_range":
            low, high = sorted(arguments)
            if low == high:
                return
            arguments = (low, high)
        getattr(target, op)(*arguments)

    def do(self, op: str, *arguments: object) -> None:
        store = self.store
        if op == "batch":
            with store.changeset(), store.batch() as batch:
                for name, *rest in arguments[0]:  # type: ignore[attr-defined]
                    self.point(batch, name, *rest)
        elif op == "import":
            staging = self.directory / f"staging-{len(self.imports)}"
            import_id, _ = add_import(store, staging, arguments[0])  # type: ignore[arg-type]
            self.imports.append(import_id)
        elif op == "revert":
            if self.imports:
                with contextlib.suppress(HistoryGoneError, UsageError):  # GC came before the revert
                    store.revert_import(self.imports[-1])
        elif op == "reshard":
            store.reshard(arguments[0])  # type: ignore[arg-type]
        elif op == "reopen":
            store.close()
            self.store = kvstore.open(self.directory / "store", self.engine, durability="async")
        elif op == "gc":
            store.gc(before=store.upper - 1)
        else:
            self.point(store, op, *arguments)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    st.lists(step, min_size=10, max_size=40),
    st.sampled_from(["imports", "all"]),
    st.integers(1, 4),
    st.sampled_from(["rocksdb", "memory"]),
)
def test_state_plus_feed_is_the_later_state(
    steps: list[tuple[object, ...]], expand: str, batch_rows: int, engine: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        history = History(Path(directory), engine)
        replica = Replica()
        history.store.feed("f", start=0)

        def read(*, limit: int | None) -> None:
            # The position is the replica's own. Events after the last ack would come again.
            store = history.store
            feed = store.feed(
                "f", start=replica.position or 0, expand=expand, batch_rows=batch_rows
            )
            for number, batch in enumerate(feed):
                replica.take(batch)
                replica.check(store)
                feed.ack(batch)
                if number == limit:
                    break

        for op, *arguments in steps:
            if op == "read":
                read(limit=1)
            else:
                history.do(str(op), *arguments)
        read(limit=None)
        assert replica.rows == dict(history.store.scan())
        history.store.verify().require_ok()
        history.store.close()


def in_order(events: list[Event]) -> list[Event]:
    plain = [event._replace(end_of_batch=False) for event in events]
    return sorted(plain, key=lambda event: (event.timestamp, event.sequence))


@settings(max_examples=20)
@given(st.lists(step, min_size=10, max_size=30), st.integers(2, 4))
def test_workers_of_a_feed_share_each_change_exactly_once(
    steps: list[tuple[object, ...]], workers: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        history = History(Path(directory))
        history.store.reshard(workers)
        for op, *arguments in steps:
            if op not in ("read", "gc"):
                history.do(str(op), *arguments)
        store = history.store
        store.reshard(workers + 1)
        store.put(b"last", b"1")
        whole = [event for batch in store.feed("whole", start=0) for event in batch.events]
        parts: list[Event] = []
        for worker in range(workers):
            feed = store.feed("shared", start=0, streams=(worker, workers), batch_rows=2)
            mine = [event for batch in feed for event in batch.events]
            assert [e[:2] for e in mine] == sorted(e[:2] for e in mine)
            parts.extend(mine)
        assert in_order(parts) == in_order(whole)
        store.close()


def test_shares_are_disjoint_and_complete_in_every_generation(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        for count in (1, 2, 3, 7):
            store.reshard(count)
        for found in store.generations():
            for workers in (1, 2, 3, 5):
                shares = [Share(worker, workers).select(found) for worker in range(workers)]
                assert sorted(chain.from_iterable(shares)) == sorted(found.every_stream())


def write_for_a_while(store: Store, seed: int, directory: Path) -> None:
    for number in range(80):
        key = b"%d" % ((number * 7 + seed * 13) % 40)
        if number % 10 == 9:
            store.delete_range(key, key + b"\xff")
        elif number % 7 == 3:
            store.delete(key)
        elif number % 25 == 5 and seed == 0:
            rows = {b"%d" % k: b"imported %d" % number for k in range(0, 40, 3)}
            import_id, _ = add_import(store, directory / f"{seed}-{number}", rows)
            if number > 30:
                store.revert_import(import_id)
        else:
            with store.batch() as batch:
                batch.put(key, b"%d/%d" % (seed, number))
                batch.put(key + b"/large", b"x" * 2000)


def test_a_live_feed_beside_writers_imports_and_reshards_misses_nothing(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        replica, failures = Replica(), []
        feed = store.feed("live", start=0, batch_rows=7)
        done = threading.Event()

        def consume() -> None:
            try:
                for batch in feed.batches(follow=True):
                    replica.take(batch)
                    replica.check(store)
                    if done.is_set() and replica.rows == dict(store.scan()):
                        return
            except BaseException as error:  # noqa: BLE001  # shown below
                failures.append(error)

        consumer = threading.Thread(target=consume)
        consumer.start()
        writers = [
            threading.Thread(target=write_for_a_while, args=(store, seed, tmp_path))
            for seed in range(3)
        ]
        for writer in writers:
            writer.start()
        for count in (3, 1, 5, 2):
            store.reshard(count)
        for writer in writers:
            writer.join()
        done.set()
        store.put(b"end", b"1")
        consumer.join(120)
        assert not consumer.is_alive()
        assert not failures
        assert replica.seen == sorted(set(replica.seen))
        store.verify().require_ok()


def test_images_are_exact_while_everything_is_written_at_once(tmp_path: Path) -> None:
    """The image before each event equals the image after the key's previous event. This holds over
    range deletes, imports, their reverts and reshards, for a consumer that reads while others
    write."""
    with kvstore.open(tmp_path / "s", durability="async") as store:
        feed = store.feed("live", start=0, images="pre+post", expand="all", batch_rows=11)
        state: dict[bytes, bytes | None] = {}
        wrong: list[Event] = []
        writers = [
            threading.Thread(target=write_for_a_while, args=(store, seed, tmp_path))
            for seed in range(3)
        ]
        for writer in writers:
            writer.start()
        for count in (3, 1, 2):
            store.reshard(count)
            for event in chain.from_iterable(batch.events for batch in feed):
                wrong += [event] if event.pre != state.get(event.key) else []
                state[event.key] = event.post
        for writer in writers:
            writer.join()
        for event in chain.from_iterable(batch.events for batch in feed):
            wrong += [event] if event.pre != state.get(event.key) else []
            state[event.key] = event.post
        assert not wrong
        assert {k: v for k, v in state.items() if v is not None} == dict(store.scan())


CHILD = """
import json, os, sys, threading, time
from pathlib import Path
import kvstore
from tests.feed.replica import Replica, add_import
from tests.feed.test_ruling_property import write_for_a_while

directory, run = Path(sys.argv[1]), int(sys.argv[2])
store = kvstore.open(directory / "store", engine=os.environ["EACH_ENGINE"])
output = directory / "output.json"
position, rows = 0, {}
if output.exists():
    saved = json.loads(output.read_text())
    position = kvstore.Position(kvstore.Timestamp(saved["position"][0]), saved["position"][1])
    rows = {bytes.fromhex(k): bytes.fromhex(v) for k, v in saved["rows"].items()}
feed = store.feed("out", start=position, batch_rows=5)
replica = Replica()
replica.rows = rows

def write():
    number = 0
    while True:
        write_for_a_while(store, run * 10 + number, directory)
        store.reshard(number % 4 + 1)
        number += 1

threading.Thread(target=write, daemon=True).start()
for batch in feed.batches(follow=True):
    replica.take(batch)
    # Output and position change hands together: a rename.
    saved = {
        "position": list(batch.position),
        "rows": {k.hex(): v.hex() for k, v in replica.rows.items()},
    }
    scratch = output.with_suffix(".new")
    scratch.write_text(json.dumps(saved))
    os.replace(scratch, output)
    feed.ack(batch)
    print(len(batch.events), flush=True)
"""


def test_killed_store_and_consumer_resume_without_loss_or_repetition(tmp_path: Path) -> None:
    output = tmp_path / "output.json"
    for run in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(run)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        for _ in range(40):
            assert child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        with kvstore.open(tmp_path / "store", durability="async") as store:
            saved = json.loads(output.read_text())
            timestamp, taken, *_ = saved["position"]
            assert timestamp < store.upper, "the feed was ahead of what survived"
            replica = Replica()
            replica.rows = {bytes.fromhex(k): bytes.fromhex(v) for k, v in saved["rows"].items()}
            position = kvstore.Position(kvstore.Timestamp(timestamp), taken)
            replay(store.feed("probe", start=position), store, replica)
            assert replica.rows == dict(store.scan())
            store.feeds.drop("probe")


def test_batches_of_a_large_commit_resume_inside_it(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        with store.batch() as batch:
            for number in range(25):
                batch.put(b"%03d" % number, b"1")
        stops: list[FeedBatch] = list(store.feed("f", start=0, batch_rows=10))
        assert [len(stop.events) for stop in stops] == [10, 10, 5]
        assert [stop.position.taken for stop in stops] == [10, 20, 0]
        assert batch.timestamp is not None
        assert stops[0].resolved < batch.timestamp <= stops[2].resolved
        for cut, stop in enumerate(stops):
            rest = [e for b in store.feed("f", start=stop.position) for e in b.events]
            assert [e.key for e in rest] == [b"%03d" % n for n in range(10 * (cut + 1), 25)]
