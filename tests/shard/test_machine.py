"""Every rule of the machine, on the pure function: no storage, no clock, no data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backup.shard import commands as c
from backup.shard import machine
from backup.shard.frontier import EMPTY
from backup.shard.machine import OPAQUE_INITIAL
from backup.shard.state import Batch, Column, LeasedReader, Part, State
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from kvstore.limits import INLINE_BYTES_MAX, MERGE_FAN_IN, ROLLUP_EVERY

SECOND = 1_000_000_000


def part(name: str, **changes: Any) -> Part:
    fields: dict[str, Any] = {
        "name": name, "rows": 10, "size": 1000, "checksum": "00",
        "key_min": b"a", "key_max": b"z", "time_min": 0, "time_max": 0,
    }  # fmt: skip
    return Part(**{**fields, **changes})


def batch(lower: int, upper: int, *names: str, **changes: Any) -> Batch:
    parts = tuple(part(name, time_min=lower, time_max=upper - 1) for name in names)
    return replace(Batch(lower, upper, parts=parts), **changes)


def new_shard(**changes: Any) -> State:
    return replace(State("s", "versions", seqno=1, rollups={1: "r1"}), **changes)


class Driver:
    """Applies commands and checks what holds for all of them."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or new_shard()

    def __call__(self, command: c.Command, *, commits: bool = True) -> Any:
        before = self.state
        self.state, outcome = machine.apply(before, command)
        assert (self.state is not before) == commits, (command, outcome)
        assert self.state.seqno == before.seqno + commits
        assert self.state.since >= before.since
        assert self.state.upper >= before.upper
        assert self.state.seqno_since >= before.seqno_since
        self.state.check()
        return outcome

    def write(self, lower: int, upper: int, *names: str, token: str = "") -> Any:
        token = token or f"t{lower}-{upper}"
        return self(c.CompareAndAppend(batch(lower, upper, *names), "w", token, SECOND))

    def finished(self) -> Driver:
        """Bring it to since and upper empty."""
        self.write(self.state.upper, EMPTY, "last")
        self(c.RegisterCritical("end"))
        self(c.CompareAndDowngrade("end", OPAQUE_INITIAL, OPAQUE_INITIAL, EMPTY))
        return self


@pytest.fixture
def shard() -> Driver:
    return Driver()


def caa(lower: int, upper: int, *names: str, token: str = "t", writer: str = "w") -> c.Command:
    return c.CompareAndAppend(batch(lower, upper, *names), writer, token, SECOND)


# -- compare_and_append ----------------------------------------------------------------------


def test_append_at_the_upper_pushes_the_batch_and_remembers_the_token(shard: Driver) -> None:
    assert shard(caa(0, 5, "p", token="t1")) == c.Appended(5)
    assert shard.state.upper == 5
    assert shard.state.batches == (batch(0, 5, "p"),)
    assert (shard.state.writers["w"].token, shard.state.writers["w"].upper) == ("t1", 5)
    assert shard.state.writers["w"].heartbeat_ns == SECOND


def test_append_elsewhere_reports_the_uppers_of_shard_and_writer(shard: Driver) -> None:
    shard.write(0, 5, "p")
    assert shard(caa(0, 9), commits=False) == c.UpperMismatch(5, 5)
    assert shard(caa(7, 9, writer="other"), commits=False) == c.UpperMismatch(5, None)


def test_append_with_upper_below_lower_is_invalid_bounds(shard: Driver) -> None:
    assert shard(caa(5, 3), commits=False) == c.InvalidBounds(5, 3)


def test_append_of_rows_without_time_is_invalid(shard: Driver) -> None:
    rows = Batch(0, 0, parts=(part("p"),))
    command = c.CompareAndAppend(rows, "w", "t", 0)
    assert shard(command, commits=False) == c.InvalidEmptyInterval(0)


def test_bounds_are_checked_before_the_token_and_the_token_before_the_upper(shard: Driver) -> None:
    shard.write(0, 5, "p", token="t")
    shard.write(5, 9, "q", token="t2")
    assert isinstance(shard(caa(5, 3, token="t2"), commits=False), c.InvalidBounds)
    assert shard(caa(5, 9, "q", token="t2"), commits=False) == c.AlreadyCommitted(9)
    # Only the last token is remembered: an older one is answered by the upper.
    assert shard(caa(0, 5, "p", token="t"), commits=False) == c.UpperMismatch(9, 9)


def test_a_repeated_token_reports_the_current_upper_not_the_batchs(shard: Driver) -> None:
    shard.write(0, 5, "p", token="mine")
    shard(caa(5, 9, "q", token="theirs", writer="other"))
    assert shard(caa(0, 5, "p", token="mine"), commits=False) == c.AlreadyCommitted(9)


def test_tokens_belong_to_their_writer(shard: Driver) -> None:
    shard.write(0, 5, "p", token="t")
    assert shard(caa(5, 6, token="t", writer="other")) == c.Appended(6)


def test_an_empty_batch_is_progress_and_an_empty_interval_a_heartbeat(shard: Driver) -> None:
    assert shard(caa(0, 5)) == c.Appended(5)
    assert shard(c.CompareAndAppend(Batch(5, 5), "w", "beat", 7 * SECOND)) == c.Appended(5)
    assert shard.state.writers["w"].heartbeat_ns == 7 * SECOND
    assert shard.state.batches == (Batch(0, 5),)


def test_progress_after_progress_lengthens_one_empty_batch(shard: Driver) -> None:
    shard.write(0, 5)
    shard.write(5, 9)
    assert shard.state.batches == (Batch(0, 9),)
    shard(c.CompareAndAppend(Batch(9, 12, meta=(("kind", "x"),)), "w", "m", 0))
    assert len(shard.state.batches) == 2  # what the caller has named stays apart


def test_inline_bytes_over_the_budget_push_back(shard: Driver) -> None:
    inline = replace(part("i"), inline=bytes(INLINE_BYTES_MAX), size=INLINE_BYTES_MAX)
    shard(c.CompareAndAppend(Batch(0, 5, parts=(inline,)), "w", "1", 0))
    more = replace(part("j"), inline=b"x", size=1)
    outcome = shard(c.CompareAndAppend(Batch(5, 9, parts=(more,)), "w", "2", 0), commits=False)
    assert outcome == c.InlineBackpressure(INLINE_BYTES_MAX)
    assert shard.write(5, 9, "as-a-blob") == c.Appended(9)


def test_upper_becomes_empty_and_nothing_can_be_written_after(shard: Driver) -> None:
    shard.write(0, EMPTY, "p")
    assert shard(caa(5, 9), commits=False) == c.UpperMismatch(EMPTY, EMPTY)
    assert machine.snapshot(shard.state, (1 << 63) - 1) == shard.state.batches


def test_an_expired_writer_is_forgotten_with_its_token(shard: Driver) -> None:
    shard.write(0, 5, "p", token="t")
    assert shard(c.ExpireWriter("w")) == c.Expired(1)
    assert shard(c.ExpireWriter("w")) == c.Expired(0)
    assert shard(caa(0, 5, "p", token="t"), commits=False) == c.UpperMismatch(5, None)


def test_idle_writers_without_a_name_of_their_own_are_forgotten(shard: Driver) -> None:
    old, new = "w-00000000000000aa", "w-00000000000000bb"
    for number, (writer, now_ns) in enumerate([("mine", 1), (old, 2), (new, 9)]):
        shard(c.CompareAndAppend(batch(number, number + 1, f"p{number}"), writer, "t", now_ns))
    assert shard(c.ExpireIdleWriters(2), commits=False) == c.Expired(0)
    assert shard(c.ExpireIdleWriters(9)) == c.Expired(1)
    assert set(shard.state.writers) == {"mine", new}


# -- append, for replicas --------------------------------------------------------------------


def test_replica_append_joins_at_the_upper(shard: Driver) -> None:
    assert shard(c.Append(batch(0, 5, "p"))) == c.Appended(5)


def test_replica_append_below_the_upper_is_already_written(shard: Driver) -> None:
    shard.write(0, 5, "p")
    assert shard(c.Append(batch(0, 5, "p2")), commits=False) == c.AlreadyWritten(5)
    assert shard(c.Append(batch(2, 4, "p2")), commits=False) == c.AlreadyWritten(5)


def test_replica_append_across_the_upper_drops_what_lies_below(shard: Driver) -> None:
    shard.write(0, 5, "p")
    early = part("early", time_min=0, time_max=4)
    across = part("across", time_min=3, time_max=8)
    late = part("late", time_min=5, time_max=9)
    assert shard(c.Append(Batch(0, 10, parts=(early, across, late)))) == c.Appended(10)
    last = shard.state.batches[-1]
    assert (last.lower, last.upper) == (5, 10)
    assert [(p.name, p.drop_below) for p in last.parts] == [("across", 5), ("late", 0)]


def test_replica_append_above_the_upper_would_leave_a_gap(shard: Driver) -> None:
    shard.write(0, 5, "p")
    assert shard(c.Append(batch(6, 9, "q")), commits=False) == c.UpperMismatch(5, None)


def test_replica_append_checks_its_bounds(shard: Driver) -> None:
    assert isinstance(shard(c.Append(Batch(3, 2)), commits=False), c.InvalidBounds)
    rows = Batch(0, 0, parts=(part("p"),))
    assert isinstance(shard(c.Append(rows), commits=False), c.InvalidEmptyInterval)


# -- leased readers --------------------------------------------------------------------------


def register(shard: Driver, name: str, now_ns: int = 0, **kwargs: Any) -> c.ReaderRegistered:
    outcome = shard(c.RegisterLeasedReader(name, now_ns, 10 * SECOND, **kwargs))
    assert isinstance(outcome, c.ReaderRegistered)
    return outcome


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
    shard(c.DowngradeSince("r", 0, 3, 0))  # never back
    assert shard.state.leased["r"].seqno == 4
    shard(c.DowngradeSince("r", 0, None, 0))  # nothing in use: the version it just made
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


# -- critical holds --------------------------------------------------------------------------


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


# -- snapshot and listen ---------------------------------------------------------------------


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


# -- merging ---------------------------------------------------------------------------------


def merged(shard: Driver, lower: int, upper: int, **changes: Any) -> c.ApplyMerge:
    found = [b for b in shard.state.batches if lower <= b.lower and b.upper <= upper]
    rows = sum(b.rows for b in found)
    output = Batch(lower, upper, parts=(part(f"m{lower}-{upper}", rows=rows),))
    return c.ApplyMerge(replace(output, **changes), machine.part_names(tuple(found)))


def filled(shard: Driver, count: int) -> Driver:
    for i in range(count):
        shard.write(i, i + 1, f"p{i}")
    return shard


def test_enough_batches_of_alike_size_ask_for_a_merge_and_the_slot_is_durable(
    shard: Driver,
) -> None:
    filled(shard, MERGE_FAN_IN - 1)
    assert shard.state.slots == ()
    asked = shard.write(MERGE_FAN_IN - 1, MERGE_FAN_IN, "last")
    assert asked.merges == ((0, MERGE_FAN_IN),)
    assert shard.state.slots == ((0, MERGE_FAN_IN),)


def test_a_merge_that_fills_its_slot_is_exact_and_closes_it(shard: Driver) -> None:
    filled(shard, 4)
    assert shard(merged(shard, 0, 4)) is c.MergeOutcome.APPLIED_EXACT
    assert [b.names() for b in shard.state.batches] == [{"m0-4"}]
    assert shard.state.slots == ()


def test_a_merge_inside_a_slot_is_a_subset_and_the_slot_stays(shard: Driver) -> None:
    filled(shard, 4)
    assert shard(merged(shard, 1, 3)) is c.MergeOutcome.APPLIED_SUBSET
    assert [(b.lower, b.upper) for b in shard.state.batches] == [(0, 1), (1, 3), (3, 4)]
    assert shard.state.slots == ((0, 4),)


def test_the_same_output_again_is_known_as_applied(shard: Driver) -> None:
    filled(shard, 4)
    command = merged(shard, 0, 4)
    shard(command)
    assert shard(command, commits=False) is c.MergeOutcome.ALREADY_APPLIED


def test_a_merge_of_batches_that_are_no_longer_there_is_no_match(shard: Driver) -> None:
    filled(shard, 4)
    late = merged(shard, 0, 4)
    shard(merged(shard, 0, 4, parts=(part("faster"),)))
    assert shard(late, commits=False) is c.MergeOutcome.NO_MATCH


def test_a_merge_whose_bounds_are_no_edges_or_in_no_slot_is_no_match(shard: Driver) -> None:
    shard.write(0, 5, "p")
    shard.write(5, 9, "q")
    assert shard(merged(shard, 0, 9), commits=False) is c.MergeOutcome.NO_MATCH
    shard(c.RequestMerge(0, 9))
    cut = c.ApplyMerge(Batch(0, 7), machine.part_names(shard.state.batches))
    assert shard(cut, commits=False) is c.MergeOutcome.NO_MATCH


def test_a_merge_may_not_compact_beyond_the_shards_since(shard: Driver) -> None:
    filled(shard, 4)
    outcome = shard(merged(shard, 0, 4, since=1), commits=False)
    assert outcome is c.MergeOutcome.INVALID_SINCE
    register(shard, "r")
    shard(c.DowngradeSince("r", 1, None, 0))
    assert shard(merged(shard, 0, 4, since=1)).applied


def test_a_merge_never_has_more_rows_than_it_replaces(shard: Driver) -> None:
    filled(shard, 4)
    too_many = (part("m", rows=41),)
    outcome = shard(merged(shard, 0, 4, parts=too_many), commits=False)
    assert outcome is c.MergeOutcome.TOO_MANY_UPDATES


def test_a_merge_of_diffs_keeps_their_sum(shard: Driver) -> None:
    for i in range(4):
        p = part(f"p{i}", diff_sum=2)
        shard(c.CompareAndAppend(Batch(i, i + 1, parts=(p,)), "w", f"t{i}", 0))
    wrong = shard(merged(shard, 0, 4, parts=(part("m", diff_sum=7),)), commits=False)
    assert wrong is c.MergeOutcome.DIFF_SUM_CHANGED
    lost = shard(merged(shard, 0, 4, parts=()), commits=False)
    assert lost is c.MergeOutcome.DIFF_SUM_CHANGED
    assert shard(merged(shard, 0, 4, parts=(part("m", diff_sum=8),))).applied


def test_a_pending_slot_counts_as_one_batch_and_is_swallowed_by_a_larger_one() -> None:
    shard = filled(Driver(), 4)
    assert shard.state.slots == ((0, 4),)
    for i in range(4, 8):
        shard.write(i, i + 1, f"p{i}")
    # Four new ones make a run with the slot, which is no larger than them together.
    assert shard.state.slots in (((0, 8),), ((0, 4), (4, 8)))
    assert shard(merged(shard, 0, 4)).applied


def test_a_merge_on_request_makes_a_slot_only_where_there_is_something_to_gain(
    shard: Driver,
) -> None:
    shard.write(0, 5, "p")
    assert shard(c.RequestMerge(0, 5), commits=False) == c.MergeRequested(None)
    assert shard(c.RequestMerge(1, 5), commits=False) == c.MergeRequested(None)
    register(shard, "r")
    shard(c.DowngradeSince("r", 2, None, 0))
    assert shard(c.RequestMerge(0, 5)) == c.MergeRequested((0, 5))  # since has moved on
    assert shard(c.RequestMerge(0, 5), commits=False) == c.MergeRequested((0, 5))


def test_progress_does_not_lengthen_a_batch_that_a_merge_is_reading(shard: Driver) -> None:
    for i in range(3):
        shard.write(i, i + 1, f"p{i}")
    shard.write(3, 4)
    shard(c.RequestMerge(0, 4))
    shard.write(4, 5)
    assert shard(merged(shard, 0, 4)).applied


# -- rollups and collection ------------------------------------------------------------------


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


# -- the end ---------------------------------------------------------------------------------


def test_a_shard_is_not_finished_before_both_frontiers_are_empty(shard: Driver) -> None:
    assert shard(c.Finalise(), commits=False) == c.Finalised(False, None)
    shard.write(0, EMPTY)
    assert shard(c.Finalise(), commits=False) == c.Finalised(False, None)


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
        (c.ApplyMerge(Batch(0, 5), frozenset()), c.MergeOutcome.NO_MATCH),
        (c.AddRollup(99, "x"), c.RollupAdded(False)),
        (c.RemoveRollups(((1, "r1"),)), c.RollupsRemoved(())),
        (c.RequestGc(), c.GcRequested(None)),
        (c.Finalise(), c.Finalised(True, 0)),
        (c.RegisterSchema(()), c.SchemaRegistered(None, "the shard is finished")),
        (c.EvolveSchema(0, ()), c.SchemaRegistered(None, "the shard is finished")),
        (c.UpgradeVersion(9), c.VersionUpgraded(1)),
    ],
)
def test_on_a_tombstone_every_command_is_a_no_op(command: c.Command, outcome: object) -> None:
    assert tombstone()(command, commits=False) == outcome


def test_on_a_tombstone_a_reader_is_registered_at_the_empty_since_without_commit() -> None:
    shard = tombstone()
    outcome = shard(c.RegisterLeasedReader("r", 0, SECOND), commits=False)
    assert outcome == c.ReaderRegistered(EMPTY, shard.state.seqno)


# -- schemas and versions --------------------------------------------------------------------

KEY = Column("key", "binary", nullable=False)
NOTE = Column("note", "string", nullable=True)


def test_a_schema_is_registered_once_and_found_again(shard: Driver) -> None:
    assert shard(c.RegisterSchema((KEY,))) == c.SchemaRegistered(0)
    assert shard(c.RegisterSchema((KEY,))) == c.SchemaRegistered(0)
    assert shard(c.RegisterSchema((NOTE,)), commits=False).schema is None


def test_a_schema_evolves_only_by_nullable_columns(shard: Driver) -> None:
    shard(c.RegisterSchema((KEY,)))
    strict = replace(NOTE, nullable=False)
    assert shard(c.EvolveSchema(0, (KEY, strict)), commits=False).schema is None
    assert shard(c.EvolveSchema(0, (NOTE,)), commits=False).schema is None
    retyped = replace(KEY, type="string")
    assert shard(c.EvolveSchema(0, (retyped,)), commits=False).schema is None
    assert shard(c.EvolveSchema(0, (KEY, NOTE))) == c.SchemaRegistered(1)


def test_a_schema_evolves_from_the_newest_only(shard: Driver) -> None:
    assert shard(c.EvolveSchema(0, (KEY,)), commits=False).schema is None
    shard(c.RegisterSchema((KEY,)))
    shard(c.EvolveSchema(0, (KEY, NOTE)))
    other = Column("other", "int64", nullable=True)
    assert shard(c.EvolveSchema(0, (KEY, other)), commits=False).schema is None
    assert shard(c.EvolveSchema(0, (KEY, NOTE))) == c.SchemaRegistered(1)  # a retry


def test_the_version_of_the_machine_never_goes_back(shard: Driver) -> None:
    assert shard(c.UpgradeVersion(3)) == c.VersionUpgraded(3)
    assert shard(c.UpgradeVersion(2), commits=False) == c.VersionUpgraded(3)


def test_a_lease_lapses_only_after_its_last_instant() -> None:
    reader = LeasedReader(seqno=1, since=0, heartbeat_ns=5, lease_ns=10)
    assert not reader.lapsed(15)
    assert reader.lapsed(16)
