"""Records of task changes: golden bytes, and compatibility both ways."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptionError, FormatVersionError, KVStoreError
from kvstore.storage.journal import Record
from kvstore.tasks import Task, TaskState, decode, encode

TASK = Task(
    id="t1",
    version=2,
    queue="q",
    available_at=3,
    attempt=4,
    claimant="me",
    value=b"value",
    progress=b"half",
    error="none",
    created_at=5,
    changed_at=6,
)
GOLDEN_V1 = bytes.fromhex(
    "01 0900000000000000"  # format, recorded at
    "01 4e000000"  # a task of 78 bytes
    "0200000000000000 0300000000000000 0500000000000000 0600000000000000 04000000"
    "02000000 7431  01000000 71  02000000 6d65"  # id, queue, claimant
    "04000000 6e6f6e65  04000000 68616c66  05000000 76616c7565"  # error, progress, value
    "02 02000000 7430"  # t0 was deleted
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
U64 = st.integers(0, 2**63 - 1)


def test_version_1_is_written_and_read_byte_for_byte() -> None:
    assert encode(9, [TASK], ["t0"]) == GOLDEN_V1
    assert decode(GOLDEN_V1) == (9, [TASK, "t0"])


@given(
    U64,
    st.lists(
        st.builds(
            Task, TEXT, U64, TEXT, U64, st.integers(0, 2**31 - 1), TEXT, st.binary(), st.binary(),
            TEXT, U64, U64,
        ),
        max_size=3,
    ),
    st.lists(TEXT, max_size=3),
)  # fmt: skip
def test_any_change_is_read_back(at: int, tasks: list[Task], deleted: list[str]) -> None:
    assert decode(encode(at, tasks, deleted)) == (at, [*tasks, *deleted])


def body_of(task: Task) -> bytes:
    return encode(0, [task])[9 + 5 :]


def record_of(tag: int, body: bytes) -> bytes:
    return struct.pack("<BQBI", 1, 0, tag, len(body)) + body


def test_a_task_of_a_later_release_is_read_without_what_it_added() -> None:
    later = record_of(1, body_of(TASK) + b"\x03\0\0\0new")
    assert decode(later) == (0, [TASK])


def test_a_task_of_an_earlier_release_gets_defaults_for_what_it_lacked() -> None:
    earlier = body_of(TASK)[: -(4 + 5) - (4 + 4)]  # a record of a format without progress and value
    (task,) = decode(record_of(1, earlier))[1]
    assert isinstance(task, Task)
    assert (task.id, task.error, task.progress, task.value) == ("t1", "none", b"", b"")


def test_optional_entries_of_a_later_release_are_passed_over_others_refused() -> None:
    assert decode(GOLDEN_V1 + bytes((128, 1, 0, 0, 0, 7)))[1] == [TASK, "t0"]
    with pytest.raises(FormatVersionError):
        decode(GOLDEN_V1 + bytes((3, 1, 0, 0, 0, 7)))
    with pytest.raises(FormatVersionError):
        decode(b"\x02" + GOLDEN_V1[1:])


@given(st.binary(max_size=80) | st.integers(0, len(GOLDEN_V1)).map(lambda n: GOLDEN_V1[:n]))
def test_broken_records_are_refused_or_read_and_nothing_else(payload: bytes) -> None:
    try:
        decode(payload)
    except KVStoreError as error:
        assert isinstance(error, CorruptionError | FormatVersionError)  # noqa: PT017


def test_replay_checks_no_rule_of_today() -> None:
    """An old journal may hold a change that `modify` would now refuse. It is applied as
    recorded."""
    state = TaskState()
    odd = [
        Task(id="", version=0, queue="", available_at=0),
        Task(id="x", version=9, queue="q", available_at=5),
        Task(id="x", version=3, queue="r", available_at=4),
    ]
    state.apply(Record(1, 0, encode(7, odd, ["never there"]), 1))
    state.assert_invariants()
    assert state.tasks["x"].version == 3
    assert state.recorded_at == 7
