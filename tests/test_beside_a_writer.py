"""Readers beside a process that writes: what they show is the writer's state at their `upper`.

A process writes as fast as it can, in every way there is, and takes down the state behind each
commit. Another opens the store to be read again and again, and compares all it can see.
"""

from __future__ import annotations

import random
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import bulk
import kvstore
from kvstore.errors import NotYetWrittenError
from kvstore.store import Store
from tests.harness.rows import apply

KEYS = 60
STATES = 40
State = dict[bytes, bytes]


def key(number: int) -> bytes:
    return b"k%03d" % number


class Writer:
    """Random writes to one store, and the state behind each of its commits."""

    def __init__(self, place: Path, engine: str, rng: random.Random) -> None:
        self.place, self.rng = place, rng
        self.store: Store = kvstore.open(place / "store", engine, durability="async")
        self.states: list[tuple[int, State]] = []
        self.imports: list[int] = []
        self.ways: list[Callable[[], Any]] = [
            self.put,
            self.put,
            self.batch,
            self.delete,
            self.delete_range,
            self.add_import,
            self.add_import,
            self.revert,
            self.revert_range,
            self.clear,
            self.upkeep,
        ]

    def step(self) -> None:
        self.rng.choice(self.ways)()
        self.states.append((int(self.store.upper), dict(self.store.scan())))

    def span(self) -> tuple[bytes, bytes]:
        start = self.rng.randrange(KEYS)
        return key(start), key(start + self.rng.randint(1, 12))

    def put(self) -> None:
        self.store.put(key(self.rng.randrange(KEYS)), self.rng.randbytes(6))

    def batch(self) -> None:
        """Large enough to have a thin entry in the log now and then."""
        with self.store.batch() as batch:
            batch.delete_range(*self.span())
            for _ in range(self.rng.choice([3, 3, 90])):
                value = self.rng.randbytes(self.rng.choice([10, 900]))
                batch.put(key(self.rng.randrange(KEYS)), value)

    def delete(self) -> None:
        self.store.delete(key(self.rng.randrange(KEYS)))

    def delete_range(self) -> None:
        self.store.delete_range(*self.span())

    def add_import(self) -> None:
        staged = self.place / f"import-{len(self.imports)}"
        made = bulk.Import.create(staged)
        with made.writer() as writer:
            for number in sorted(self.rng.sample(range(KEYS), 8)):
                writer.put(key(number), b"import %d" % len(self.imports))
        made.seal()
        bulk.ingest(self.store, staged, move=True)
        shutil.rmtree(staged)
        self.imports.append(made.import_id)

    def revert(self) -> None:
        since = self.store.since
        added = [each for each in self.store.imports() if (each.added or 0) > since]
        if added:
            self.store.revert_import(self.rng.choice(added).import_id)

    def revert_range(self) -> None:
        if self.store.whole_since < self.store.upper - 1:
            to = self.rng.randint(self.store.whole_since, self.store.upper - 1)
            self.store.revert_range(*self.span(), to)

    def clear(self) -> None:
        if self.rng.random() < 0.3:
            self.store.clear_range(*self.span())

    def upkeep(self) -> None:
        how = self.rng.randrange(4)
        if how == 0:
            before = self.rng.randint(self.store.since, self.store.upper)
            self.store.gc(before=before, compact=self.rng.random() < 0.5)
        elif how == 1:
            self.store.sync()
        else:
            for family in self.rng.sample(("data", "changes", "ranges", "meta"), 2):
                self.store._engine.compact(family)


def write(place: Path, engine: str, seed: int, pipe: Connection) -> None:
    """Write until told to stop; then say which state was behind each commit."""
    writer = Writer(place, engine, random.Random(seed))
    with writer.store:
        writer.put()
        pipe.send("there is a store")
        while not pipe.poll():
            writer.step()
    pipe.send(writer.states)


@contextmanager
def writing(
    spawn: Any, place: Path, engine: str, seed: int
) -> Iterator[tuple[Any, list[tuple[int, State]]]]:
    """A writer beside the block: its process, and the list that gets its states at the end."""
    print(f"seed {seed}")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=write, args=(place, engine, seed, theirs))
    process.start()
    theirs.close()
    states: list[tuple[int, State]] = []
    try:
        ours.recv()
        yield process, states
        ours.send("stop")
        states += ours.recv()
    finally:
        process.kill()
        process.join()


def look(store: Store, rng: random.Random) -> list[tuple[int, State]]:
    """States that the reader shows: of its newest time, and of one that it picks."""
    newest = store.upper - 1
    rows = dict(store.scan())
    assert [batch.num_rows for batch in store.scan_batches()] in ([], [len(rows)])
    assert {k: store.get(k) for k in map(key, range(KEYS))} == {
        k: rows.get(k) for k in map(key, range(KEYS))
    }
    assert apply({}, store.changes(0, revisions="latest", order="time")) == rows
    assert all(version.timestamp <= newest for k in rows for version in store.history(k))
    assert all((each.added or 0) <= newest for each in store.imports())
    with pytest.raises(NotYetWrittenError):
        store.get(b"k", as_of=newest + 1)
    seen = [(newest, rows)]
    if store.whole_since <= newest:
        past = rng.randint(store.whole_since, newest)
        seen.append((past, dict(store.scan(as_of=past))))
        assert apply(dict(seen[-1][1]), store.changes(past, order="time")) == rows
    return seen


def check(seen: list[tuple[int, State]], states: list[tuple[int, State]]) -> None:
    """Compare with the first state that was complete at the time."""
    uppers = [upper for upper, _ in states]
    for at, rows in seen:
        # The commits below `at` and the newest one at it: the state of the last upper up to it.
        place = bisect_left(uppers, at + 2) - 1
        if place >= 0:
            assert rows == states[place][1], f"as of {at}"


def compare(spawn: Any, place: Path, engine: str, seed: int) -> None:
    """Open the store until so many of its states were seen."""
    rng = random.Random(seed)
    seen: list[tuple[int, State]] = []
    uppers = [0]
    with writing(spawn, place, engine, seed) as (process, states):
        while len(uppers) < STATES:
            assert process.is_alive()
            with kvstore.open_read_only(place / "store") as store:
                assert store.upper >= uppers[-1]
                if store.upper == uppers[-1]:
                    continue
                uppers.append(store.upper)
                seen += look(store, rng)
                if len(uppers) % 10 == 0:
                    assert store.verify().ok
    check(seen, states)


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(40, marks=pytest.mark.soak)], ids=["few", "many"]
)
@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_a_reader_shows_the_writers_state_at_its_upper(
    tmp_path: Path, spawn: Any, engine: str, rounds: int
) -> None:
    for number in range(rounds):
        place = tmp_path / str(number)
        place.mkdir()
        compare(spawn, place, engine, random.randrange(1 << 32))
        shutil.rmtree(place)
