"""The machine's rules of readers, holds and what may be read."""

from __future__ import annotations

import pytest

from kvstore.backup.shard.state.state import (
    EMPTY,
    OPAQUE_INITIAL,
    CriticalHold,
    LeasedReader,
    OpaqueMismatch,
)
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from tests.shard.driver import SECOND, Driver, do, downgrade, downgrade_critical, register


def test_a_leased_reader_starts_at_since_and_holds_its_version(shard: Driver) -> None:
    shard.write(0, 5, "p")
    reader = register(shard, "r")
    assert (reader.since, reader.seqno) == (0, 3)
    shard.write(5, 9, "q")
    assert shard.state.seqno_since == 3


def test_downgrade_moves_since_forward_only(shard: Driver) -> None:
    register(shard, "r")
    assert shard(downgrade("r", 5)) == 5
    assert shard(downgrade("r", 3)) == 5
    assert shard(downgrade("r", 5)) == 5
    assert shard.state.since == 5


def test_downgrade_renews_the_lease_and_never_shortens_it(shard: Driver) -> None:
    register(shard, "r", now_ns=SECOND)
    shard(downgrade("r", 0, now_ns=5 * SECOND))
    assert shard.state.leased["r"].heartbeat_ns == 5 * SECOND
    shard(downgrade("r", 0, now_ns=2 * SECOND))
    assert shard.state.leased["r"].heartbeat_ns == 5 * SECOND


def test_downgrade_moves_the_held_version_to_the_least_outstanding(shard: Driver) -> None:
    register(shard, "r")  # holds v2
    for upper in (5, 9, 12):
        shard.write(shard.state.upper, upper, "p")
    shard(downgrade("r", 0, outstanding=4))
    assert shard.state.leased["r"].seqno == 4
    shard(downgrade("r", 0, outstanding=3))  # a hold never moves back
    assert shard.state.leased["r"].seqno == 4
    shard(downgrade("r", 0))  # nothing is in use, so the newest version is held
    assert shard.state.leased["r"].seqno == shard.state.seqno
    shard(downgrade("r", 0, outstanding=10**9))
    assert shard.state.leased["r"].seqno == shard.state.seqno


def test_an_unknown_reader_is_told_an_empty_since_and_nothing_commits(shard: Driver) -> None:
    assert shard(downgrade("ghost", 5), commits=False) == EMPTY
    assert shard.state.since == 0


def test_shard_since_is_the_least_of_all_readers(shard: Driver) -> None:
    register(shard, "a")
    register(shard, "b")
    shard(do("register_critical", "c"))
    shard(downgrade("a", 9))
    shard(downgrade("b", 7))
    assert shard.state.since == 0
    shard(downgrade_critical("c", 8))
    assert shard.state.since == 7


def test_expiry_alone_does_not_move_since_but_the_next_downgrade_does(shard: Driver) -> None:
    register(shard, "slow")
    register(shard, "fast")
    shard(downgrade("fast", 9))
    assert shard(do("expire_leased", "slow")) == 1
    assert shard(do("expire_leased", "slow")) == 0
    assert shard.state.since == 0
    shard(downgrade("fast", 9))  # equal: a leased reader must move strictly
    assert shard.state.since == 0
    shard(downgrade("fast", 10))
    assert shard.state.since == 10


def test_without_readers_since_stays(shard: Driver) -> None:
    register(shard, "r")
    shard(downgrade("r", 5))
    shard(do("expire_leased", "r"))
    assert shard.state.since == 5
    assert shard.state.seqno_since == shard.state.seqno


def test_lapsed_leases_are_expired_together_and_only_those(shard: Driver) -> None:
    register(shard, "old", now_ns=0)
    register(shard, "older", now_ns=0)
    register(shard, "fresh", now_ns=5 * SECOND)
    at_the_limit = 10 * SECOND
    assert shard(do("expire_lapsed", at_the_limit), commits=False) == 0
    assert shard(do("expire_lapsed", at_the_limit + 1)) == 2
    assert list(shard.state.leased) == ["fresh"]


def test_a_reader_can_empty_the_since(shard: Driver) -> None:
    register(shard, "r")
    assert shard(downgrade("r", EMPTY)) == EMPTY
    assert shard.state.since == EMPTY


def test_a_critical_hold_starts_at_since_with_a_zero_token_and_is_kept(shard: Driver) -> None:
    register(shard, "r")
    shard(downgrade("r", 5))
    assert shard(do("register_critical", "h")) == CriticalHold(5, OPAQUE_INITIAL)
    shard(downgrade_critical("h", 7, opaque=b"owner--1"))
    assert shard(do("register_critical", "h")) == CriticalHold(7, b"owner--1")


def test_a_critical_hold_holds_no_version_and_never_lapses(shard: Driver) -> None:
    shard(do("register_critical", "h"))
    assert shard.state.seqno_since == shard.state.seqno
    assert shard(do("expire_lapsed", 1 << 62), commits=False) == 0
    assert "h" in shard.state.critical


def test_a_wrong_token_is_refused_with_the_current_one_in_a_new_version(shard: Driver) -> None:
    shard(do("register_critical", "h"))
    shard(downgrade_critical("h", 3, opaque=b"owner--1"))
    outcome = shard(downgrade_critical("h", 9, opaque=b"owner--2"))
    assert outcome == OpaqueMismatch(b"owner--1", 3)
    assert shard.state.since == 3


def test_a_since_that_is_behind_stays_but_the_token_is_replaced(shard: Driver) -> None:
    shard(do("register_critical", "h"))
    shard(downgrade_critical("h", 5, opaque=b"owner--1"))
    assert shard(downgrade_critical("h", 2, expected=b"owner--1", opaque=b"owner--2")) == 5
    assert shard.state.critical["h"].opaque == b"owner--2"


def test_an_equal_critical_downgrade_recomputes_the_shards_since(shard: Driver) -> None:
    register(shard, "slow")
    shard(do("register_critical", "h"))
    shard(downgrade_critical("h", 9))
    shard(do("expire_leased", "slow"))
    assert shard.state.since == 0
    shard(downgrade_critical("h", 9))
    assert shard.state.since == 9


def test_an_unknown_critical_hold_or_a_short_token_is_a_callers_mistake(shard: Driver) -> None:
    with pytest.raises(UsageError):
        shard(downgrade_critical("x", 1))
    shard(do("register_critical", "h"))
    with pytest.raises(UsageError):
        shard(downgrade_critical("h", 1, opaque=b"short"))


def test_a_snapshot_takes_the_batches_that_begin_at_or_before_it(shard: Driver) -> None:
    for upper in (5, 9, 12):
        shard.write(shard.state.upper, upper, f"p{upper}")
    assert shard.state.snapshot(4) == shard.state.batches[:1]
    assert shard.state.snapshot(5) == shard.state.batches[:2]
    assert shard.state.snapshot(11) == shard.state.batches


def test_a_snapshot_below_since_or_at_upper_says_which(shard: Driver) -> None:
    shard.write(0, 5, "p")
    with pytest.raises(NotYetWrittenError) as wait:
        shard.state.snapshot(5)
    assert wait.value.upper == 5
    register(shard, "r")
    shard(downgrade("r", 3))
    with pytest.raises(HistoryGoneError) as gone:
        shard.state.snapshot(2)
    assert gone.value.since == 3
    assert shard.state.snapshot(3)


def test_of_an_empty_since_nothing_can_be_read(shard: Driver) -> None:
    shard.finished()
    with pytest.raises(HistoryGoneError):
        shard.state.snapshot((1 << 63) - 1)


def test_a_lease_lapses_only_after_its_last_instant() -> None:
    reader = LeasedReader(seqno=1, since=0, heartbeat_ns=5, lease_ns=10)
    assert not reader.lapsed(15)
    assert reader.lapsed(16)
