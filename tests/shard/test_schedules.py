"""Many writers, readers, compactors and collectors at once, over storage that fails, with crashes.

Every schedule comes from a seed and repeats exactly. Each batch carries a marker row of its own
that nothing deletes. So a reader of a snapshot knows which batches are in it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from kvstore.backup.shard.rows.batch_writer import BatchDesc
from kvstore.backup.shard.shard import Shard
from kvstore.backup.shard.state.state import EMPTY
from kvstore.base.clock import ManualClock
from kvstore.errors import (
    DeterminateError,
    HistoryGoneError,
    IndeterminateError,
    NotYetWrittenError,
    UpperMismatchError,
)
from kvstore.storage.memory_storage import MemoryBlob, MemoryConsensus
from kvstore.storage.patience import Patience
from tests.harness.soak import soaked
from tests.harness.storage_faults import FaultRates, FaultyBlob, FaultyConsensus, Weather
from tests.shard.rows import (
    Row,
    delete,
    delete_range,
    model_state,
    put,
    state_of,
    versions,
)
from tests.shard.turns import Crash, Turns

pytestmark = pytest.mark.tiny_limits

MARK = b"~batch/"
KEYS = [f"k{i}".encode() for i in range(12)]
STORAGE_ERRORS = (DeterminateError, IndeterminateError)


@dataclass
class Attempt:
    """One batch that a writer tried to append, and the answers."""

    lower: int
    upper: int
    rows: list[Row]
    acknowledged: bool = False
    refused: bool = False


@dataclass
class World:
    """One storage that fails by `Weather`, and all batches that were ever tried on it."""

    seed: int
    crash_rate: float = 0.0
    rates: FaultRates = field(default_factory=FaultRates)
    attempts: dict[bytes, Attempt] = field(default_factory=dict)
    snapshots: int = 0
    collected: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.names = itertools.count()
        self.turns = Turns(self.seed, crash_rate=self.crash_rate)
        self.weather = Weather(self.seed, self.rates, on_call=self.turns.switch)
        patience = Patience(1e9, pause=lambda seconds: self.turns.switch())
        self.blob = MemoryBlob(patience=patience)
        self.consensus = MemoryConsensus()
        self.clock = ManualClock()

    def open(self) -> Shard:
        return Shard.open(
            FaultyBlob(self.blob, self.weather),
            FaultyConsensus(self.consensus, self.weather),
            "s",
            clock=self.clock,
        )

    def surviving(self, work: Callable[[Shard], None], rounds: int) -> Callable[[], None]:
        """An actor that does `work` `rounds` times, with a new handle after each crash."""

        def once() -> None:
            with suppress(Crash, *STORAGE_ERRORS):
                work(self.open())

        def actor() -> None:
            for _ in range(rounds):
                once()

        return actor

    # -- actors ------------------------------------------------------------------------------

    def write(self, shard: Shard) -> None:
        writer = shard.writer(f"w{next(self.names)}")
        for _ in range(4):
            lower = shard.refresh().upper
            upper = lower + self.random.randint(1, 5)
            mark = MARK + f"{len(self.attempts):05}".encode()
            rows = [put(mark, lower, b"%d" % upper), *self.some_rows(lower, upper)]
            attempt = self.attempts[mark] = Attempt(lower, upper, rows)
            self.append(shard, writer.name, attempt, token=mark.decode())

    def append(self, shard: Shard, name: str, attempt: Attempt, *, token: str) -> None:
        """Append. A killed process may come back, with the token that it had written down."""
        retrying = False
        while not (attempt.acknowledged or attempt.refused):
            try:
                desc = BatchDesc(attempt.lower, attempt.upper)
                batch = shard.write_batch(desc, versions(attempt.rows))
                shard.writer(name).compare_and_append(batch, token=token, retrying=retrying)
                attempt.acknowledged = True
            except UpperMismatchError:  # noqa: PERF203
                attempt.refused = True
            except Crash:
                if self.random.random() < 0.5:
                    raise
                shard, retrying = self.open(), True

    def some_rows(self, lower: int, upper: int) -> list[Row]:
        points = {(self.random.choice(KEYS), self.random.randrange(lower, upper)) for _ in range(4)}
        rows = [
            put(k, t, b"%d" % self.random.randrange(99))
            if self.random.random() < 0.7
            else delete(k, t)
            for k, t in sorted(points)
        ]
        if self.random.random() < 0.2:
            low, high = sorted(self.random.sample(KEYS, 2))
            rows.append(delete_range(low, high, self.random.randrange(lower, upper)))
        return rows

    def read(self, shard: Shard) -> None:
        with shard.reader() as reader:
            state = shard.refresh()
            if state.upper == 0:
                return
            as_of = self.random.randint(max(state.since - 1, 0), state.upper)
            try:
                with reader.snapshot(as_of) as snapshot:
                    for _ in range(self.random.randint(1, 4)):
                        self.verify(state_of(snapshot.read()), as_of)
                        self.dawdle()
            except HistoryGoneError:
                assert as_of < shard.refresh().since
            except NotYetWrittenError:
                assert as_of >= state.upper

    def dawdle(self) -> None:
        """Wait, so that the version that this actor holds is compacted, and its files can be
        collected."""
        for _ in range(self.random.randrange(200)):
            self.turns.switch()

    def forget(self, shard: Shard) -> None:
        upper = shard.refresh().upper
        with shard.reader() as reader:
            if upper:
                reader.downgrade_since(self.random.randrange(upper))

    def compact(self, shard: Shard) -> None:
        shard.compact(full=self.random.random() < 0.3)

    def collect(self, shard: Shard) -> None:
        self.collected += len(shard.gc().blobs)

    # -- checks ------------------------------------------------------------------------------

    def verify(self, state: dict[bytes, bytes | None], as_of: int) -> None:
        """Check that acknowledged batches are there once and refused ones are not, and that the
        state is the model's."""
        found = {key: self.attempts[key] for key in state if key.startswith(MARK)}
        edges = sorted((a.lower, a.upper) for a in found.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(edges))
        for mark, attempt in self.attempts.items():
            if attempt.acknowledged and attempt.lower <= as_of:
                assert mark in found, f"acknowledged {mark!r} was lost"
            assert not (attempt.refused and mark in found), f"refused {mark!r} is in"
        rows = [row for attempt in found.values() for row in attempt.rows]
        assert state == model_state(rows, as_of)
        self.snapshots += 1


@pytest.mark.parametrize("seed", [*range(5), *soaked(*range(5, 40))])
def test_no_schedule_loses_repeats_or_changes_a_batch(seed: int) -> None:
    world = World(seed, crash_rate=0.01 if seed % 3 else 0.0)
    actors = [world.surviving(world.write, 4) for _ in range(3)]
    actors += [world.surviving(world.read, 8) for _ in range(2)]
    actors += [world.surviving(world.compact, 6) for _ in range(2)]
    actors += [world.surviving(world.forget, 3)]
    actors += [world.surviving(world.collect, 6) for _ in range(2)]
    world.turns.run(actors)
    world.weather.calm()
    assert world.weather.faults > 20
    assert_whole(world)


def assert_whole(world: World) -> None:
    """After the failures end, everything can be read, every batch is there, and leftovers can be
    removed."""
    shard = world.open()
    as_of = shard.upper - 1
    with shard.snapshot(as_of) as snapshot:
        world.verify(state_of(snapshot.read()), as_of)
    for name in shard.state.leased:  # readers that crashed
        world.clock.set(1 << 62)
        assert name
    shard.expire_lapsed()
    shard.compact(full=True)
    shard.gc()
    shard.gc()
    report = shard.scrub(checksums=True, delete_orphans_before_ns=1 << 63)
    assert report.is_sound
    with shard.snapshot(as_of) as snapshot:
        world.verify(state_of(snapshot.read()), as_of)
    after = shard.scrub()
    assert after.is_sound
    assert not [name for name in after.orphans if "/part/" in name]


def test_the_schedules_do_read_collect_and_crash() -> None:
    collected = snapshots = crashes = 0
    for seed in range(4):
        # Crashed readers hold back collection until their lease lapses, which it never does here.
        world = World(seed, crash_rate=0.01 if seed == 3 else 0.0)
        actors = [world.surviving(world.write, 5), world.surviving(world.read, 8)]
        actors += [world.surviving(world.compact, 40), world.surviving(world.collect, 40)]
        world.turns.run(actors)
        collected += world.collected
        snapshots += world.snapshots
        crashes += world.turns.crashes
    assert min(collected, snapshots, crashes) > 0


def test_a_seed_repeats_its_schedule() -> None:
    def history() -> list[tuple[int, int, bool]]:
        world = World(3, crash_rate=0.01)
        world.turns.run([world.surviving(world.write, 3) for _ in range(3)])
        return [(a.lower, a.upper, a.acknowledged) for a in world.attempts.values()]

    assert history() == history()


def test_a_finished_shard_ends_as_a_tombstone_whatever_fails() -> None:
    world = World(1)
    shard = world.open()
    writer = shard.writer()
    for upper in (5, 9):
        batch = shard.write_batch(BatchDesc(shard.upper, upper), versions([put(b"k", upper - 1)]))
        writer.compare_and_append(batch)
    writer.progress(EMPTY)
    with shard.reader() as reader:
        reader.downgrade_since(EMPTY)
    while not finished_through_faults(world):
        pass
    world.weather.calm()
    shard = world.open()
    shard.finalise()
    assert shard.state.is_tombstone
    assert [info.name for info in world.blob.list("s/part/")] == []
    assert len(world.consensus.scan("s", start=0, limit=99)) <= 3


def finished_through_faults(world: World) -> bool:
    with suppress(*STORAGE_ERRORS):
        world.open().finalise()
        return True
    return False
