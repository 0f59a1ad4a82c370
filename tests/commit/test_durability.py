"""The fsync of a group alone, over a disk that only counts.

`tests/test_group_commit.py` runs it with threads.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.base.meters import Meters
from kvstore.base.timestamp import Timestamp
from kvstore.errors import PoisonedError, StorageError, UsageError
from kvstore.timeline.durability import DURABILITY, GroupSync, Health
from kvstore.timeline.frontiers import Frontiers


class CountedSync:
    """The one method of an engine that the group needs."""

    def __init__(self) -> None:
        self.count = 0
        self.error: BaseException | None = None

    def sync(self) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error


class Rig:
    def __init__(self) -> None:
        self.disk: Any = CountedSync()
        self.frontiers = Frontiers(since=0, upper=5)
        self.health = Health(self.frontiers, "the bench")
        self.syncs = GroupSync(self.disk, self.frontiers, self.health, Meters("a store"))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_what_is_there_at_opening_is_durable_and_waits_for_nothing(rig: Rig) -> None:
    rig.syncs.wait(5)
    assert (rig.syncs.durable, rig.disk.count) == (5, 0)


def test_a_leader_syncs_for_all_that_is_written_by_then(rig: Rig) -> None:
    rig.frontiers.advance(Timestamp(9))
    rig.syncs.wait(7)
    rig.syncs.wait(9)
    assert (rig.syncs.durable, rig.disk.count) == (9, 1)


def test_a_commit_that_came_during_an_fsync_is_not_counted_as_durable(rig: Rig) -> None:
    rig.frontiers.advance(Timestamp(7))
    sync = rig.disk.sync

    def slow() -> None:
        sync()
        if rig.disk.count == 1:
            rig.frontiers.advance(Timestamp(9))

    rig.disk.sync = slow
    rig.syncs.wait(7)
    assert rig.syncs.durable == 7
    rig.syncs.wait(9)
    assert (rig.syncs.durable, rig.disk.count) == (9, 2)


def test_after_a_failed_fsync_nothing_is_durable_and_nobody_tries_again(rig: Rig) -> None:
    rig.frontiers.advance(Timestamp(9))
    rig.disk.error = StorageError("the disk is gone")
    with pytest.raises(StorageError):
        rig.syncs.wait(9)
    rig.disk.error = None
    with pytest.raises(PoisonedError):
        rig.syncs.wait(9)
    assert (rig.syncs.durable, rig.disk.count) == (5, 1)
    rig.syncs.wait(5)  # earlier commits are still durable


def test_a_leader_that_is_interrupted_lets_the_next_one_lead(rig: Rig) -> None:
    rig.frontiers.advance(Timestamp(9))
    rig.disk.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.syncs.wait(9)
    assert rig.syncs.durable == 5
    rig.disk.error = None
    rig.syncs.wait(9)
    assert (rig.syncs.durable, rig.disk.count) == (9, 2)


@pytest.mark.parametrize("durability", ["", "fsync", "Sync"])
def test_an_unknown_durability_is_refused(durability: str) -> None:
    with pytest.raises(UsageError, match="sync, group, async"):
        DURABILITY.check("durability", durability)
