"""The machine's rules of rollups, collection and the end."""

from __future__ import annotations

import pytest

from backup.shard.state import commands as c
from backup.shard.state.holding import OPAQUE_INITIAL
from backup.shard.state.state import EMPTY, ShardBatch
from kvstore.limits import ROLLUP_EVERY
from tests.shard.driver import SECOND, Driver, batch, caa, register


def tombstone() -> Driver:
    shard = Driver()
    shard.write(0, 5, "p")
    register(shard, "r")
    shard(c.DowngradeSince("r", EMPTY, None, 0))
    shard.finished()
    steps = 0
    while not shard.state.is_tombstone:
        shard(c.Finalise())
        steps += 1
    assert steps == 4  # handles, two batches, the tombstone itself
    shard(c.AddRollup(shard.state.seqno, "end"))
    shard(c.RemoveRollups(((1, "r1"),)))
    return shard


def test_a_second_rollup_of_a_version_is_refused_in_a_new_version(shard: Driver) -> None:
    shard.write(0, 5, "p")
    assert shard(c.AddRollup(2, "r2")) == c.RollupAdded(True)
    assert shard(c.AddRollup(2, "other")) == c.RollupAdded(False)
    assert shard(c.AddRollup(2, "r2")) == c.RollupAdded(True)  # a retry
    assert shard.state.rollups == {1: "r1", 2: "r2"}


def test_removed_rollups_are_reported_and_the_newest_never_goes(shard: Driver) -> None:
    shard(c.AddRollup(1 + 1 - 1, "r1"))
    shard.write(0, 5, "p")
    shard(c.AddRollup(3, "r3"))
    going = c.RemoveRollups(((1, "r1"), (3, "r3"), (9, "x")))
    assert shard(going) == c.RollupsRemoved((1,))
    assert shard(going, commits=False) == c.RollupsRemoved(())
    assert shard.state.rollups == {3: "r3"}


def test_collection_is_asked_for_once_enough_versions_can_go(shard: Driver) -> None:
    for i in range(ROLLUP_EVERY):
        shard.write(i, i + 1)
    target = shard.state.seqno
    assert shard(c.RequestGc()) == c.GcRequested(target)
    assert shard(c.RequestGc(), commits=False) == c.GcRequested(None)


def test_a_leased_reader_holds_collection_back_by_its_version(shard: Driver) -> None:
    register(shard, "r")
    for i in range(ROLLUP_EVERY * 2):
        shard.write(i, i + 1)
    assert shard(c.RequestGc(), commits=False) == c.GcRequested(None)
    assert shard.state.seqno_since == 2


def test_the_held_version_only_grows(shard: Driver) -> None:
    register(shard, "a")
    shard.write(0, 1)
    before = shard.state.seqno_since
    register(shard, "b")
    assert shard.state.seqno_since == before
    shard(c.ExpireLeasedReader("a"))
    assert shard.state.seqno_since > before


def test_a_shard_is_not_finished_before_both_frontiers_are_empty(shard: Driver) -> None:
    assert shard(c.Finalise(), commits=False) == c.Finalised(False, None)
    shard.write(0, EMPTY)
    assert shard(c.Finalise(), commits=False) == c.Finalised(False, None)


def test_finishing_clears_handles_then_one_batch_a_step() -> None:
    shard = tombstone()
    assert not shard.state.leased
    assert not shard.state.critical
    assert not shard.state.writers
    assert set(shard.state.blobs()) == {"end"}


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        (caa(0, 5, "p"), c.UpperMismatch(EMPTY, EMPTY)),
        (caa(5, 3), c.UpperMismatch(EMPTY, EMPTY)),
        (c.Append(batch(0, 5, "p")), c.AlreadyWritten(EMPTY)),
        (c.ExpireWriter("w"), c.Expired(0)),
        (c.ExpireIdleWriters(1 << 62), c.Expired(0)),
        (c.DowngradeSince("r", 5, None, 0), c.Downgraded(EMPTY)),
        (c.ExpireLeasedReader("r"), c.Expired(0)),
        (c.ExpireLapsed(1 << 62), c.Expired(0)),
        (c.RegisterCritical("h"), c.CriticalRegistered(EMPTY, OPAQUE_INITIAL)),
        (c.CompareAndDowngrade("h", OPAQUE_INITIAL, OPAQUE_INITIAL, 5), c.Downgraded(EMPTY)),
        (c.ExpireCritical("h"), c.Expired(0)),
        (c.RequestMerge(0, EMPTY), c.MergeRequested(None)),
        (c.ApplyMerge(ShardBatch(0, 5), frozenset()), c.MergeOutcome.NO_MATCH),
        (c.AddRollup(99, "x"), c.RollupAdded(False)),
        (c.RemoveRollups(((1, "r1"),)), c.RollupsRemoved(())),
        (c.RequestGc(), c.GcRequested(None)),
        (c.Finalise(), c.Finalised(True, 0)),
    ],
)
def test_on_a_tombstone_every_command_is_a_no_op(command: c.Command, outcome: object) -> None:
    assert tombstone()(command, commits=False) == outcome


def test_on_a_tombstone_a_reader_is_registered_at_the_empty_since_without_commit() -> None:
    shard = tombstone()
    outcome = shard(c.RegisterLeasedReader("r", 0, SECOND), commits=False)
    assert outcome == c.ReaderRegistered(EMPTY, shard.state.seqno)
