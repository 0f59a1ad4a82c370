"""A process dies while it deletes the keys that are due.

The next process deletes the rest, each key at exactly its time, and none twice.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import ManualClock, bulk
from kvstore.testing.model import state_after
from tests.harness.bounds import bounds
from tests.harness.kills import SEED, run_until_killed
from tests.harness.parts import parts_of
from tests.harness.seeds import seeded

pytestmark = pytest.mark.on_disk

START = 1_700_000_000_000_000_000
STEP = 1000
KEYS = 200


def expire(place: Path, engine: str, now: int, said: Any) -> None:
    """The child: opens the store after the due times of its keys, and reads it."""
    with (
        bounds(EXPIRY_STEP_KEYS=2),
        kvstore.open(place, engine, durability="async", clock=ManualClock(now)) as store,
    ):
        said.send("begun")
        store.get(b"")
        said.send("done")


@pytest.mark.parametrize(
    "rounds", [3, pytest.param(60, marks=pytest.mark.soak)], ids=["few", "many"]
)
@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_keys_expire_at_their_time_whenever_the_process_is_killed(
    tmp_path: Path, spawn: Any, engine: str, rounds: int
) -> None:
    pick = seeded(SEED)
    place, clock = tmp_path / "store", ManualClock(START)
    due = make(place, engine, clock, pick)
    now = max(due.values()) + 1
    hits = 0
    for _ in range(rounds):
        said = run_until_killed(
            spawn, expire, (place, engine, now), lambda said: "begun" in said, pick.random() * 0.03
        )
        hits += "done" not in said
        with kvstore.open_read_only(place) as store:
            upper = store.upper
            assert {key for key, _ in store.scan()} == {k for k, at in due.items() if at >= upper}
    print(f"{hits} of {rounds} kills came before the end")
    clock.set(now)
    require_expired(place, engine, clock, due)


@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_a_crash_at_each_step_of_the_due_deletes_leaves_the_rest_waiting(
    tmp_path: Path, engine: str
) -> None:
    """The directory is copied after each write to the engine, as a crash there would leave it."""
    place, clock = tmp_path / "store", ManualClock(START)
    due = make(place, engine, clock, seeded(SEED), count=24)
    clock.set(max(due.values()) + 1)
    copies: list[Path] = []
    with (
        bounds(EXPIRY_STEP_KEYS=2),
        kvstore.open(place, engine, durability="async", clock=clock) as store,
    ):
        stored = parts_of(store).engine
        write = stored.write

        def write_and_copy(*what: Any, **how: Any) -> None:
            write(*what, **how)
            stored.sync()
            copies.append(tmp_path / f"copy-{len(copies)}")
            shutil.copytree(place, copies[-1])

        stored.write = write_and_copy  # type: ignore[method-assign]
        assert list(store.scan()) == []
    left = set()
    for copy in copies:
        with kvstore.open_read_only(copy) as read:
            upper, state = read.upper, {key for key, _ in read.scan()}
        assert state == {key for key, at in due.items() if at >= upper}
        left.add(len(state))
        require_expired(copy, engine, clock, due)
    assert len(left) >= 8


def require_expired(place: Path, engine: str, clock: ManualClock, due: dict[bytes, int]) -> None:
    """All keys of the store expire now, each at its time, and none twice."""
    with kvstore.open(place, engine, durability="async", clock=clock) as store:
        assert list(store.scan()) == []
        for key, at in due.items():
            assert [(v.timestamp, v.value) for v in store.history(key)][:-1] == [(at, None)]
        middle = sorted(due.values())[len(due) // 2]
        changes = store.changes(middle, clock.wall_ns() - 1)
        assert state_after(dict(store.scan(as_of=middle)), changes) == {}
        assert store.verify().problems == ()


def make(
    place: Path, engine: str, clock: ManualClock, pick: random.Random, count: int = KEYS
) -> dict[bytes, int]:
    """A store of keys with random due times, some of them alike; the due time of each. Half of the
    keys come by an import."""
    due = {b"%03d" % n: START + STEP * pick.randint(count, 3 * count) for n in range(count)}
    load = bulk.Import.create(place.with_name("staged"))
    with (
        kvstore.open(place, engine, durability="async", clock=clock) as store,
        load.writer() as writer,
    ):
        for number, (key, at) in enumerate(due.items()):
            put: Any = writer.put if number % 2 else store.put
            put(key, b"v", expires=kvstore.Timestamp(at))
    load.seal()
    with kvstore.open(place, engine, durability="async", clock=clock) as store:
        bulk.ingest(store, load.staging)
    return due
