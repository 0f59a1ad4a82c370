"""The machine's rules of appending: no storage, no clock, no data."""

from __future__ import annotations

from dataclasses import replace

from backup.shard.state import commands as c
from backup.shard.state import machine
from backup.shard.state.state import EMPTY, ShardBatch
from kvstore.limits import INLINE_BYTES_MAX
from tests.shard.driver import SECOND, Driver, batch, caa, part


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
    rows = ShardBatch(0, 0, parts=(part("p"),))
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
    assert shard(c.CompareAndAppend(ShardBatch(5, 5), "w", "beat", 7 * SECOND)) == c.Appended(5)
    assert shard.state.writers["w"].heartbeat_ns == 7 * SECOND
    assert shard.state.batches == (ShardBatch(0, 5),)


def test_progress_after_progress_lengthens_one_empty_batch(shard: Driver) -> None:
    shard.write(0, 5)
    shard.write(5, 9)
    assert shard.state.batches == (ShardBatch(0, 9),)
    shard(c.CompareAndAppend(ShardBatch(9, 12, meta=(("kind", "x"),)), "w", "m", 0))
    assert len(shard.state.batches) == 2  # a batch with the caller's own fields stays apart


def test_inline_bytes_over_the_budget_push_back(shard: Driver) -> None:
    inline = replace(part("i"), inline=bytes(INLINE_BYTES_MAX), size=INLINE_BYTES_MAX)
    shard(c.CompareAndAppend(ShardBatch(0, 5, parts=(inline,)), "w", "1", 0))
    more = replace(part("j"), inline=b"x", size=1)
    outcome = shard(c.CompareAndAppend(ShardBatch(5, 9, parts=(more,)), "w", "2", 0), commits=False)
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
    assert shard(c.Append(ShardBatch(0, 10, parts=(early, across, late)))) == c.Appended(10)
    last = shard.state.batches[-1]
    assert (last.lower, last.upper) == (5, 10)
    assert [(p.name, p.drop_below) for p in last.parts] == [("across", 5), ("late", 0)]


def test_replica_append_above_the_upper_would_leave_a_gap(shard: Driver) -> None:
    shard.write(0, 5, "p")
    assert shard(c.Append(batch(6, 9, "q")), commits=False) == c.UpperMismatch(5, None)


def test_replica_append_checks_its_bounds(shard: Driver) -> None:
    assert isinstance(shard(c.Append(ShardBatch(3, 2)), commits=False), c.InvalidBounds)
    rows = ShardBatch(0, 0, parts=(part("p"),))
    assert isinstance(shard(c.Append(rows), commits=False), c.InvalidEmptyInterval)
