"""The bytes of states and steps: round trips, golden files, and refusals.

Run this file as a program to write the golden files of a new format.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.backup.shard.state import codec
from kvstore.backup.shard.state.state import (
    EMPTY,
    STATE_VERSION,
    CriticalHold,
    LastAppend,
    LeasedReader,
    ShardState,
)
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.base.digest import digest
from kvstore.base.timestamp import Timestamp
from kvstore.errors import CorruptionError, FormatVersionError
from tests.shard.driver import append, do

GOLDEN = Path(__file__).parent / "golden"

PART = ShardPart(
    name="orders/part/00000001700000000000-0123456789abcdef.parquet",
    rows=3,
    size=1234,
    checksum="00112233445566778899aabbccddeeff",
    key_min=b"a\x00\xff",
    key_max=None,
    time_min=5,
    time_max=8,
    run=1,
    ranges=2,
)
SMALL = ShardPart("orders/part/2-1.parquet", 1, 4, "ff", b"", b"z", 9, 9)

FIRST = ShardState(
    "orders",
    "versions",
    seqno=1,
    rollups={1: "orders/rollup/v1-a"},
    step_digest="blake3:00112233445566778899aabbccddeeff",
)
FULL = ShardState(
    shard="orders",
    rule="versions",
    seqno=77,
    walltime_ns=1_700_000_000_000_000_000,
    hostname="host-1",
    last_gc=64,
    since=4,
    upper=EMPTY,
    batches=(
        ShardBatch(0, 5, 4),
        ShardBatch(5, 9, 0, (PART,), (("kind", "full"), ("note", "é"))),
        ShardBatch(9, EMPTY, 0, (SMALL,)),
    ),
    slots=((0, 9),),
    rollups={1: "orders/rollup/v1-a", 64: "orders/rollup/v64-b"},
    leased={"r-1": LeasedReader(70, 4, 1_700_000_000, 900)},
    critical={"backup": CriticalHold(4, b"\x00owner-1")},
    writers={"w-1": LastAppend("token", 9, 1_700_000_001)},
    kept={3: ("release",)},
    step_digest="blake3:ffeeddccbbaa99887766554433221100",
)


def test_a_state_and_its_bytes_are_golden() -> None:
    golden = (GOLDEN / "rollup-v1.bin").read_bytes()
    assert codec.encode_state(FULL) == golden
    found = codec.decode_state(golden, where="golden")
    assert (found, found.step_digest) == (FULL, FULL.step_digest)


def test_a_step_and_its_bytes_are_golden() -> None:
    golden = (GOLDEN / "diff-v1.bin").read_bytes()
    assert codec.encode_diff(FIRST, FULL) == golden
    diff = codec.decode_diff(golden, where="golden")
    assert diff.rollup == (64, "orders/rollup/v64-b")
    assert codec.apply_diffs(FIRST, [diff], where="golden") == FULL


def test_a_state_of_this_process_may_hold_times_of_a_class_of_their_own() -> None:
    state = replace(FIRST, since=Timestamp(5), upper=Timestamp(0))
    after = replace(state, seqno=state.seqno + 1)
    step = codec.decode_diff(codec.encode_diff(state, after), where="step")
    assert codec.apply_diffs(state, [step], where="step") == after


def test_the_first_step_starts_from_nothing() -> None:
    diff = codec.decode_diff(codec.encode_diff(None, FIRST), where="first")
    assert (diff.previous, diff.seqno, diff.rollup) == (0, 1, (1, "orders/rollup/v1-a"))


writers = st.sampled_from(["w1", "w2"])
readers = st.sampled_from("ab")
commands = st.one_of(
    st.builds(lambda n, w: ("append", n, w), st.integers(0, 5), writers),
    st.builds(partial(do, "register_leased", lease_ns=100), readers, now_ns=st.integers(0, 9)),
    st.builds(
        partial(do, "downgrade_since", outstanding=None),
        readers,
        st.integers(0, 30),
        now_ns=st.integers(0, 9),
    ),
    st.builds(partial(do, "expire_leased"), readers),
    st.builds(partial(do, "register_critical"), st.just("h")),
    st.builds(partial(do, "expire_idle_writers"), st.integers(0, 1 << 60)),
    st.builds(partial(do, "request_merge"), st.just(0), st.integers(1, 30)),
    st.builds(partial(do, "add_rollup"), st.just(1), st.sampled_from(["orders/x", "orders/y"])),
)


@settings(deadline=None, max_examples=80)
@given(st.lists(commands, max_size=30))
def test_the_steps_of_any_history_lead_to_its_states(history: list[Any]) -> None:
    before = replayed = FIRST
    for number, wanted in enumerate(history):
        if isinstance(wanted, tuple):
            _, length, writer = wanted
            part = replace(PART, name=f"orders/p{number}")
            batch = ShardBatch(before.upper, before.upper + length, parts=(part,) if length else ())
            wanted = append(batch, writer=writer, token=f"t{number}", now_ns=5)
        after, _ = wanted(before)
        if after is before:
            continue
        assert after.problem() is None
        data = codec.encode_diff(before, after)
        after = replace(after, step_digest=digest(data))
        replayed = codec.apply_diffs(
            replayed, [codec.decode_diff(data, where="step")], where="step"
        )
        assert (replayed, replayed.step_digest) == (after, after.step_digest)
        assert codec.decode_state(codec.encode_state(after), where="state") == after
        before = after


def test_a_newer_format_is_refused_by_name() -> None:
    data = bytearray(codec.encode_state(FULL))
    data[5] = 9
    with pytest.raises(FormatVersionError, match="blob x"):
        codec.decode_state(bytes(data), where="blob x")


def test_a_state_of_a_newer_machine_is_refused() -> None:
    newer = replace(FULL, version=STATE_VERSION + 1)
    with pytest.raises(FormatVersionError):
        codec.decode_state(codec.encode_state(newer), where="x")


def test_every_flipped_byte_and_every_cut_is_noticed() -> None:
    data = codec.encode_state(FULL)
    for at in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 0x40
        with pytest.raises((CorruptionError, FormatVersionError)):
            codec.decode_state(bytes(flipped), where="x")
    for size in (0, 5, 9, 10, len(data) - 1):
        with pytest.raises(CorruptionError):
            codec.decode_state(data[:size], where="x")


def test_a_rollup_is_no_step_and_a_step_no_rollup() -> None:
    with pytest.raises(CorruptionError):
        codec.decode_diff(codec.encode_state(FULL), where="x")
    with pytest.raises(CorruptionError):
        codec.decode_state(codec.encode_diff(FIRST, FULL), where="x")


def test_a_step_from_another_version_does_not_fit() -> None:
    diff = codec.decode_diff(codec.encode_diff(FIRST, FULL), where="x")
    with pytest.raises(CorruptionError, match="starts at v1"):
        codec.apply_diffs(replace(FIRST, seqno=2), [diff], where="x")


def test_a_step_of_another_history_and_a_step_without_a_link_do_not_follow() -> None:
    data = codec.encode_diff(replace(FIRST, step_digest=FULL.step_digest), FULL)
    with pytest.raises(CorruptionError, match="does not follow"):
        codec.apply_diffs(FIRST, [codec.decode_diff(data, where="x")], where="x")
    body = json.loads(data[codec.ENVELOPE.size :])
    del body["link"]
    changed = json.dumps(body).encode()
    head = codec.ENVELOPE.pack(codec.DIFF, codec.FORMAT_VERSION, zlib.crc32(changed))
    with pytest.raises(CorruptionError):
        codec.decode_diff(head + changed, where="x")


if __name__ == "__main__":
    (GOLDEN / "rollup-v1.bin").write_bytes(codec.encode_state(FULL))
    (GOLDEN / "diff-v1.bin").write_bytes(codec.encode_diff(FIRST, FULL))
