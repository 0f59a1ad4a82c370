"""A backup, compaction, expiry or restore that is killed at any step succeeds when it is made
again.

For each tried step, a child does the work on a copy of one prepared store and collection, and is
killed at that step. This process then makes the work again, and compares the result with the store.
`make soak` tries every step. `make test` tries one of every few steps, with a different offset in
each run.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvstore
import kvstore.limits
from kvstore.backup import Collection
from tests.backup import children
from tests.backup.histories import versions
from tests.harness.bounds import TINY, bounds, some_tiny
from tests.harness.seeds import seeded


class Depth(NamedTuple):
    """`changes` are prepared and one of `stride` steps is tried. The work of each is killed `kills`
    times in a row."""

    changes: int
    stride: int
    kills: int


DEPTHS = [
    pytest.param(Depth(changes=12, stride=4, kills=1), id="some"),
    pytest.param(Depth(changes=12, stride=1, kills=1), id="once", marks=pytest.mark.soak),
    pytest.param(Depth(changes=90, stride=1, kills=2), id="twice", marks=pytest.mark.soak),
]
each_depth = pytest.mark.parametrize("depth", DEPTHS)


SMALL_PARTS = {"PART_BYTES_MAX": 4_000, "ROW_GROUP_ROWS_MAX": 20}
"""Limits under which a backup of a few dozen rows fills several parts."""

MORE_STEPS = ("PART_", "ROW_GROUP_", "RESTORE_", "JOURNAL_", "MEMORY_", "GC_", "ROLLUP_", "THIN_")
"""Prefixes of limits that keep their usual values: tiny ones would add files, and so children."""


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    tiny = {name: v for name, v in some_tiny().items() if not name.startswith(MORE_STEPS)}
    with bounds(tiny | SMALL_PARTS):
        yield


def run(spawn: Any, action: str, place: Path, at: int) -> int | None:
    """Run a child; returns None if it was killed at step `at`, otherwise the number of steps."""
    receiver, sender = spawn.Pipe(duplex=False)
    # the child sets its own limits
    present = {name: getattr(kvstore.limits, name) for name in TINY}
    process = spawn.Process(target=children.run, args=(action, place, at, sender, present))
    process.start()
    sender.close()
    try:
        steps: int = receiver.recv()
    except EOFError:
        process.join()
        assert process.exitcode == -signal.SIGKILL
        return None
    process.join()
    return steps


NEVER = 1 << 40
"""A number of a step that no child reaches."""


def at_the_steps(
    spawn: Any,
    action: str,
    tmp_path: Path,
    check: Callable[[Path, bool], None],
    depth: Depth,
    *,
    backups: int,
    chains: int = 1,
) -> int:
    """Kill `action` at its steps, and let `check` look at each place; returns the number of steps.

    The first child is not killed, and so tells the number of steps.
    """
    children.prepare(
        tmp_path / "prepared", seed=backups, backups=backups, chains=chains, changes=depth.changes
    )
    pick = seeded()

    def steps_until(at: int) -> int | None:
        place = tmp_path / f"killed-at-{at}"
        shutil.copytree(tmp_path / "prepared", place)
        steps = run(spawn, action, place, at)
        if steps is None and depth.kills > 1:
            run(spawn, action, place, pick.randrange(at + 10))
        check(place, steps is None)
        shutil.rmtree(place)
        return steps

    steps = steps_until(NEVER)
    assert steps is not None
    taken = range(pick.randrange(depth.stride), steps, depth.stride)
    killed = sum(steps_until(at) is None for at in taken)
    assert killed > len(taken) // 2
    return steps


def sound(store: kvstore.Store, collection: Collection, pick: random.Random) -> None:
    """Windows join, every part is there and sound, and a random instant restores as the store
    was."""
    for batches in collection.chains():
        assert all(a.upper == b.lower for a, b in pairwise(batches))
    collection.verify(depth="checksums")
    collection.verify(depth="contents", store=store)
    since = collection.since
    rows = [part for batch in collection.batches() for part in batch.parts]
    first = min((part.time_min for part in rows), default=0)
    at = kvstore.Timestamp(pick.randrange(max(since, first), collection.upper))
    assert store.path is not None
    path = store.path.with_name(f"restored-{at}")
    assert collection.restore(path, as_of=at) == at
    with kvstore.open(path) as restored:
        assert list(restored.scan()) == list(store.scan(as_of=at))
        assert list(restored.changes(since, at)) == list(store.changes(since, at))
    shutil.rmtree(path)


@each_depth
@pytest.mark.parametrize("backups", [0, 2], ids=["full", "incremental"])
def test_a_killed_backup_is_finished_by_the_next(
    spawn: Any, tmp_path: Path, depth: Depth, backups: int
) -> None:
    pick = random.Random(1)

    def check(place: Path, killed: bool) -> None:
        with kvstore.open(place / "store", durability="async") as store:
            collection = Collection(place / "collection")
            before = len(collection.list())
            upto = store.sync()
            collection.backup(store, token="t")
            assert len(collection.list()) <= backups + 2
            assert killed or len(collection.list()) == before
            assert collection.list()[0].lower == 0
            if killed and before == backups:
                assert collection.upper >= upto
            collection.scrub(delete_orphans_older_than=timedelta(0))
            sound(store, collection, pick)

    assert at_the_steps(spawn, "back_up", tmp_path, check, depth, backups=backups) > 15


@each_depth
def test_a_killed_full_backup_beside_a_chain_is_finished_by_the_next(
    spawn: Any, tmp_path: Path, depth: Depth
) -> None:
    pick = random.Random(5)

    def check(place: Path, killed: bool) -> None:
        with kvstore.open(place / "store", durability="async") as store:
            collection = Collection(place / "collection")
            collection.backup(store, token="t", full=True)
            old, new = collection.chains()
            assert (len(old), old[0].lower, new[0].lower) == (2, 0, 0)
            assert len(new) <= 2
            sound(store, collection, pick)

    assert at_the_steps(spawn, "begin_again", tmp_path, check, depth, backups=2) > 20


@each_depth
def test_a_killed_compaction_loses_nothing(spawn: Any, tmp_path: Path, depth: Depth) -> None:
    pick = random.Random(2)

    def check(place: Path, killed: bool) -> None:
        with kvstore.open(place / "store", durability="async") as store:
            collection = Collection(place / "collection")
            sound(store, collection, pick)
            collection.compact()
            assert len(collection.list()) == 1
            collection.backup(store)
            sound(store, collection, pick)

    assert at_the_steps(spawn, "compact", tmp_path, check, depth, backups=3) > 20


@each_depth
@pytest.mark.parametrize("chains", [1, 2], ids=["within-a-chain", "of-an-ended-chain"])
def test_a_killed_expiry_gives_up_no_more_than_was_asked(
    spawn: Any, tmp_path: Path, depth: Depth, chains: int
) -> None:
    pick = random.Random(3)
    limits = []

    def check(place: Path, killed: bool) -> None:
        with kvstore.open(place / "store", durability="async") as store:
            collection = Collection(place / "collection")
            limits.append(children.expiry(Collection(tmp_path / "prepared" / "collection")))
            assert collection.since <= limits[0] < collection.upper
            sound(store, collection, pick)
            assert collection.expire(before=limits[0]) == limits[0]
            assert len(collection.chains()) == 1
            sound(store, collection, pick)

    steps = at_the_steps(spawn, "expire", tmp_path, check, depth, backups=2, chains=chains)
    assert steps > 20


@each_depth
def test_a_killed_restore_leaves_nothing_in_its_place(
    spawn: Any, tmp_path: Path, depth: Depth
) -> None:
    def check(place: Path, killed: bool) -> None:
        collection = Collection(place / "collection")
        if not (place / "restored").exists():
            assert killed
            collection.restore(place / "restored")
        names = {entry.name for entry in place.iterdir()}
        assert names <= {"store", "collection", "restored"} or killed
        at = collection.upper - 1
        with (
            kvstore.open(place / "store", durability="async") as store,
            kvstore.open(place / "restored") as restored,
        ):
            assert versions(restored, at) == versions(store, at)

    assert at_the_steps(spawn, "restore", tmp_path, check, depth, backups=2) > 10


@each_depth
def test_a_killed_restore_into_a_store_adds_all_or_nothing(
    spawn: Any, tmp_path: Path, depth: Depth
) -> None:
    def check(place: Path, killed: bool) -> None:
        collection = Collection(place / "collection")
        with (
            kvstore.open(place / "store", durability="async") as store,
            kvstore.open(place / "target") as target,
        ):
            expected = list(store.scan(as_of=collection.upper - 1))
            assert list(target.scan()) in ([[], expected] if killed else [expected])
            collection.restore_into(target)
            assert list(target.scan()) == expected
            assert target.verify().problems == ()

    assert at_the_steps(spawn, "restore_into", tmp_path, check, depth, backups=2) > 10


@each_depth
def test_parts_of_a_killed_full_backup_are_not_uploaded_again(
    spawn: Any, tmp_path: Path, depth: Depth
) -> None:
    resumed = []

    def check(place: Path, killed: bool) -> None:
        blobs = place / "collection" / "blob"
        left = set(blobs.glob("chain-*/part/*.parquet"))
        recorded = len(list(blobs.glob("progress/*/*/*.json")))
        with kvstore.open(place / "store", durability="async") as store:
            store.put(b"later", b"v")
            store.gc(before=store.upper - 1)
            collection = Collection(place / "collection")
            if collection.list():
                return
            # Before the retry a scrub finds the parts that no record names: at most one.
            report = collection.scrub(delete_orphans_older_than=timedelta(0))
            assert len(report.deleted) == len(left) - recorded <= 1
            uploaded = {path.name for path in left} - {
                name.rpartition("/")[2] for name in report.deleted
            }
            info = collection.backup(store)
            after = {path.name for path in blobs.glob("chain-*/part/*.parquet")}
            assert uploaded <= after
            # Every part belongs to a backup: nothing was uploaded twice.
            assert len(after) == info.parts == sum(found.parts for found in collection.list())
            assert len(collection.list()) == (2 if recorded else 1)
            assert not list(blobs.glob("progress/*/*/*.json"))
            assert collection.verify(depth="contents", store=store).rows
        resumed.append(recorded)

    depth = depth._replace(changes=max(depth.changes, 25), kills=1)
    at_the_steps(spawn, "back_up", tmp_path, check, depth, backups=0)
    assert max(resumed) >= 2
