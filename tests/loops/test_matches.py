"""The rows that answer labels: the answer equals a pass over all rows."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.loops.matches import match
from tests.loops import raw

Row = tuple[bytes, int, int]
PASSED = 2

rows_of_keys = st.lists(st.tuples(raw, st.integers(0, 9), st.integers(0, 2)), max_size=40)
labels_of_keys = st.lists(st.tuples(raw, st.integers(0, 9)), max_size=40)


def column(keys: list[bytes]) -> tuple[int, array[int], bytes]:
    offsets = array("i", [7])
    for key in keys:
        offsets.append(offsets[-1] + len(key))
    return len(keys), offsets, b"\xaa" * 7 + b"".join(keys)


def matched(rows: list[Row], labels: list[tuple[bytes, int]]) -> list[tuple[int, int]]:
    distinct = sorted({key for key, _ in labels})
    keys = [key for key, _ in labels]
    starts = array("q", [keys.index(key) for key in distinct] + [len(labels)])
    times = array("q", [time for _, time, _ in rows])
    ops = array("B", [op for _, _, op in rows])
    asked = array("q", [time for _, time in labels])
    row_keys = column([key for key, _, _ in rows])
    found = match(row_keys, times, ops, PASSED, column(distinct), starts, asked)
    return list(zip(*found, strict=True))


@given(rows=rows_of_keys, labels=labels_of_keys)
def test_each_label_has_the_newest_row_of_its_key_at_its_time(
    rows: list[Row], labels: list[tuple[bytes, int]]
) -> None:
    rows = sorted(rows, key=lambda row: (row[0], -row[1], -row[2]))
    labels = sorted(labels, key=lambda label: (label[0], -label[1]))
    expected = []
    for at, (key, as_of) in enumerate(labels):
        for number, (row_key, time, op) in enumerate(rows):
            if row_key == key and time <= as_of and op != PASSED:
                expected.append((at, number))
                break
    assert matched(rows, labels) == expected


def test_long_runs_of_rows_and_of_labels_are_leapt_over() -> None:
    rows = [(b"%05d" % key, time, 1) for key in range(0, 3000, 3) for time in (9, 5, 1)]
    few = [(b"00003", 5), (b"01500", 4), (b"01501", 4), (b"02997", 1), (b"02997", 0)]
    assert matched(rows, few) == [(0, 4), (1, 1502), (3, 2999)]
    many = [(b"%05d" % key, 7) for key in range(3000)]
    assert matched(rows[1503:1506], many) == [(1503, 1)]
    one = [(b"k", time, 1) for time in range(5000, 0, -1)]
    assert matched(one, [(b"k", 4999), (b"k", 17), (b"k", 0)]) == [(0, 1), (1, 4983)]


@pytest.mark.parametrize(
    ("offsets", "times", "starts"),
    [
        ([0, 2], [1, 1], [0, 1]),  # one time too many
        ([0, 99], [1], [0, 1]),  # a key beyond the bytes
        ([0], [1], [0, 1]),  # the end of the key is missing
        ([2, 0], [1], [0, 1]),  # a key that ends before it begins
        ([0, 2], [1], [0, 9]),  # more labels than there are
        ([0, 2], [1], [1, 0]),
        ([0, 2], [1], [0]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    offsets: list[int], times: list[int], starts: list[int]
) -> None:
    keys = (1, array("i", offsets), b"ab")
    asked = (1, array("i", [0, 2]), b"ab")
    ops = bytes(len(times))
    with pytest.raises(ValueError, match=r"key|row|labels"):
        match(keys, array("q", times), ops, PASSED, asked, array("q", starts), array("q", [1]))
