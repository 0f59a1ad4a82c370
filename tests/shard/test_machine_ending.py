"""The machine's rules of rollups, collection and the end."""

from __future__ import annotations

import pytest

from kvstore.backup.shard.state.state import (
    EMPTY,
    OPAQUE_INITIAL,
    CriticalHold,
    Finalised,
    MergeOutcome,
    UpperMismatch,
)
from kvstore.backup.shard.state.trace import ShardBatch
from kvstore.limits import ROLLUP_EVERY
from tests.shard.driver import (
    SECOND,
    Command,
    Driver,
    caa,
    do,
    downgrade,
    downgrade_critical,
    register,
)


def tombstone() -> Driver:
    shard = Driver()
    shard.write(0, 5, "p")
    register(shard, "r")
    shard(downgrade("r", EMPTY))
    shard.finished()
    steps = 0
    while not shard.state.is_tombstone:
        shard(do("finalise"))
        steps += 1
    assert steps == 4  # handles, two batches, the tombstone itself
    shard(do("add_rollup", shard.state.seqno, "end"))
    shard(do("remove_rollups", {1: "r1"}))
    return shard


def test_a_second_rollup_of_a_version_is_refused_in_a_new_version(shard: Driver) -> None:
    shard.write(0, 5, "p")
    assert shard(do("add_rollup", 2, "r2")) is True
    assert shard(do("add_rollup", 2, "other")) is False
    assert shard(do("add_rollup", 2, "r2")) is True  # a retry
    assert shard.state.rollups == {1: "r1", 2: "r2"}


def test_removed_rollups_are_reported_and_the_newest_never_goes(shard: Driver) -> None:
    shard(do("add_rollup", 1 + 1 - 1, "r1"))
    shard.write(0, 5, "p")
    shard(do("add_rollup", 3, "r3"))
    going = do("remove_rollups", {1: "r1", 3: "r3", 9: "x"})
    assert shard(going) == (1,)
    assert shard(going, commits=False) == ()
    assert shard.state.rollups == {3: "r3"}


def test_collection_is_asked_for_once_enough_versions_can_go(shard: Driver) -> None:
    for i in range(ROLLUP_EVERY):
        shard.write(i, i + 1)
    target = shard.state.seqno
    assert shard(do("request_gc")) == target
    assert shard(do("request_gc"), commits=False) is None


def test_a_leased_reader_holds_collection_back_by_its_version(shard: Driver) -> None:
    register(shard, "r")
    for i in range(ROLLUP_EVERY * 2):
        shard.write(i, i + 1)
    assert shard(do("request_gc"), commits=False) is None
    assert shard.state.seqno_since == 2


def test_the_held_version_only_grows(shard: Driver) -> None:
    register(shard, "a")
    shard.write(0, 1)
    before = shard.state.seqno_since
    register(shard, "b")
    assert shard.state.seqno_since == before
    shard(do("expire_leased", "a"))
    assert shard.state.seqno_since > before


def test_a_shard_is_not_finished_before_both_frontiers_are_empty(shard: Driver) -> None:
    assert shard(do("finalise"), commits=False) == Finalised(False, None)
    shard.write(0, EMPTY)
    assert shard(do("finalise"), commits=False) == Finalised(False, None)


def test_finishing_clears_handles_then_one_batch_a_step() -> None:
    shard = tombstone()
    assert not shard.state.leased
    assert not shard.state.critical
    assert not shard.state.writers
    assert set(shard.state.blobs()) == {"end"}


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        (caa(0, 5, "p"), UpperMismatch(EMPTY, EMPTY)),
        (caa(5, 3), UpperMismatch(EMPTY, EMPTY)),
        (do("expire_idle_writers", 1 << 62), 0),
        (downgrade("r", 5), EMPTY),
        (do("expire_leased", "r"), 0),
        (do("expire_lapsed", 1 << 62), 0),
        (do("register_critical", "h"), CriticalHold(EMPTY, OPAQUE_INITIAL)),
        (downgrade_critical("h", 5), EMPTY),
        (do("request_merge", 0, EMPTY), None),
        (do("apply_merge", ShardBatch(0, 5), frozenset()), MergeOutcome.NO_MATCH),
        (do("add_rollup", 99, "x"), False),
        (do("remove_rollups", {1: "r1"}), ()),
        (do("request_gc"), None),
        (do("finalise"), Finalised(True, 0)),
    ],
)
def test_on_a_tombstone_every_command_is_a_no_op(command: Command, outcome: object) -> None:
    assert tombstone()(command, commits=False) == outcome


def test_on_a_tombstone_a_reader_is_registered_at_the_empty_since_without_commit() -> None:
    shard = tombstone()
    command = do("register_leased", "r", now_ns=0, lease_ns=SECOND)
    reader = shard(command, commits=False)
    assert (reader.since, reader.seqno) == (EMPTY, shard.state.seqno)
