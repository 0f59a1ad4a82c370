"""The machine's rules of readers, holds and what may be read."""

from __future__ import annotations

import pytest

from backup.shard.state import commands as c
from backup.shard.state import machine
from backup.shard.state.holding import OPAQUE_INITIAL
from backup.shard.state.state import EMPTY, LeasedReader
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from tests.shard.driver import SECOND, Driver, register


def test_a_leased_reader_starts_at_since_and_holds_its_version(shard: Driver) -> None:
    shard.write(0, 5, "p")
    assert register(shard, "r") == c.ReaderRegistered(0, 3)
    shard.write(5, 9, "q")
    assert shard.state.seqno_since == 3


def test_a_leased_reader_may_start_from_the_least_critical_hold(shard: Driver) -> None:
    shard(c.RegisterCritical("slow"))
    shard(c.RegisterCritical("fast"))
    register(shard, "r")
    shard(c.DowngradeSince("r", 20, None, 0))
    shard(c.CompareAndDowngrade("slow", OPAQUE_INITIAL, OPAQUE_INITIAL, 5))
    shard(c.CompareAndDowngrade("fast", OPAQUE_INITIAL, OPAQUE_INITIAL, 9))
    assert register(shard, "lag", from_critical=True).since == 5
    assert register(shard, "new").since == shard.state.since == 5


def test_without_critical_holds_it_starts_at_since(shard: Driver) -> None:
    assert register(shard, "r", from_critical=True).since == 0


def test_downgrade_moves_since_forward_only(shard: Driver) -> None:
    register(shard, "r")
    assert shard(c.DowngradeSince("r", 5, None, 0)) == c.Downgraded(5)
    assert shard(c.DowngradeSince("r", 3, None, 0)) == c.Downgraded(5)
    assert shard(c.DowngradeSince("r", 5, None, 0)) == c.Downgraded(5)
    assert shard.state.since == 5


def test_downgrade_renews_the_lease_and_never_shortens_it(shard: Driver) -> None:
    register(shard, "r", now_ns=SECOND)
    shard(c.DowngradeSince("r", 0, None, 5 * SECOND))
    assert shard.state.leased["r"].heartbeat_ns == 5 * SECOND
    shard(c.DowngradeSince("r", 0, None, 2 * SECOND))
    assert shard.state.leased["r"].heartbeat_ns == 5 * SECOND


def test_downgrade_moves_the_held_version_to_the_least_outstanding(shard: Driver) -> None:
    register(shard, "r")  # holds v2
    for upper in (5, 9, 12):
        shard.write(shard.state.upper, upper, "p")
    shard(c.DowngradeSince("r", 0, 4, 0))
    assert shard.state.leased["r"].seqno == 4
    shard(c.DowngradeSince("r", 0, 3, 0))  # a hold never moves back
    assert shard.state.leased["r"].seqno == 4
    shard(c.DowngradeSince("r", 0, None, 0))  # nothing is in use, so the newest version is held
    assert shard.state.leased["r"].seqno == shard.state.seqno
    shard(c.DowngradeSince("r", 0, 10**9, 0))
    assert shard.state.leased["r"].seqno == shard.state.seqno


def test_an_unknown_reader_is_told_an_empty_since_and_nothing_commits(shard: Driver) -> None:
    assert shard(c.DowngradeSince("ghost", 5, None, 0), commits=False) == c.Downgraded(EMPTY)
    assert shard.state.since == 0


def test_shard_since_is_the_least_of_all_readers(shard: Driver) -> None:
    register(shard, "a")
    register(shard, "b")
    shard(c.RegisterCritical("c"))
    shard(c.DowngradeSince("a", 9, None, 0))
    shard(c.DowngradeSince("b", 7, None, 0))
    assert shard.state.since == 0
    shard(c.CompareAndDowngrade("c", OPAQUE_INITIAL, OPAQUE_INITIAL, 8))
    assert shard.state.since == 7


def test_expiry_alone_does_not_move_since_but_the_next_downgrade_does(shard: Driver) -> None:
    register(shard, "slow")
    register(shard, "fast")
    shard(c.DowngradeSince("fast", 9, None, 0))
    assert shard(c.ExpireLeasedReader("slow")) == c.Expired(1)
    assert shard(c.ExpireLeasedReader("slow")) == c.Expired(0)
    assert shard.state.since == 0
    shard(c.DowngradeSince("fast", 9, None, 0))  # equal: a leased reader must move strictly
    assert shard.state.since == 0
    shard(c.DowngradeSince("fast", 10, None, 0))
    assert shard.state.since == 10


def test_without_readers_since_stays(shard: Driver) -> None:
    register(shard, "r")
    shard(c.DowngradeSince("r", 5, None, 0))
    shard(c.ExpireLeasedReader("r"))
    assert shard.state.since == 5
    assert shard.state.seqno_since == shard.state.seqno


def test_lapsed_leases_are_expired_together_and_only_those(shard: Driver) -> None:
    register(shard, "old", now_ns=0)
    register(shard, "older", now_ns=0)
    register(shard, "fresh", now_ns=5 * SECOND)
    at_the_limit = 10 * SECOND
    assert shard(c.ExpireLapsed(at_the_limit), commits=False) == c.Expired(0)
    assert shard(c.ExpireLapsed(at_the_limit + 1)) == c.Expired(2)
    assert list(shard.state.leased) == ["fresh"]


def test_a_reader_can_empty_the_since(shard: Driver) -> None:
    register(shard, "r")
    assert shard(c.DowngradeSince("r", EMPTY, None, 0)) == c.Downgraded(EMPTY)
    assert shard.state.since == EMPTY


def test_a_critical_hold_starts_at_since_with_a_zero_token_and_is_kept(shard: Driver) -> None:
    register(shard, "r")
    shard(c.DowngradeSince("r", 5, None, 0))
    assert shard(c.RegisterCritical("h")) == c.CriticalRegistered(5, OPAQUE_INITIAL)
    shard(c.CompareAndDowngrade("h", OPAQUE_INITIAL, b"owner--1", 7))
    assert shard(c.RegisterCritical("h")) == c.CriticalRegistered(7, b"owner--1")


def test_a_critical_hold_holds_no_version_and_never_lapses(shard: Driver) -> None:
    shard(c.RegisterCritical("h"))
    assert shard.state.seqno_since == shard.state.seqno
    assert shard(c.ExpireLapsed(1 << 62), commits=False) == c.Expired(0)
    assert "h" in shard.state.critical


def test_a_wrong_token_is_refused_with_the_current_one_in_a_new_version(shard: Driver) -> None:
    shard(c.RegisterCritical("h"))
    shard(c.CompareAndDowngrade("h", OPAQUE_INITIAL, b"owner--1", 3))
    outcome = shard(c.CompareAndDowngrade("h", OPAQUE_INITIAL, b"owner--2", 9))
    assert outcome == c.OpaqueMismatch(b"owner--1", 3)
    assert shard.state.since == 3


def test_a_since_that_is_behind_stays_but_the_token_is_replaced(shard: Driver) -> None:
    shard(c.RegisterCritical("h"))
    shard(c.CompareAndDowngrade("h", OPAQUE_INITIAL, b"owner--1", 5))
    assert shard(c.CompareAndDowngrade("h", b"owner--1", b"owner--2", 2)) == c.Downgraded(5)
    assert shard.state.critical["h"].opaque == b"owner--2"


def test_an_equal_critical_downgrade_recomputes_the_shards_since(shard: Driver) -> None:
    register(shard, "slow")
    shard(c.RegisterCritical("h"))
    shard(c.CompareAndDowngrade("h", OPAQUE_INITIAL, OPAQUE_INITIAL, 9))
    shard(c.ExpireLeasedReader("slow"))
    assert shard.state.since == 0
    shard(c.CompareAndDowngrade("h", OPAQUE_INITIAL, OPAQUE_INITIAL, 9))
    assert shard.state.since == 9


def test_an_unknown_critical_hold_or_a_short_token_is_a_callers_mistake(shard: Driver) -> None:
    with pytest.raises(UsageError):
        machine.apply(shard.state, c.CompareAndDowngrade("x", OPAQUE_INITIAL, OPAQUE_INITIAL, 1))
    shard(c.RegisterCritical("h"))
    with pytest.raises(UsageError):
        machine.apply(shard.state, c.CompareAndDowngrade("h", OPAQUE_INITIAL, b"short", 1))


def test_an_expired_critical_hold_leaves_since_where_it_is(shard: Driver) -> None:
    shard(c.RegisterCritical("h"))
    assert shard(c.ExpireCritical("h")) == c.Expired(1)
    assert shard(c.ExpireCritical("h")) == c.Expired(0)
    assert shard.state.since == 0


def test_a_snapshot_takes_the_batches_that_begin_at_or_before_it(shard: Driver) -> None:
    for upper in (5, 9, 12):
        shard.write(shard.state.upper, upper, f"p{upper}")
    assert machine.snapshot(shard.state, 4) == shard.state.batches[:1]
    assert machine.snapshot(shard.state, 5) == shard.state.batches[:2]
    assert machine.snapshot(shard.state, 11) == shard.state.batches


def test_a_snapshot_below_since_or_at_upper_says_which(shard: Driver) -> None:
    shard.write(0, 5, "p")
    with pytest.raises(NotYetWrittenError) as wait:
        machine.snapshot(shard.state, 5)
    assert wait.value.upper == 5
    register(shard, "r")
    shard(c.DowngradeSince("r", 3, None, 0))
    with pytest.raises(HistoryGoneError) as gone:
        machine.snapshot(shard.state, 2)
    assert gone.value.since == 3
    assert machine.snapshot(shard.state, 3)


def test_of_an_empty_since_nothing_can_be_read(shard: Driver) -> None:
    shard.finished()
    with pytest.raises(HistoryGoneError):
        machine.snapshot(shard.state, (1 << 63) - 1)


def test_a_listener_gets_the_batch_that_contains_its_frontier_or_waits(shard: Driver) -> None:
    shard.write(0, 5, "p")
    shard.write(5, 9, "q")
    assert machine.next_listen_batch(shard.state, 0) == shard.state.batches[0]
    assert machine.next_listen_batch(shard.state, 5) == shard.state.batches[1]
    assert machine.next_listen_batch(shard.state, 7) == shard.state.batches[1]
    assert machine.next_listen_batch(shard.state, 9) is None


def test_a_lease_lapses_only_after_its_last_instant() -> None:
    reader = LeasedReader(seqno=1, since=0, heartbeat_ns=5, lease_ns=10)
    assert not reader.lapsed(15)
    assert reader.lapsed(16)
