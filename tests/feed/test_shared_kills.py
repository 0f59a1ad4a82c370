"""Three processes share a feed that begins with the state, and are killed anywhere.

Each worker stores its position with its output: one line of its file for each batch. Meanwhile the
owner of the store writes, collects garbage and changes the streams.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from tests.harness.bounds import bounds
from tests.harness.kills import SEED
from tests.harness.seeds import seeded

pytestmark = pytest.mark.on_disk

WORKERS = 3
COMMITS_PER_ROUND = 60

WORKER = """
import json, sys
from pathlib import Path
import kvstore
from kvstore import Position, Timestamp

url, file, number, workers, is_last = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
text = file.read_bytes()
whole = text[: text.rfind(b"\\n") + 1]
start = None
if whole:
    at, taken, first = json.loads(whole.splitlines()[-1])["position"]
    start = Position(Timestamp(at), taken, None if first is None else bytes.fromhex(first))
with file.open("r+b", buffering=0) as sink, kvstore.connect(url) as client:
    sink.seek(len(whole))
    sink.truncate()
    feed = client.feed("f", start, (number, workers), batch_rows=7)
    for batch in feed.batches(follow=not is_last, heartbeat=None if is_last else 0.05):
        at, taken, first = batch.position
        line = {
            "is_state": batch.is_state,
            "events": [
                (int(e.timestamp), e.sequence, e.key.hex(), e.value and e.value.hex())
                for e in batch.events
            ],
            "position": (int(at), taken, None if first is None else first.hex()),
        }
        sink.write(json.dumps(line).encode() + b"\\n")
        print("wrote", flush=True)
        feed.ack(batch)
        print("acked", flush=True)
"""


class Writer:
    """Writes to the store in a thread: so many commits in each round, and remembers each change."""

    def __init__(self, store: kvstore.Store, draw: Any) -> None:
        self.store, self.draw = store, draw
        self.changes: list[tuple[int, str, str | None]] = []
        self._allowed = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._is_done = False

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done = True
        self._allowed.release()
        self._thread.join()

    def begin_round(self) -> None:
        self._allowed.release(COMMITS_PER_ROUND)

    def _run(self) -> None:
        number = 0
        while self._allowed.acquire() and not self._is_done:
            number += 1
            keys = [b"%03d" % self.draw.randrange(300) for _ in range(self.draw.choice([1, 1, 9]))]
            written: dict[bytes, bytes | None] = {}
            with self.store.batch() as batch:
                for key in keys:
                    value = b"%d" % number if self.draw.random() < 0.7 else None
                    written[key] = value
                    batch.delete(key) if value is None else batch.put(key, value)
            at = int(batch.timestamp or 0)
            told = ((key.hex(), value and value.hex()) for key, value in written.items())
            self.changes += [(at, key, value) for key, value in told]
            if number % 20 == 0:
                self.store.gc(before=self.store.upper - 1)
            if number % 90 == 0:
                self.store.reshard(self.draw.randrange(WORKERS, 6))


def run_worker(url: str, sink: Path, number: int, kill_after: int | None) -> bool:
    """Run a worker until it has printed so many lines, and kill it; None: until it ends. Returns
    whether it was killed before it ended."""
    command = [sys.executable, "-c", WORKER, url, str(sink), str(number), str(WORKERS)]
    with subprocess.Popen(
        [*command, str(int(kill_after is None))], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        if kill_after is None:
            child.communicate()
        else:
            for _ in range(kill_after):
                child.stdout.readline()
            child.kill()
    assert child.returncode in (0, -9)
    return child.returncode == -9


@pytest.mark.parametrize(
    "rounds", [2, pytest.param(60, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_workers_that_are_killed_deliver_the_state_and_each_change_once(
    tmp_path: Path, rounds: int
) -> None:
    draw = seeded(SEED)
    sinks = [tmp_path / f"sink-{number}" for number in range(WORKERS)]
    with (
        bounds(FEED_POLL_S_MAX=0.2),
        kvstore.open(tmp_path / "store", durability="async") as store,
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
    ):
        store.reshard(WORKERS)
        store.put_many((b"%03d" % number, b"state") for number in range(0, 300, 2))
        for number, sink in enumerate(sinks):
            sink.touch()
            store.feed("f", start="state" if number == 0 else None, streams=(number, WORKERS))
        at = min(hold.timestamp for hold in store.holds.all())
        state = {(int(at), key.hex(), value.hex()) for key, value in store.scan(as_of=at)}
        with Writer(store, draw) as writer:
            for _ in range(rounds):
                writer.begin_round()
                each(lambda n: run_worker(running.url, sinks[n], n, draw.randrange(1, 30)))
        each(lambda n: run_worker(running.url, sinks[n], n, None))
        newest = {key.hex(): value.hex() for key, value in store.scan()}
    rows, changes = read_sinks(sinks)
    assert rows == Counter(state)
    assert changes == Counter(writer.changes)
    in_order = sorted([*rows, *changes], key=lambda row: row[0])
    made = {key: value for _, key, value in in_order}
    assert {key: value for key, value in made.items() if value is not None} == newest


def each(work: Callable[[int], object]) -> None:
    """Do the work of all workers at once."""
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))


def read_sinks(sinks: list[Path]) -> tuple[Counter[Any], Counter[Any]]:
    """The rows of the state and the changes in all sinks."""
    rows: Counter[Any] = Counter()
    changes: Counter[Any] = Counter()
    for sink in sinks:
        for line in sink.read_text().splitlines():
            batch = json.loads(line)
            found = rows if batch["is_state"] else changes
            found.update((time, key, value) for time, _, key, value in batch["events"])
    return rows, changes
