"""The rule for a key's history: entries, imports added and reverted, range tombstones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec.keys import TOMBSTONE, VALUE, encode_reference, encode_suffix
from kvstore.mvcc import Lifetime, timeline
from kvstore.mvcc.key_history import newest_at


def entry(suffix: bytes, value: bytes | None) -> tuple[bytes, bytes]:
    return suffix + (TOMBSTONE if value is None else VALUE), value or b""


def at(timestamp: int, value: bytes | None) -> tuple[bytes, bytes]:
    return entry(encode_suffix(timestamp), value)


def imported(ident: int, value: bytes | None) -> tuple[bytes, bytes]:
    return entry(encode_reference(ident), value)


class Counted(int):
    """A time that counts how often it is compared."""

    compared = 0

    def __le__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) <= other

    def __gt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) > other


def test_versions_come_newest_first() -> None:
    assert timeline([at(9, b"b"), at(4, None), at(2, b"a")], {}, ()) == [
        (9, b"b"),
        (4, None),
        (2, b"a"),
    ]


def test_a_range_tombstone_is_a_version_unless_something_was_written_at_its_time() -> None:
    assert timeline([at(9, b"b"), at(2, b"a")], {}, (9, 5)) == [(9, b"b"), (5, None), (2, b"a")]


def test_an_import_is_a_version_at_its_stamp_and_invisible_before() -> None:
    stamps = {encode_reference(7): Lifetime(5)}
    entries = [imported(7, b"i"), imported(8, b"never added"), at(9, b"b"), at(2, b"a")]
    assert timeline(entries, stamps, ()) == [(9, b"b"), (5, b"i"), (2, b"a")]


def test_many_reverts_of_one_key_are_derived_in_one_sweep() -> None:
    """The reverts of a key that is imported and reverted each night, and of one whose imports are
    all reverted at its end. A search for each revert would be quadratic."""
    numbers = range(1, 400, 2)
    for reverted in ([at + 1 for at in numbers], [2000 - at for at in numbers]):
        stamps = {
            encode_reference(at): Lifetime(at, Counted(gone))
            for at, gone in zip(numbers, reverted, strict=True)
        }
        Counted.compared = 0
        found = timeline([imported(at, b"%d" % at) for at in numbers], stamps, ())
        assert len(found) == 400
        assert Counted.compared < 2000, "some for each version"


def test_a_revert_shows_what_was_below() -> None:
    stamps = {encode_reference(7): Lifetime(5, 8)}
    assert timeline([imported(7, b"i"), at(2, b"a")], stamps, ()) == [
        (8, b"a"),
        (5, b"i"),
        (2, b"a"),
    ]


def test_a_revert_of_a_new_key_deletes_it() -> None:
    stamps = {encode_reference(7): Lifetime(5, 8)}
    assert timeline([imported(7, b"i")], stamps, ()) == [(8, None), (5, b"i")]


def test_a_revert_under_a_newer_write_changes_nothing() -> None:
    stamps = {encode_reference(7): Lifetime(5, 8)}
    assert timeline([imported(7, b"i"), at(6, b"w")], stamps, ()) == [(6, b"w"), (5, b"i")]


def test_a_revert_under_a_range_tombstone_changes_nothing() -> None:
    stamps = {encode_reference(7): Lifetime(5, 8)}
    assert timeline([imported(7, b"i"), at(2, b"a")], stamps, (6,)) == [
        (6, None),
        (5, b"i"),
        (2, b"a"),
    ]


def test_reverting_two_imports_in_either_order_uncovers_the_base() -> None:
    entries = [imported(7, b"i"), imported(8, b"j"), at(2, b"a")]
    inner_first = {encode_reference(7): Lifetime(5, 10), encode_reference(8): Lifetime(6, 12)}
    assert timeline(entries, inner_first, ())[:2] == [(12, b"a"), (6, b"j")]
    outer_first = {encode_reference(7): Lifetime(5, 12), encode_reference(8): Lifetime(6, 10)}
    assert timeline(entries, outer_first, ())[:3] == [(12, b"a"), (10, b"i"), (6, b"j")]


moments = st.lists(st.integers(1, 30), unique=True, max_size=12)


@given(moments, st.data())
def test_state_is_the_newest_visible_version_at_every_time(
    times: list[int], data: st.DataObject
) -> None:
    """The list of events and the direct rule agree at every instant."""
    entries: list[tuple[bytes, bytes]] = []
    stamps: dict[bytes, Lifetime] = {}
    lives: list[tuple[int, int, bytes | None]] = []
    deletions: list[int] = []
    unused = sorted(times)
    while unused:
        time, value = unused.pop(0), data.draw(st.sampled_from([None, b"", b"x", b"y"]))
        kind = data.draw(st.sampled_from(["write", "range", "import"]))
        if kind == "range":
            deletions.insert(0, time)
            lives.append((time, 99, None))
        elif kind == "write":
            entries.append(at(time, value))
            lives.append((time, 99, value))
        else:
            gone = unused.pop(data.draw(st.integers(0, len(unused) - 1))) if unused else 99
            entries.append(imported(time, value))
            stamps[encode_reference(time)] = Lifetime(time, gone) if gone < 99 else Lifetime(time)
            lives.append((time, gone, value))
    entries.sort()
    events = timeline(entries, stamps, deletions)
    assert [event[0] for event in events] == sorted({t for t, _ in events}, reverse=True)
    for as_of in range(32):
        visible = [life for life in lives if life[0] <= as_of < life[1]]
        expected = max(visible)[2] if visible else None
        found = newest_at(events, as_of)
        assert (found[1] if found else None) == expected
