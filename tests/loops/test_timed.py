"""Versions at a time for each key, and floors: the answers agree with the
history of each key, however many steps come before a seek."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.codec.keys import UNLIMITED, decode_suffix, escape, unescape
from kvstore.errors import CorruptionError
from kvstore.loops.lookup import find_floors, find_ordered, find_timed
from kvstore.mvcc.fragments import Fragments, RangeTombstone
from kvstore.mvcc.key_history import newest_at, timeline
from tests.harness.bounds import bounds
from tests.loops import stored_key
from tests.mvcc.test_scan import STAMPS, by_history, entries_of, keys, reads, stored
from tests.mvcc.test_scan import times as moments

UNBOUNDED = 1 << 62


class ListReader:
    """The contract of a reader over a list."""

    def __init__(self, entries: list[tuple[bytes, bytes]]) -> None:
        self._entries = entries
        self._keys = [key for key, _ in entries]
        self._at = 0
        self.seeks = self.steps = 0

    def seek(self, key: bytes) -> None:
        self._at = bisect_left(self._keys, key)
        self.seeks += 1

    def seek_for_prev(self, key: bytes) -> None:
        self._at = bisect_right(self._keys, key) - 1
        self.seeks += 1

    def next(self) -> None:
        self._at += 1
        self.steps += 1

    def prev(self) -> None:
        self._at -= 1
        self.steps += 1

    def key(self) -> bytes | None:
        return self._keys[self._at] if 0 <= self._at < len(self._keys) else None

    def value(self) -> bytes:
        return self._entries[self._at][1]


def quiet(reader: object) -> None:
    """The check of a reader that is sound."""


ranges = st.lists(
    st.tuples(keys, keys, moments).filter(lambda drawn: drawn[0] < drawn[1]), max_size=12
)


def fragments_of(deleted: Any) -> Fragments:
    """A deep tree, with tombstones over whole leaves."""
    with bounds(STRETCHES_MAX=2):
        return Fragments.of(RangeTombstone(*parts) for parts in deleted)


def revisions_of(drawn: Any, fragments: Fragments) -> dict[bytes, Any]:
    """The history of each key that has entries."""
    entries: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for key, value in entries_of(drawn):
        entries.setdefault(unescape(key[:-11]), []).append((key[-9:], value))
    return {key: timeline(tails, STAMPS, fragments.stack(key)) for key, tails in entries.items()}


def found_by(
    reader: ListReader,
    labels: list[tuple[bytes, int]],
    fragments: Fragments | None = None,
    stamps: Any = STAMPS,
    age_max: int = TIMESTAMP_MAX,
    steps: int = 8,
    bytes_max: int = UNBOUNDED,
) -> Any:
    times = array("q", [time for _, time in labels])
    limits, depth = (fragments or Fragments()).tree
    asked = [key for key, _ in labels]
    arguments = (asked, times, limits, depth, stamps, age_max, steps, bytes_max)
    return find_timed(reader, quiet, *arguments)


@given(
    stored,
    ranges,
    st.lists(st.tuples(keys, reads), max_size=12),
    st.lists(reads, max_size=4),
    st.sampled_from([0, 1, 2, 8, UNBOUNDED]),
    st.none() | st.integers(0, 5),
)
def test_a_label_has_the_version_that_its_history_says(
    drawn: Any, deleted: Any, asked: Any, often: Any, steps: int, age_max: int | None
) -> None:
    fragments = fragments_of(deleted)
    revisions = revisions_of(drawn, fragments)
    labels = [*asked, *((key, time) for key, _, _ in drawn for time in often)]
    oldest = TIMESTAMP_MAX if age_max is None else age_max
    found = found_by(ListReader(entries_of(drawn)), labels, fragments, age_max=oldest, steps=steps)
    expected = []
    for key, as_of in labels:
        newest = newest_at(revisions.get(key, ()), as_of)
        is_shown = newest is not None and newest[1] is not None and as_of - newest[0] <= oldest
        expected.append(newest if is_shown else (-1, None))
    values, times = found
    assert list(zip(times, values, strict=True)) == expected


def ordered_by(reader: Any, labels: Any, *arguments: Any) -> Any:
    """The values and the times that `find_ordered` finds for labels in order."""
    asked = sorted({key for key, _ in labels})
    groups = [[time for key, time in labels if key == each] for each in asked]
    starts = array("q", accumulate(map(len, groups), initial=0))
    times = array("q", [time for group in groups for time in group])
    offsets = array("i", accumulate(map(len, asked), initial=0))
    columns = (len(asked), offsets, b"".join(asked)), starts, times
    found = find_ordered(reader, quiet, *columns, *arguments)
    if found is None:
        return None
    ends, data, versions = found
    ends, versions = memoryview(ends).cast("B").cast("i"), memoryview(versions).cast("B").cast("q")
    values = [bytes(data[start:end]) for start, end in pairwise(ends)]
    return list(zip(versions, values, strict=True))


@given(
    stored,
    ranges,
    st.lists(st.tuples(keys, reads), max_size=12),
    st.lists(reads, max_size=4),
    st.sampled_from([0, 1, 8, UNBOUNDED]),
    st.none() | st.integers(0, 5),
    st.integers(0, 20) | st.just(UNBOUNDED),
)
def test_labels_in_order_get_the_same_as_columns(
    drawn: Any,
    deleted: Any,
    asked: Any,
    often: Any,
    steps: int,
    age_max: int | None,
    bytes_max: int,
) -> None:
    limits, depth = fragments_of(deleted).tree
    labels = [*asked, *((key, time) for key, _, _ in drawn for time in often)]
    labels.sort(key=lambda label: (label[0], -label[1]))
    oldest = TIMESTAMP_MAX if age_max is None else age_max
    arguments = (limits, depth, STAMPS, oldest, steps, bytes_max)
    found = ordered_by(ListReader(entries_of(drawn)), labels, *arguments)
    times = array("q", [time for _, time in labels])
    named = [key for key, _ in labels]
    listed = find_timed(ListReader(entries_of(drawn)), quiet, named, times, *arguments)
    assert (found is None) == (listed is None)
    if listed is not None:
        values, versions = listed
        assert found == [(at, value or b"") for at, value in zip(versions, values, strict=True)]


def test_a_reader_may_keep_the_places_that_it_is_sent_to() -> None:
    class Keeping(ListReader):
        def __init__(self, entries: list[tuple[bytes, bytes]]) -> None:
            super().__init__(entries)
            self.sought: list[bytes] = []

        def seek(self, key: bytes) -> None:
            self.sought.append(key)
            super().seek(key)

    reader = Keeping(many_versions(1, 50))
    labels = [(b"0000", time) for time in (40, 30, 20, 10)]
    ordered_by(reader, labels, ([], [UNLIMITED], []), 0, {}, TIMESTAMP_MAX, 0, UNBOUNDED)
    assert [decode_suffix(key[-8:]) for key in reader.sought] == [40, 30, 20, 10]


@pytest.mark.parametrize(
    ("offsets", "starts", "times"),
    [
        ([0, 2], [0, 1], 1),
        ([0, 1, 2], [0, 1], 1),
        ([-1, 1], [0, 1], 1),
        ([0, 1], [0, 2], 1),
        ([0, 1], [0, 1], 2),
        ([0, 1], [1, 1], 1),
        ([0, 1], [0, 1, 1], 1),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    offsets: list[int], starts: list[int], times: int
) -> None:
    columns = (1, array("i", offsets), b"a"), array("q", starts), array("q", [1] * times)
    with pytest.raises(ValueError, match="key"):
        find_ordered(ListReader([]), quiet, *columns, ([], [UNLIMITED], []), 0, {}, 9, 8, UNBOUNDED)


def many_versions(keys: int, versions: int) -> list[tuple[bytes, bytes]]:
    drawn = [(b"%04d" % key, time) for key in range(keys) for time in range(1, versions + 1)]
    return sorted((stored_key(key, time), b"%d" % time) for key, time in drawn)


def test_labels_of_one_version_take_one_seek() -> None:
    reader = ListReader(many_versions(1, 50))
    labels = [(b"0000", 70)] * 100 + [(b"0000", time) for time in range(50, 99)]
    values, times = found_by(reader, labels, stamps={})
    assert set(values) == {b"50"}
    assert set(times) == {50}
    assert (reader.seeks, reader.steps) == (1, 0)


def test_dense_labels_are_merged_in_one_pass() -> None:
    entries = many_versions(20, 10)
    reader = ListReader(entries)
    labels = [(b"%04d" % key, time) for key in range(20) for time in range(1, 11)]
    values, _ = found_by(reader, labels, stamps={})
    assert values == [b"%d" % time for _, time in labels]
    assert (reader.seeks, reader.steps) == (1, len(entries) - 1)


def test_sparse_labels_take_few_steps_in_vain() -> None:
    reader = ListReader(many_versions(100, 100))
    labels = [(b"%04d" % key, 50) for key in range(100)]
    found_by(reader, labels, stamps={})
    assert reader.seeks >= 99
    assert reader.steps <= 100


def test_a_walk_goes_over_to_steps_where_labels_become_dense() -> None:
    reader = ListReader(many_versions(400, 20))
    sparse = [(b"%04d" % key, 10) for key in range(200)]
    dense = [(b"%04d" % key, time) for key in range(200, 400) for time in range(1, 21)]
    found_by(reader, sparse + dense, stamps={})
    assert reader.seeks <= 200 + 16


def test_values_beyond_the_bound_are_given_up() -> None:
    entries = [(stored_key(key), b"v" * 100) for key in (b"a", b"b")]
    for labels, bytes_max, is_given in [
        ([(b"a", 9), (b"b", 9)], 200, True),
        ([(b"a", 9), (b"b", 9)], 199, False),
        ([(b"a", 9), (b"a", 9), (b"a", 8)], 299, False),
        ([(b"a", 9)], 1, True),
    ]:
        found = found_by(ListReader(entries), labels, bytes_max=bytes_max)
        assert (found is not None) == is_given


def test_a_time_for_each_key_is_asked_of_the_caller() -> None:
    tree = ([], [UNLIMITED], [])
    for times in (array("q", [1]), array("q", [1, 2, 3])):
        with pytest.raises(ValueError, match="one time"):
            find_timed(ListReader([]), quiet, [b"a", b"b"], times, tree, 0, {}, 9, 8, UNBOUNDED)
    with pytest.raises(ValueError, match="one time"):
        find_floors(ListReader([]), quiet, [b"a", b"b"], [1], b"", tree, 0, {}, 8, UNBOUNDED)


def test_a_damaged_reader_is_checked() -> None:
    def check(reader: object) -> None:
        raise CorruptionError("there", "a damaged block")

    tree = ([], [UNLIMITED], [])
    times = array("q", [1])
    with pytest.raises(CorruptionError, match="damaged"):
        find_timed(ListReader([]), check, [b"a"], times, tree, 0, {}, TIMESTAMP_MAX, 8, UNBOUNDED)
    with pytest.raises(CorruptionError, match="damaged"):
        find_floors(ListReader([]), check, [b"a"], [1], b"", tree, 0, {}, 8, UNBOUNDED)


@pytest.mark.parametrize("tail", [b"\x02", b"\x00\x01"])
def test_an_entry_that_data_cannot_have_is_damage(tail: bytes) -> None:
    reader = ListReader([(stored_key(b"a")[:-1] + tail, b"")])
    with pytest.raises(CorruptionError):
        found_by(reader, [(b"a", 9)], stamps={})
    with pytest.raises(CorruptionError):
        find_floors(reader, quiet, [b"z"], [9], b"", ([], [UNLIMITED], []), 0, {}, 8, UNBOUNDED)


# -- floors -----------------------------------------------------------------------------------


@given(
    stored,
    ranges,
    st.lists(st.tuples(keys, reads), max_size=12),
    keys,
    st.sampled_from([0, 1, 2, 8, UNBOUNDED]),
)
def test_a_floor_is_the_greatest_key_of_the_state_at_its_time(
    drawn: Any, deleted: Any, asked: Any, least: bytes, steps: int
) -> None:
    fragments = fragments_of(deleted)
    states = [sorted(by_history(drawn, fragments, time)) for time in range(15)]
    places = [escape(key) + UNLIMITED for key, _ in asked]
    times = [time for _, time in asked]
    limits, depth = fragments.tree
    found = find_floors(
        ListReader(entries_of(drawn)),
        quiet,
        places,
        times,
        escape(least),
        limits,
        depth,
        STAMPS,
        steps,
        UNBOUNDED,
    )
    for (key, time), row in zip(asked, found, strict=True):
        below = [tuple(each) for each in states[time] if least <= each[0] <= key]
        assert row == (below[-1] if below else None)


def test_a_floor_among_many_versions_takes_few_moves() -> None:
    reader = ListReader(many_versions(3, 1000))
    tree = ([], [UNLIMITED], [])
    places = [escape(b"0001") + UNLIMITED]
    found = find_floors(reader, quiet, places, [500], b"", tree, 0, {}, 8, UNBOUNDED)
    assert found == [(b"0001", b"500")]
    assert reader.seeks + reader.steps < 20


@pytest.mark.parametrize(
    ("count", "bytes_max", "is_given"), [(3, 21, True), (3, 20, False), (1, 0, True)]
)
def test_floors_of_several_places_are_given_up_beyond_their_bytes(
    count: int, bytes_max: int, is_given: bool
) -> None:
    """A row here has a key of four bytes and a value of three."""
    reader = ListReader(many_versions(3, 500))
    tree = ([], [UNLIMITED], [])
    places = [escape(b"%04d" % key) + UNLIMITED for key in range(count)]
    times = [400] * count
    found = find_floors(reader, quiet, places, times, b"", tree, 0, {}, 8, bytes_max)
    assert found == ([(b"%04d" % key, b"400") for key in range(count)] if is_given else None)
