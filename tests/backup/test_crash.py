"""Killed at any step of a backup, compaction, expiry or restore, all is well when made again.

Every round copies one prepared store and collection, lets a child do the work and kills it at a
step of its own, then does the work again here and compares with the store.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kvstore
from backup import Collection
from backup.shard import batch, part
from tests.backup import children
from tests.backup.histories import versions

ROUNDS = 5
"""Steps at which one run of a test kills; which ones, its seed says."""


@pytest.fixture(scope="module")
def spawn() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.backup.children"])
    return context


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "PART_BYTES_MAX", 4_000)
    monkeypatch.setattr(batch, "ROW_GROUP_ROWS_MAX", 20)


def run(spawn: Any, action: str, place: Path, at: int) -> int | None:
    """Run a child; None if it was killed at step `at`, else how many steps there are."""
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=children.run, args=(action, place, at, sender))
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


def rounds(
    spawn: Any, action: str, tmp_path: Path, check: Callable[[Path, bool], None], *, backups: int
) -> None:
    """Kill `action` at steps chosen over all of it, and let `check` look at each place."""
    children.prepare(tmp_path / "prepared", seed=backups, backups=backups)
    shutil.copytree(tmp_path / "prepared", tmp_path / "whole")
    steps = run(spawn, action, tmp_path / "whole", at=1 << 30)
    assert steps is not None
    check(tmp_path / "whole", False)
    pick = random.Random(action)
    for number in range(ROUNDS):
        share = steps / ROUNDS
        at = min(int(number * share + pick.random() * share), steps - 1)
        place = tmp_path / f"killed-at-{at}"
        shutil.copytree(tmp_path / "prepared", place)
        assert run(spawn, action, place, at) is None
        check(place, True)
        shutil.rmtree(place)


def sound(store: kvstore.Store, collection: Collection, pick: random.Random) -> None:
    """Windows join, all is there and right, and a random instant restores as the store was."""
    infos = collection.list()
    assert all(a.upper == b.lower for a, b in pairwise(infos))
    collection.verify(depth="checksums")
    collection.verify(depth="contents", store=store)
    at = kvstore.Timestamp(pick.randrange(collection.since, collection.upper))
    path = store.path.with_name(f"restored-{at}") if store.path else Path()
    assert collection.restore(path, as_of=at) == at
    with kvstore.open(path) as restored:
        assert list(restored.scan()) == list(store.scan(as_of=at))
        since = collection.since
        assert list(restored.changes(since, at)) == list(store.changes(since, at))
    shutil.rmtree(path)


@pytest.mark.parametrize("backups", [0, 2], ids=["full", "incremental"])
def test_a_killed_backup_is_finished_by_the_next(spawn: Any, tmp_path: Path, backups: int) -> None:
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
            sound(store, collection, pick)
            collection.scrub(delete_orphans_older_than=timedelta(0))
            sound(store, collection, pick)

    rounds(spawn, "back_up", tmp_path, check, backups=backups)


def test_a_killed_compaction_loses_nothing(spawn: Any, tmp_path: Path) -> None:
    pick = random.Random(2)

    def check(place: Path, killed: bool) -> None:
        with kvstore.open(place / "store", durability="async") as store:
            collection = Collection(place / "collection")
            sound(store, collection, pick)
            collection.compact()
            assert len(collection.list()) == 1
            sound(store, collection, pick)
            collection.backup(store)
            sound(store, collection, pick)

    rounds(spawn, "compact", tmp_path, check, backups=3)


def test_a_killed_expiry_gives_up_no_more_than_was_asked(spawn: Any, tmp_path: Path) -> None:
    pick = random.Random(3)

    def check(place: Path, killed: bool) -> None:
        with kvstore.open(place / "store", durability="async") as store:
            collection = Collection(place / "collection")
            sound(store, collection, pick)
            limit = children.expiry(collection)
            assert collection.expire(before=limit) >= limit
            sound(store, collection, pick)

    rounds(spawn, "expire", tmp_path, check, backups=3)


def test_a_killed_restore_leaves_nothing_in_its_place(spawn: Any, tmp_path: Path) -> None:
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

    rounds(spawn, "restore", tmp_path, check, backups=2)


def test_a_killed_restore_into_a_store_adds_all_or_nothing(spawn: Any, tmp_path: Path) -> None:
    def check(place: Path, killed: bool) -> None:
        collection = Collection(place / "collection")
        with (
            kvstore.open(place / "store", durability="async") as store,
            kvstore.open(place / "target") as target,
        ):
            expected = list(store.scan(as_of=collection.upper - 1))
            assert list(target.scan()) in ([], expected)
            assert killed or target.scan()
            collection.restore_into(target)
            assert list(target.scan()) == expected
            assert target.verify().problems == ()

    rounds(spawn, "restore_into", tmp_path, check, backups=2)


def test_parts_of_a_killed_full_backup_are_not_uploaded_again(spawn: Any, tmp_path: Path) -> None:
    children.prepare(tmp_path / "prepared", seed=4, backups=0)
    shutil.copytree(tmp_path / "prepared", tmp_path / "whole")
    steps = run(spawn, "back_up", tmp_path / "whole", at=1 << 30)
    assert steps is not None
    resumed = 0
    for at in range(steps // 6, steps // 2, steps // 9):
        place = tmp_path / f"killed-at-{at}"
        shutil.copytree(tmp_path / "prepared", place)
        assert run(spawn, "back_up", place, at) is None
        left = set((place / "collection" / "blob").glob("chain-*/part/*"))
        recorded = len(list((place / "collection" / "blob").glob("progress/*/*/*.json")))
        with kvstore.open(place / "store", durability="async") as store:
            store.put(b"later", b"v")
            store.gc(before=store.upper - 1)
            collection = Collection(place / "collection")
            assert collection.list() == []
            # What a scrub finds before the retry are parts that were not recorded: at most one.
            report = collection.scrub(delete_orphans_older_than=timedelta(0))
            assert len(report.deleted) == len(left) - recorded <= 1
            uploaded = {path.name for path in left} - {
                name.rpartition("/")[2] for name in report.deleted
            }
            info = collection.backup(store)
            after = {path.name for path in (place / "collection" / "blob").glob("chain-*/part/*")}
            assert uploaded <= after
            # All that is there is in a backup: nothing was uploaded beside what was.
            assert len(after) == info.parts == sum(found.parts for found in collection.list())
            assert len(collection.list()) == (2 if recorded else 1)
            assert not list((place / "collection" / "blob").glob("progress/*/*/*.json"))
            assert collection.verify(depth="contents", store=store).rows
            sound(store, collection, random.Random(at))
        resumed += recorded > 0
    assert resumed >= 2
