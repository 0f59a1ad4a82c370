"""The rule for garbage, against the definition: no reader at or above `since` may notice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec.keys import TOMBSTONE, VALUE, encode_reference, encode_suffix
from kvstore.mvcc.key_history import Lifetime, StoredEntry, newest_at, timeline
from kvstore.retention.gc import Revived, garbage, revived

TIMES = st.integers(1, 12)


def timed(timestamp: int, value: bytes | None) -> StoredEntry:
    return encode_suffix(timestamp) + (TOMBSTONE if value is None else VALUE), value or b""


def imported(import_id: int, value: bytes | None) -> StoredEntry:
    return encode_reference(import_id) + (TOMBSTONE if value is None else VALUE), value or b""


def tails(entries: list[StoredEntry]) -> list[bytes]:
    return [tail for tail, _ in entries]


def test_all_but_the_newest_value_at_or_below_since_is_garbage() -> None:
    entries = [timed(9, b"9"), timed(5, b"5"), timed(3, b"3"), timed(1, b"1")]
    assert garbage(tails(entries), {}, (), since=6) == tails([entries[3], entries[2]])


def test_version_at_since_stays_readable() -> None:
    entries = [timed(6, b"6"), timed(5, b"5")]
    assert garbage(tails(entries), {}, (), since=6) == [entries[1][0]]


def test_tombstone_at_or_below_since_goes_after_what_it_hides() -> None:
    entries = [timed(5, None), timed(3, b"3")]
    assert garbage(tails(entries), {}, (), since=5) == tails([entries[1], entries[0]])
    assert garbage(tails(entries), {}, (), since=4) == []


def test_versions_under_a_range_tombstone_at_or_below_since_are_garbage() -> None:
    entries = [timed(7, b"7"), timed(3, b"3")]
    assert garbage(tails(entries), {}, (5,), since=5) == [entries[1][0]]
    assert garbage(tails(entries), {}, (5,), since=4) == []


def test_version_of_the_time_of_a_range_tombstone_wins_over_it() -> None:
    assert garbage([timed(5, b"5")[0]], {}, (5,), since=9) == []


def test_reference_added_at_or_below_since_counts_as_a_version_at_its_stamp() -> None:
    row, below = imported(7, b"row"), timed(2, b"2")
    stamps = {encode_reference(7): Lifetime(4)}
    assert garbage(tails([row, below]), stamps, (), since=4) == [below[0]]
    assert garbage(tails([row, below]), stamps, (), since=3) == []
    assert garbage(tails([row, timed(6, b"6"), below]), stamps, (), since=6) == tails([below, row])


def test_row_of_an_import_reverted_at_or_below_since_is_garbage_always() -> None:
    row, below = imported(7, b"row"), timed(2, b"2")
    stamps = {encode_reference(7): Lifetime(4, 6)}
    assert garbage(tails([row, below]), stamps, (), since=6) == [row[0]]


def test_what_a_later_revert_uncovers_is_kept() -> None:
    row, below = imported(7, b"row"), timed(2, b"2")
    stamps = {encode_reference(7): Lifetime(4, 6)}
    assert garbage(tails([row, below, timed(1, b"1")]), stamps, (), since=5) == [timed(1, b"1")[0]]


def test_a_value_that_a_revert_brought_back_gets_the_time_of_the_revert() -> None:
    row, below = imported(7, b"row"), timed(2, b"2")
    stamps = {encode_reference(7): Lifetime(4, 6)}
    moved = Revived(below[0], row[0], 6)
    assert revived(tails([row, below]), stamps, (), since=6) == moved
    assert revived(tails([row, below]), stamps, (), since=5) is None
    for hiding in (timed(5, b"5"), timed(7, b"7")):
        assert revived(tails([row, hiding, below]), stamps, (), since=8) is None


def test_a_row_stays_while_it_tells_the_time_of_a_value_whose_own_life_ends() -> None:
    row, below = imported(7, b"row"), imported(8, b"below")
    stamps = {encode_reference(7): Lifetime(4, 6), encode_reference(8): Lifetime(2, 9)}
    assert garbage(tails([row, below]), stamps, (), since=8) == []
    assert revived(tails([row, below]), stamps, (), since=8) is None
    assert garbage(tails([row, below]), stamps, (), since=9) == tails([below, row])


def test_rows_of_an_import_not_added_yet_are_kept() -> None:
    assert garbage([imported(7, b"row")[0], timed(5, b"5")[0]], {}, (), since=9) == []


@st.composite
def keys(draw: st.DrawFn) -> tuple[list[StoredEntry], dict[bytes, Lifetime], list[int]]:
    """One key's entries, import lifetimes and range stack; commits have distinct times, but a
    batch may delete a range and write into it."""
    times = draw(st.lists(TIMES, unique=True, max_size=6))
    values = st.sampled_from([b"a", b"b", None])
    entries = [timed(t, draw(values)) for t in sorted(times, reverse=True)]
    stack = sorted(draw(st.sets(TIMES, max_size=3)), reverse=True)
    free = [t for t in range(1, 13) if t not in times and t not in stack]
    stamps = {}
    for import_id in range(1, 1 + draw(st.integers(0, 3))):
        entries.insert(0, imported(import_id, draw(values)))
        if len(free) > 1 and draw(st.booleans()):
            added = free.pop(draw(st.integers(0, len(free) - 1)))
            later = [t for t in free if t > added]
            if later and draw(st.booleans()):
                reverted = draw(st.sampled_from(later))
                free.remove(reverted)
                stamps[encode_reference(import_id)] = Lifetime(added, reverted)
            else:
                stamps[encode_reference(import_id)] = Lifetime(added)
    return entries, stamps, stack


def seen(
    entries: list[StoredEntry], stamps: dict[bytes, Lifetime], stack: list[int], since: int
) -> list[object]:
    """The answers to all reads of a key at or above `since`. A value comes with its time, as joins
    return it."""
    events = timeline(entries, stamps, stack)
    states = [newest_at(events, t) for t in range(since, 15)]
    values = [None if state is None or state[1] is None else state for state in states]
    return [*values, *[event for event in events if event[0] > since]]


@given(keys(), st.integers(0, 13))
def test_no_reader_notices_any_prefix_of_the_removals(
    key: tuple[list[StoredEntry], dict[bytes, Lifetime], list[int]], since: int
) -> None:
    entries, stamps, stack = key
    doomed = garbage(tails(entries), stamps, stack, since=since)
    moved = revived(tails(entries), stamps, stack, since=since)
    assert moved is None or moved.row in doomed
    before = seen(entries, stamps, stack, since)
    left = list(entries)
    for tail in doomed:
        if moved is not None and tail == moved.row:
            left.append(timed(moved.time, dict(left)[moved.tail]))
            left = [entry for entry in left if entry[0] != moved.tail]
        left = sorted(entry for entry in left if entry[0] != tail)
        assert seen(left, stamps, stack, since) == before
    without = [t for t in stack if t > since]
    assert seen(left, stamps, without, since) == before
    assert not garbage(tails(left), stamps, without, since=since)
    assert revived(tails(left), stamps, without, since=since) is None


@given(keys(), st.integers(0, 13))
def test_at_most_one_lasting_version_at_or_below_since_is_left(
    key: tuple[list[StoredEntry], dict[bytes, Lifetime], list[int]], since: int
) -> None:
    entries, stamps, stack = key
    doomed = set(garbage(tails(entries), stamps, stack, since=since))
    lasting = [
        tail
        for tail, _ in entries
        if tail not in doomed
        and (
            encode_suffix(since) <= tail
            or (
                stamps.get(tail[:-1], Lifetime(99)).added <= since
                and stamps[tail[:-1]].reverted > 99
            )
        )
    ]
    assert len(lasting) <= 1
