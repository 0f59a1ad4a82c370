"""The machine's rules of merging."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore.backup.shard.state.state import MergeOutcome
from kvstore.backup.shard.state.trace import ShardBatch, input_names
from kvstore.limits import MERGE_FAN_IN
from tests.shard.driver import Command, Driver, do, downgrade, part, register


def merged(shard: Driver, lower: int, upper: int, **changes: Any) -> Command:
    found = [b for b in shard.state.batches if lower <= b.lower and b.upper <= upper]
    rows = sum(b.rows for b in found)
    output = ShardBatch(lower, upper, parts=(part(f"m{lower}-{upper}", rows=rows),))
    return do("apply_merge", replace(output, **changes), input_names(tuple(found)))


def apply(shard: Driver, command: Command) -> None:
    """Apply a command, which may change nothing."""
    state, _ = command(shard.state)
    shard(command, commits=state is not shard.state)


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
    assert shard(merged(shard, 0, 4)) is MergeOutcome.APPLIED_EXACT
    assert [b.names() for b in shard.state.batches] == [{"m0-4"}]
    assert shard.state.slots == ()


def test_a_merge_inside_a_slot_is_a_subset_and_the_slot_stays(shard: Driver) -> None:
    filled(shard, 4)
    assert shard(merged(shard, 1, 3)) is MergeOutcome.APPLIED_SUBSET
    assert [(b.lower, b.upper) for b in shard.state.batches] == [(0, 1), (1, 3), (3, 4)]
    assert shard.state.slots == ((0, 4),)


def test_the_same_output_again_is_known_as_applied(shard: Driver) -> None:
    filled(shard, 4)
    command = merged(shard, 0, 4)
    shard(command)
    assert shard(command, commits=False) is MergeOutcome.ALREADY_APPLIED


def test_a_merge_of_batches_that_are_no_longer_there_is_no_match(shard: Driver) -> None:
    filled(shard, 4)
    late = merged(shard, 0, 4)
    shard(merged(shard, 0, 4, parts=(part("faster"),)))
    assert shard(late, commits=False) is MergeOutcome.NO_MATCH


def test_a_merge_whose_bounds_are_no_edges_or_in_no_slot_is_no_match(shard: Driver) -> None:
    shard.write(0, 5, "p")
    shard.write(5, 9, "q")
    assert shard(merged(shard, 0, 9), commits=False) is MergeOutcome.NO_MATCH
    shard(do("request_merge", 0, 9))
    cut = do("apply_merge", ShardBatch(0, 7), input_names(shard.state.batches))
    assert shard(cut, commits=False) is MergeOutcome.NO_MATCH


def test_a_merge_may_not_compact_beyond_the_shards_since(shard: Driver) -> None:
    filled(shard, 4)
    outcome = shard(merged(shard, 0, 4, since=1), commits=False)
    assert outcome is MergeOutcome.INVALID_SINCE
    register(shard, "r")
    shard(downgrade("r", 1))
    assert shard(merged(shard, 0, 4, since=1)).applied


def test_a_merge_never_has_more_rows_than_it_replaces(shard: Driver) -> None:
    filled(shard, 4)
    too_many = (part("m", rows=41),)
    outcome = shard(merged(shard, 0, 4, parts=too_many), commits=False)
    assert outcome is MergeOutcome.TOO_MANY_UPDATES


def test_a_pending_slot_counts_as_one_batch_and_is_swallowed_by_a_larger_one() -> None:
    shard = filled(Driver(), 4)
    assert shard.state.slots == ((0, 4),)
    for i in range(4, 8):
        shard.write(i, i + 1, f"p{i}")
    # Four new batches make a run with the slot, because the slot is not larger than all four.
    assert shard.state.slots in (((0, 8),), ((0, 4), (4, 8)))
    assert shard(merged(shard, 0, 4)).applied


def test_a_merge_on_request_makes_a_slot_only_where_there_is_something_to_gain(
    shard: Driver,
) -> None:
    shard.write(0, 5, "p")
    assert shard(do("request_merge", 0, 5), commits=False) is None
    assert shard(do("request_merge", 1, 5), commits=False) is None
    register(shard, "r")
    shard(downgrade("r", 2))
    assert shard(do("request_merge", 0, 5)) == (0, 5)  # since has moved on
    assert shard(do("request_merge", 0, 5), commits=False) == (0, 5)


def test_progress_does_not_lengthen_a_batch_that_a_merge_is_reading(shard: Driver) -> None:
    for i in range(3):
        shard.write(i, i + 1, f"p{i}")
    shard.write(3, 4)
    shard(do("request_merge", 0, 4))
    shard.write(4, 5)
    assert shard(merged(shard, 0, 4)).applied


def test_a_kept_instant_that_is_given_up_asks_for_a_merge_of_everything(shard: Driver) -> None:
    filled(shard, 4)
    shard(merged(shard, 0, 4))
    shard(do("label_instant", "first", 1))
    register(shard, "r")
    shard(downgrade("r", 3))
    shard(do("request_merge", 0, 4))
    shard(merged(shard, 0, 4, since=3))
    shard(do("drop_label", "first"))  # a policy may still choose the instant
    assert (dict(shard.state.kept), shard.state.slots) == ({1: ()}, ())
    shard(do("keep_instants", (1,)), commits=False)
    assert shard(do("request_merge", 0, 4), commits=False) is None
    shard(do("keep_instants", ()))
    assert (dict(shard.state.kept), shard.state.slots) == ({}, ((0, 4),))
    shard(do("keep_instants", ()), commits=False)
    output = merged(shard, 0, 4, since=3, parts=(part("without"),))
    assert shard(output) is MergeOutcome.APPLIED_EXACT
    assert shard.state.slots == ()


def test_an_instant_that_since_has_not_passed_is_given_up_without_a_merge(shard: Driver) -> None:
    filled(shard, 2)
    shard(do("label_instant", "first", 1))
    register(shard, "r")
    shard(downgrade("r", 1))
    shard(do("drop_label", "first"))
    shard(do("keep_instants", ()))
    assert (dict(shard.state.kept), shard.state.slots) == ({}, ())


ACTS = st.sampled_from(["write", "label", "drop", "keep", "since", "merge"])


@given(st.lists(st.tuples(ACTS, st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_whatever_is_kept_and_given_up_in_turn_the_space_has_one_slot(
    acts: list[tuple[str, int, int]],
) -> None:
    shard = filled(Driver(), 2)
    register(shard, "r")
    upper = 2
    for number, (act, one, other) in enumerate(acts):
        before = shard.state
        if act == "write":
            shard.write(upper, upper + 1, f"p{upper}")
            upper += 1
        elif act == "label":
            apply(shard, do("label_instant", f"l{one}", other))
        elif act == "drop":
            apply(shard, do("drop_label", f"l{one}"))
        elif act == "since":
            apply(shard, downgrade("r", min(before.since + one, upper - 1)))
        elif act == "merge":
            for slot in before.slots:
                shard(merged(shard, *slot, since=before.since, parts=(part(f"m{slot}{number}"),)))
            assert shard.state.slots == ()
        else:
            apply(shard, do("keep_instants", (one, other)))
            given_up = before.kept.keys() - shard.state.kept.keys()
            if any(time < before.since for time in given_up):
                assert shard.state.slots == ((0, upper),)
            else:
                assert shard.state.slots == before.slots
