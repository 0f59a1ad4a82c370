"""Look-ups: what the history of each key says, on any input."""

from __future__ import annotations

import gc
import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from contextlib import suppress
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.codec.keys import UNLIMITED, VALUE, encode_suffix, escape, frame
from kvstore.errors import CorruptionError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.loops.lookup import Lookup, PointRead, Readers, are_keys, find_among, find_many
from kvstore.loops.packing import Packer
from kvstore.loops.shapes import ABSENT
from kvstore.loops.writes import put_all
from kvstore.mvcc.fragments import Fragments, limit_of
from kvstore.mvcc.lookup import rest_of
from tests.loops import raw, stored_key
from tests.mvcc.test_scan import STAMPS, by_history, entries_of, keys, reads, stored

# -- look-ups -------------------------------------------------------------------------------------


class Name(bytes):
    """Bytes by inheritance."""


NO_KEYS: Any = st.sampled_from([None, "text", 3, bytearray(b"k"), Name(b"k")])


class ListReader:
    """The contract of a reader over a list."""

    def __init__(self, entries: list[tuple[bytes, bytes]]) -> None:
        self._entries = entries
        self._at = 0
        self.moves = 0

    def seek(self, key: bytes) -> None:
        self._at = bisect_left(self._entries, (key,))
        self.moves += 1

    def next(self) -> None:
        self._at += 1
        self.moves += 1

    def key(self) -> bytes | None:
        return self._entries[self._at][0] if self._at < len(self._entries) else None

    def value(self) -> bytes:
        return self._entries[self._at][1]


@given(stored, reads, st.lists(keys, max_size=6))
def test_find_among_imports_is_what_the_history_says(drawn: Any, as_of: int, absent: Any) -> None:
    alive = dict(by_history(drawn, Fragments(), as_of))
    reader = ListReader(entries_of(drawn))
    checked: list[Any] = []
    asked = [*absent, *(key for key, _, _ in drawn)]
    for some in [asked, sorted(asked), *([key] for key in asked)]:
        checked.clear()
        found, times = find_among(reader, checked.append, some, as_of, rest_of(as_of), STAMPS)
        for key, time, value in zip(some, memoryview(times).cast("q"), found, strict=True):
            assert value == alive.get(key)
            assert -1 <= time <= as_of
            assert value is None or time >= 0
        if len(some) == 1:
            assert bool(checked) == (reader.key() is None)


@given(stored, reads, st.lists(keys, max_size=9), st.sets(keys), st.data())
def test_finding_many_is_finding_each(
    drawn: Any, as_of: int, asked: list[bytes], bounds: set[bytes], data: Any
) -> None:
    entries = entries_of(drawn)
    boundaries = sorted(bounds)
    limits = data.draw(
        st.lists(
            st.sampled_from([UNLIMITED, limit_of(3), limit_of(9)]),
            min_size=len(boundaries) + 1,
            max_size=len(boundaries) + 1,
        )
    )
    rest = rest_of(as_of)
    asked = [*asked, *(key for key, _, _ in drawn)]
    if data.draw(st.booleans()):
        asked.sort()
    readers = Readers(lambda: ListReader(entries), lambda reader: None, 2)
    one_by_one = [readers.find(key, rest, limits[bisect_right(boundaries, key)]) for key in asked]
    found = find_many(
        ListReader(entries), lambda reader: None, asked, rest, (boundaries, limits), 0, ABSENT
    )
    assert found == one_by_one
    for key, value in zip(asked, found, strict=True):
        start = escape(key) + rest
        end = escape(key) + limits[bisect_right(boundaries, key)]
        inside = [entry for entry in entries if start <= entry[0] < end]
        expected = ABSENT if not inside else inside[0][1] if inside[0][0][-1] else None
        assert value == expected


@given(st.lists(raw | NO_KEYS, max_size=40))
def test_keys_are_bytes_of_a_length_that_a_store_takes(asked: list[Any]) -> None:
    assert are_keys(asked) == all(type(key) is bytes for key in asked)
    assert are_keys([b"k" * KEY_BYTES_MAX])
    assert not are_keys([b"k", b"k" * (KEY_BYTES_MAX + 1)])


@pytest.mark.parametrize("emptied", ["keys", "boundaries", "limits"])
def test_finding_many_looks_at_nothing_beyond_its_lists(emptied: str) -> None:
    lists: dict[str, list[bytes]] = {
        "keys": [b"%02d" % row for row in range(99)],
        "boundaries": [b"%02d" % row for row in range(99)],
        "limits": [UNLIMITED] * 100,
    }

    class Emptying(ListReader):
        def seek(self, key: bytes) -> None:
            super().seek(key)
            lists[emptied].clear()

    reader = Emptying([(stored_key(b"98"), b"")])
    keys, boundaries, limits = lists.values()
    with suppress(IndexError):
        found = find_many(
            reader, lambda reader: None, keys, rest_of(9), (boundaries, limits), 0, None
        )
        assert emptied != "keys" or len(found) == 99


def test_readers_are_lent_again_until_renewed() -> None:
    readers = Readers(lambda: ListReader([]), lambda reader: None, 2)
    lent = [readers.borrow() for _ in range(3)]
    for ticket, reader in lent:
        readers.give_back(ticket, reader)
    again = [readers.borrow() for _ in range(3)]
    assert {id(reader) for _, reader in again[:2]} == {id(reader) for _, reader in lent[:2]}
    assert again[2][1] not in [reader for _, reader in lent]
    readers.renew()
    for ticket, reader in again:
        readers.give_back(ticket, reader)
    assert readers.borrow()[1] not in [reader for _, reader in again]


def test_readers_outlive_commits_to_other_keys() -> None:
    """A reader of the list as it was when it was made answers for the keys that were not written
    since."""
    entries = [(stored_key(b"a"), b"1"), (stored_key(b"b"), b"1")]
    made: list[ListReader] = []

    def make() -> ListReader:
        made.append(ListReader(list(entries)))
        return made[-1]

    def find(key: bytes) -> object:
        return readers.find(key, rest_of(9), UNLIMITED)

    def write(key: bytes, value: bytes, bytes_max: int = 99) -> None:
        entries[:] = sorted({**dict(entries), stored_key(key): value}.items())
        readers.outlive({key: value}, bytes_max)

    readers = Readers(make, lambda reader: None, 2)
    write(b"c", b"1")
    assert [find(b"a"), find(b"c"), len(made)] == [b"1", b"1", 1]
    write(b"b", b"2")
    write(b"b", b"3")
    assert [find(b"a"), find(b"c"), len(made)] == [b"1", b"1", 1]
    assert [find(b"b"), find(b"b"), len(made)] == [b"3", b"3", 2]
    write(b"a", b"22", bytes_max=2)
    assert [find(b"c"), len(made)] == [b"1", 3]
    write(b"d", b"1")
    ticket, reader = readers.borrow()
    assert [reader is made[-1], len(made)] == [True, 4]
    write(b"c", b"4")
    readers.give_back(ticket, reader)
    assert [find(b"d"), find(b"c"), len(made)] == [b"1", b"4", 5]
    readers.outlive({b"d": None}, 99)
    assert [find(b"c"), len(made)] == [b"4", 5]


def test_a_reader_that_fails_is_checked_and_not_kept() -> None:
    made: list[ListReader] = []

    def make() -> ListReader:
        made.append(ListReader([]))
        return made[-1]

    def check(reader: object) -> None:
        raise CorruptionError("there", "a damaged block")

    readers = Readers(make, check, 2)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="damaged"):
            readers.find(b"k", b"", b"z")
    assert len(made) == 2


class Timeline:
    since, floor, upper, is_healthy = 3, 3, 9, True


def test_a_point_read_leaves_to_others_what_is_in_its_way() -> None:
    engine, timeline, left = Timeline(), Timeline(), []

    def otherwise(key: object, as_of: object, default: object) -> str:
        left.append((key, as_of, default))
        return "otherwise"

    entries = [(frame(b"k") + encode_suffix(time) + VALUE, b"%d" % time) for time in (7, 4)]
    readers = Readers(lambda: ListReader(entries), lambda reader: None, 2)
    engine.find = readers.find  # type: ignore[attr-defined]
    lookup = Lookup(engine, otherwise)
    get = PointRead(lookup, timeline, otherwise).get
    assert [get(b"k"), *(get(b"k", Timestamp(time)) for time in (4, 6, 3))] == [
        b"7",
        b"4",
        b"4",
        None,
    ]
    assert get(b"j", None, "nothing") == get(b"j", default="nothing") == "nothing"
    assert not left
    for key, as_of in [
        ("k", None),
        (bytearray(b"k"), None),
        (bytes(KEY_BYTES_MAX + 1), None),
        (b"k", 2),
        (b"k", 4),  # a plain integer might count seconds
        (b"k", 9),
        (b"k", -1),
        (b"k", 1 << 80),
        (b"k", True),
        (b"k", 5.0),
        (b"k", "1970-01-01T00:00:00Z"),
    ]:
        assert get(key, as_of, "default") == "otherwise"
        assert left.pop() == (key, as_of, "default")
    timeline.floor = 6  # history below 6 is given up at this moment
    assert (get(b"k", Timestamp(6)), get(b"k", Timestamp(5))) == (b"4", "otherwise")
    timeline.is_healthy = False
    assert get(b"k") == "otherwise"


def test_a_lookup_beside_range_tombstones_and_imports_is_left_to_who_knows() -> None:
    engine, left = Timeline(), []
    entries = [(frame(b"k") + encode_suffix(7) + VALUE, b"7")]
    readers = Readers(lambda: ListReader(entries), lambda reader: None, 2)
    engine.find, engine.borrow = readers.find, readers.borrow  # type: ignore[attr-defined]
    engine.give_back, engine.check = readers.give_back, print  # type: ignore[attr-defined]

    def slowly(key: bytes, as_of: int) -> bytes:
        left.append(key)
        return b"slowly"

    lookup = Lookup(engine, slowly)
    lookup.show(([b"m"], [UNLIMITED, limit_of(5)]), 0, {})
    assert [lookup.get(b"k", 8), lookup.get(b"j", 8)] == [b"7", None]
    assert lookup.get(b"n", 8) == b"slowly"
    lookup.show(([], [UNLIMITED]), 0, STAMPS)
    assert [lookup.get(b"k", 8), lookup.get(b"k", 6)] == [b"7", None]
    lookup.show(([b"m"], [UNLIMITED, limit_of(5)]), 0, STAMPS)
    assert lookup.get(b"k", 8) == b"slowly"
    assert left == [b"n", b"k"]


def test_a_first_lookup_has_the_rest_of_its_time() -> None:
    engine, asked = Timeline(), []
    engine.find = lambda *parts: asked.append(parts)  # type: ignore[attr-defined]
    for time in (0, 1, TIMESTAMP_MAX):
        Lookup(engine, None).get(b"k", time)
        assert asked.pop() == (b"k", rest_of(time), UNLIMITED)
    engine.find = Readers(lambda: ListReader([]), lambda reader: None, 2).find  # type: ignore[attr-defined]
    with suppress(struct.error):  # no caller asks for this, but it must not crash Python
        Lookup(engine, None).get(b"k", -1)


def test_a_lookup_keeps_to_one_view_while_another_is_shown() -> None:
    """Another thread may show a view while the collector calls a finalizer in the midst of a
    look-up."""
    engine = Timeline()
    engine.find = lambda key, rest, limit: limit  # type: ignore[attr-defined]
    lookup = Lookup(engine, None)
    boundaries = [b"%04d" % row for row in range(1000)]
    limits = [b"\x00\x01%d" % row for row in range(1001)]

    def show_another(phase: str, info: object) -> None:
        lookup.show(([], [UNLIMITED]), 0, {})

    threshold = gc.get_threshold()
    gc.callbacks.append(show_another)
    try:
        for time in range(1000):
            gc.set_threshold(100, 1000, 1000)
            lookup.show((boundaries, limits), 0, {})
            gc.set_threshold(1 + time % 8, 1000, 1000)
            assert lookup.get(b"0900", time) in (limits[901], UNLIMITED)
    finally:
        gc.callbacks.remove(show_another)
        gc.set_threshold(*threshold)


def test_a_point_read_says_what_it_is() -> None:
    with kvstore.open(None, engine="memory") as store:
        assert str(store.get.__doc__).startswith("The value of `key`")


def test_another_get_of_a_store_is_the_one_that_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(store: kvstore.Store, key: bytes) -> bytes | None:
        return get(store, key + b"!")

    get = kvstore.Store.get
    monkeypatch.setattr(kvstore.Store, "get", counted)
    with kvstore.open(None, engine="memory") as store:
        store.put(b"k!", b"v")
        assert store.get(b"k") == b"v"


def test_a_loop_over_many_keys_lets_other_threads_run() -> None:
    ticks, is_done = 0, False

    def tick() -> None:
        nonlocal ticks
        while not is_done:
            sleep(0.0005)
            ticks += 1

    keys = [b"%07d" % row for row in range(1_000_000)]
    points: dict[bytes, bytes | None] = dict.fromkeys(keys, b"")
    column = 0, None, 0, b"".join(keys), array("i", range(0, 7 * len(keys) + 1, 7))
    rows = len(keys), column, column, bytes(8), None, True
    # The call runs in C as a whole, so no other thread gets a turn.
    reader = SimpleNamespace(seek=len, next=len, key=[].clear, value=bytes)
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for loop in (
            lambda: find_many(reader, id, keys, rest_of(9), ([], [UNLIMITED]), 0, None),
            lambda: find_among(reader, id, keys, 9, rest_of(9), {}),
            lambda: put_all(slice, points, encode_suffix(9), None),
            lambda: Packer(8192, 1 << 30).add(rows, 0, len(keys)),
        ):
            before = ticks
            loop()
            assert ticks > before + 2
    finally:
        is_done = True
        thread.join()
