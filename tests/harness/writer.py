"""Random writes to a store by every kind of write, and the state behind each commit."""

from __future__ import annotations

import random
import shutil
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvstore
from kvstore import bulk
from kvstore.base.timestamp import Timestamp
from kvstore.store import Store
from tests.harness.parts import parts_of

KEYS = 60
MINUTE_NS = 60 * 10**9
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

    def step(self) -> bool:
        """Make one random write; returns whether the store promised to keep it."""
        is_durable = self.rng.choice(self.ways)() is True
        self.states.append((int(self.store.upper), dict(self.store.scan())))
        return is_durable

    def span(self) -> tuple[bytes, bytes]:
        start = self.rng.randrange(KEYS)
        return key(start), key(start + self.rng.randint(1, 12))

    def put(self) -> None:
        self.store.put(key(self.rng.randrange(KEYS)), self.rng.randbytes(6))

    def batch(self) -> None:
        """Some batches are large enough for a thin entry in the log."""
        with self.store.batch() as batch:
            batch.delete_range(*self.span())
            for _ in range(self.rng.choice([3, 3, 90])):
                value = self.rng.randbytes(self.rng.choice([10, 900]))
                batch.put(key(self.rng.randrange(KEYS)), value)

    def delete(self) -> None:
        self.store.delete(key(self.rng.randrange(KEYS)))

    def delete_range(self) -> None:
        self.store.delete_range(*self.span())

    def add_import(self) -> bool:
        staged = self.place / f"import-{len(self.imports)}"
        made = bulk.Import.create(staged)
        with made.writer() as writer:
            for number in sorted(self.rng.sample(range(KEYS), 8)):
                writer.put(key(number), b"import %d" % len(self.imports))
        made.seal()
        bulk.ingest(self.store, staged, move=True)
        shutil.rmtree(staged)
        self.imports.append(made.import_id)
        return True

    def revert(self) -> bool:
        since = self.store.since
        known = self.store.imports.all()
        added = [each for each in known if (each.added or 0) > since and each.reverted is None]
        if added:
            self.store.revert_import(self.rng.choice(added).import_id)
        return bool(added)

    def revert_range(self) -> None:
        if self.store.whole_since < self.store.upper - 1:
            to = recent(self.rng, self.store.whole_since, self.store.upper - 1)
            self.store.revert_range(*self.span(), to)

    def clear(self) -> bool:
        clears = self.rng.random() < 0.3
        if clears:
            self.store.clear_range(*self.span())
        return clears

    def upkeep(self) -> None:
        how = self.rng.randrange(4)
        if how == 0:
            before = recent(self.rng, self.store.since, self.store.upper)
            self.store.gc(before=before, compact=self.rng.random() < 0.5)
        elif how == 1:
            self.store.sync()
        else:
            for family in self.rng.sample(("data", "changes", "ranges", "meta"), 2):
                parts_of(self.store).engine.compact(family)


def recent(rng: random.Random, least: int, newest: int) -> Timestamp:
    """A random time from `least` to `newest`, of the last minute: a store that has given up no
    history is readable from 1970 on, and nothing happened then."""
    return Timestamp(rng.randint(max(least, newest - MINUTE_NS), newest))


def check(seen: list[tuple[int, State]], states: list[tuple[int, State]]) -> None:
    """Compare with the first state that was complete at the time."""
    uppers = [upper for upper, _ in states]
    for at, rows in seen:
        # The commits below `at` and the newest one at it: the state of the last upper up to it.
        place = bisect_left(uppers, at + 2) - 1
        if place >= 0:
            assert rows == states[place][1], f"as of {at}"
