"""The handle: which calls are tried again, by class of error."""

from __future__ import annotations

from operator import methodcaller

import pytest

from kvstore.backup.shard.rows.batch_writer import BatchDesc
from kvstore.backup.shard.state.trace import ShardBatch
from kvstore.errors import (
    IndeterminateError,
    UpperMismatchError,
    UsageError,
)
from tests.shard.rows import put, versions
from tests.shard.world import World, batch_of, read, write


def test_a_determinate_failure_is_tried_again(world: World) -> None:
    shard = world.open()
    world.consensus.script = ["refused", "refused"]
    assert shard.writer().compare_and_append(batch_of(shard, 5)).upper == 5
    assert [b.upper for b in shard.state.batches] == [5]


@pytest.mark.parametrize("fault", ["lost", "unsent"])
def test_after_an_unknown_outcome_an_append_is_done_once(world: World, fault: str) -> None:
    shard = world.open()
    world.consensus.script = [fault]
    assert shard.writer().compare_and_append(batch_of(shard, 5)).upper == 5
    assert len(world.open().state.batches) == 1


def test_a_retry_that_finds_its_append_reports_the_current_upper(world: World) -> None:
    shard, other = world.open(), world.open()
    world.consensus.script = ["lost"]
    world.consensus.between = lambda: write(other, 9)
    assert shard.writer().compare_and_append(batch_of(shard, 5)).upper == 9


def test_after_an_unknown_outcome_another_writers_batch_is_a_sure_mismatch(world: World) -> None:
    shard, other = world.open(), world.open()
    batch = batch_of(shard, 5)
    world.consensus.script = ["unsent"]
    world.consensus.between = lambda: write(other, 9)
    with pytest.raises(UpperMismatchError) as error:
        shard.writer().compare_and_append(batch)
    assert (error.value.expected, error.value.upper, error.value.writer_upper) == (0, 9, None)


def test_where_a_newer_append_hides_the_token_the_outcome_stays_unknown(world: World) -> None:
    shard, twin = world.open(), world.open()
    batch = batch_of(shard, 5)

    def same_writer_goes_on() -> None:
        twin.refresh()
        twin.writer("w").compare_and_append(batch_of(twin, 9), token="newer")

    world.consensus.script = ["lost"]
    world.consensus.between = same_writer_goes_on
    with pytest.raises(IndeterminateError):
        shard.writer("w").compare_and_append(batch, token="older")


def test_a_token_used_twice_without_an_unknown_outcome_is_a_callers_mistake(world: World) -> None:
    shard = world.open()
    writer = shard.writer("w")
    batch = batch_of(shard, 5)
    writer.compare_and_append(batch, token="t")
    with pytest.raises(UsageError, match="token"):
        writer.compare_and_append(batch, token="t")


def test_after_a_crash_the_same_token_is_answered_by_what_was_done(world: World) -> None:
    shard = world.open()
    shard.writer("w").compare_and_append(batch_of(shard, 5), token="t")
    again = world.open()
    rows = versions([put(b"k", 4)])
    batch = again.write_batch(BatchDesc(0, 5), rows)
    assert again.writer("w").compare_and_append(batch, token="t", retrying=True).upper == 5
    assert len(world.open().state.batches) == 1


def test_a_merge_whose_reply_was_lost_keeps_its_parts(world: World) -> None:
    shard = world.open()
    write(shard, 5, 9)
    assert shard.log.apply(methodcaller("request_merge", 0, 9)).outcome == (0, 9)
    world.consensus.script = ["lost"]
    (outcome,) = shard.compact()
    assert outcome.applied
    assert shard.scrub().is_sound
    assert read(shard, 8) == {b"k": b"v9"}


def test_expected_upper_must_be_where_the_batch_begins(world: World) -> None:
    shard = world.open()
    with pytest.raises(UsageError):
        shard.writer().compare_and_append(batch_of(shard, 5), expected_upper=3)


@pytest.mark.parametrize("lower", [3, 5])
def test_bounds_that_make_no_sense_are_a_callers_mistake(world: World, lower: int) -> None:
    shard = world.open()
    rows = batch_of(shard, 3)
    with pytest.raises(UsageError):
        shard.writer().compare_and_append(ShardBatch(lower, 3, parts=rows.parts))
