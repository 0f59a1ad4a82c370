"""The machine's rules of appending: no storage, no clock, no data."""

from __future__ import annotations

import pytest

from kvstore.backup.shard.state.state import EMPTY, AlreadyCommitted, Appended, UpperMismatch
from kvstore.backup.shard.state.trace import ShardBatch
from kvstore.errors import UsageError
from tests.shard.driver import SECOND, Driver, append, batch, caa, do, part


def test_append_at_the_upper_pushes_the_batch_and_remembers_the_token(shard: Driver) -> None:
    assert shard(caa(0, 5, "p", token="t1")) == Appended(5)
    assert shard.state.upper == 5
    assert shard.state.batches == (batch(0, 5, "p"),)
    assert (shard.state.writers["w"].token, shard.state.writers["w"].upper) == ("t1", 5)
    assert shard.state.writers["w"].heartbeat_ns == SECOND


def test_append_elsewhere_reports_the_uppers_of_shard_and_writer(shard: Driver) -> None:
    shard.write(0, 5, "p")
    assert shard(caa(0, 9), commits=False) == UpperMismatch(5, 5)
    assert shard(caa(7, 9, writer="other"), commits=False) == UpperMismatch(5, None)


def test_append_with_upper_below_lower_is_invalid_bounds(shard: Driver) -> None:
    with pytest.raises(UsageError, match="from 5 back to 3"):
        shard(caa(5, 3))


def test_append_of_rows_without_time_is_invalid(shard: Driver) -> None:
    rows = ShardBatch(0, 0, parts=(part("p"),))
    command = append(rows)
    with pytest.raises(UsageError, match="needs time: both bounds are 0"):
        shard(command)


def test_bounds_are_checked_before_the_token_and_the_token_before_the_upper(shard: Driver) -> None:
    shard.write(0, 5, "p", token="t")
    shard.write(5, 9, "q", token="t2")
    with pytest.raises(UsageError):
        shard(caa(5, 3, token="t2"))
    assert shard(caa(5, 9, "q", token="t2"), commits=False) == AlreadyCommitted(9)
    # Only the last token is remembered: an older one is answered by the upper.
    assert shard(caa(0, 5, "p", token="t"), commits=False) == UpperMismatch(9, 9)


def test_a_repeated_token_reports_the_current_upper_not_the_batchs(shard: Driver) -> None:
    shard.write(0, 5, "p", token="mine")
    shard(caa(5, 9, "q", token="theirs", writer="other"))
    assert shard(caa(0, 5, "p", token="mine"), commits=False) == AlreadyCommitted(9)


def test_tokens_belong_to_their_writer(shard: Driver) -> None:
    shard.write(0, 5, "p", token="t")
    assert shard(caa(5, 6, token="t", writer="other")) == Appended(6)


def test_an_empty_batch_is_progress_and_an_empty_interval_a_heartbeat(shard: Driver) -> None:
    assert shard(caa(0, 5)) == Appended(5)
    assert shard(append(ShardBatch(5, 5), token="beat", now_ns=7 * SECOND)) == Appended(5)
    assert shard.state.writers["w"].heartbeat_ns == 7 * SECOND
    assert shard.state.batches == (ShardBatch(0, 5),)


def test_progress_after_progress_lengthens_one_empty_batch(shard: Driver) -> None:
    shard.write(0, 5)
    shard.write(5, 9)
    assert shard.state.batches == (ShardBatch(0, 9),)
    shard(
        do(
            "compare_and_append",
            ShardBatch(9, 12, meta=(("kind", "x"),)),
            writer="w",
            token="m",
            now_ns=0,
        )
    )
    assert len(shard.state.batches) == 2  # a batch with the caller's own fields stays apart


def test_upper_becomes_empty_and_nothing_can_be_written_after(shard: Driver) -> None:
    shard.write(0, EMPTY, "p")
    assert shard(caa(5, 9), commits=False) == UpperMismatch(EMPTY, EMPTY)
    assert shard.state.snapshot((1 << 63) - 1) == shard.state.batches


def test_idle_writers_without_a_name_of_their_own_are_forgotten(shard: Driver) -> None:
    old, new = "w-00000000000000aa", "w-00000000000000bb"
    for number, (writer, now_ns) in enumerate([("mine", 1), (old, 2), (new, 9)]):
        shard(
            do(
                "compare_and_append",
                batch(number, number + 1, f"p{number}"),
                writer=writer,
                token="t",
                now_ns=now_ns,
            )
        )
    assert shard(do("expire_idle_writers", 2), commits=False) == 0
    assert shard(do("expire_idle_writers", 9)) == 1
    assert set(shard.state.writers) == {"mine", new}
