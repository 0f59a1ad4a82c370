"""Writes: the entries that are made of any input, in their order."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.codec.keys import TOMBSTONE, VALUE, encode_reference, encode_suffix, frame
from kvstore.limits import KEY_BYTES_MAX
from kvstore.loops.writes import Puts, put_all, set_rows
from kvstore.opening import ENGINES
from tests.harness.bounds import bounds
from tests.loops import raw
from tests.mvcc.test_scan import times


@given(st.dictionaries(raw, st.none() | raw, max_size=20), st.integers(1, 1 << 62))
def test_points_are_put_as_entries_in_key_order(
    points: dict[bytes, bytes | None], time: int
) -> None:
    put: list[Any] = []
    put_all(lambda *entry: put.append(entry), points, encode_suffix(time), "family")
    expected = [
        (frame(key) + encode_suffix(time) + (TOMBSTONE if value is None else VALUE), value or b"")
        for key, value in points.items()
    ]
    assert put == [(*entry, "family") for entry in sorted(expected)]


@given(st.lists(st.tuples(raw | st.just("text") | st.just(np.bytes_(b"n")), raw | st.none())))
def test_puts_take_bytes_while_they_fit_and_leave_the_rest(drawn: list[Any]) -> None:
    left: list[Any] = []

    class Collected(Puts):  # type: ignore[misc,name-defined]
        def put_otherwise(self, key: Any, value: Any) -> None:
            left.append((key, value))

    puts, taken, size = Collected(12), {}, 0
    over = b"k" * (KEY_BYTES_MAX + 1), b""
    for key, value in [over, *drawn]:
        puts.put(key, value)
        if size <= 12 and type(key) is type(value) is bytes and key != over[0]:
            taken[key] = value
            size += len(key) + len(value)
        else:
            assert left.pop() == (key, value)
    assert (list(puts.points.items()), puts.size, left) == (list(taken.items()), size, [])
    for field, value in ("points", {}), ("ranges", []), ("size", 0), ("size_max", 13):
        with pytest.raises(AttributeError):
            setattr(puts, field, value)


def test_what_put_raises_ends_it() -> None:
    def put(*entry: object) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        put_all(put, {b"a": b"1", b"b": None}, encode_suffix(1), None)


class Entries(list[tuple[bytes, bytes]]):
    """Takes entries, and refuses the one at `last`."""

    last = -1

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) == self.last:
            raise OSError("full")
        self.append((key, value))


def column_of(rows: list[bytes | None], first: int) -> Any:
    """The rows as a column of an array that has `first` rows before them."""
    array = pa.array([b"before"] * first + rows, pa.binary())
    valid, offsets, data = array.buffers()
    return 0, valid, first, data, offsets


@given(
    st.lists(
        st.tuples(raw, st.none() | raw, times, st.sampled_from([VALUE, TOMBSTONE])), max_size=12
    ),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.integers(-1, 12),
)
def test_versions_are_set_in_their_order_until_one_is_refused(
    drawn: list[Any], first: int, has_kinds: bool, has_times: bool, last: int
) -> None:
    suffixes = [
        encode_suffix(time) if has_times else encode_reference(7) for _, _, time, _ in drawn
    ]
    kinds = [kind if has_kinds else VALUE for _, _, _, kind in drawn]
    expected = [
        (frame(key) + suffix + kind, b"" if kind == TOMBSTONE else value or b"")
        for (key, value, _, _), suffix, kind in zip(drawn, suffixes, kinds, strict=True)
    ]
    target = Entries()
    target.last = last
    keys, values = (column_of([row[at] for row in drawn], first) for at in (0, 1))
    suffix = b"".join(suffixes) if has_times else encode_reference(7)
    with bounds(SCAN_CHUNK=5):
        done, error = set_rows(
            target, keys, values, len(drawn), suffix, b"".join(kinds) if has_kinds else None
        )
    is_refused = 0 <= last < len(drawn)
    assert done == (last if is_refused else len(drawn))
    assert isinstance(error, OSError) == is_refused
    assert target == expected[:done]


SUFFIX = encode_reference(7)
SOUND = 0, None, 0, b"abc", array("i", [0, 3])


@pytest.mark.parametrize(
    "wrong",
    [
        (3, *SOUND[1:]),
        (*SOUND[:4], array("i", [0])),
        (0, None, 1, *SOUND[3:]),
        (0, None, -1, b"abc", array("i", [0, 3, 3])),
        (0, b"", *SOUND[2:]),
        (*SOUND[:4], array("i", [0, 4])),
        (*SOUND[:4], array("i", [-1, 3])),
        (*SOUND[:4], array("i", [2, 1])),
    ],
)
def test_columns_that_lie_about_their_rows_are_refused(wrong: Any) -> None:
    for columns in (wrong, SOUND), (SOUND, wrong):
        target = Entries()
        with pytest.raises(ValueError, match=r"."):
            set_rows(target, *columns, 1, SUFFIX, None)
        assert target == []
    with pytest.raises(ValueError, match="one kind"):
        set_rows(Entries(), SOUND, SOUND, 1, SUFFIX, VALUE + VALUE)
    with pytest.raises(ValueError, match="one suffix"):
        set_rows(Entries(), SOUND, SOUND, 1, SUFFIX + SUFFIX, None)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [np.bytes_, type("Raw", (bytes,), {})])
def test_a_store_takes_what_is_bytes_by_inheritance(engine: str, kind: Any, tmp_path: Any) -> None:
    key, value, end = kind(b"k"), kind(b"v"), kind(b"l")
    with kvstore.open(tmp_path / "store", engine=engine, durability="async") as store:
        store.put(key, value)
        store.put_if(key, value, expected=b"v", unchanged_since=store.upper - 1)
        assert (store.get(key), store.get_many([key, b"j"])) == (b"v", [b"v", None])
        assert type(store.get(key)) is bytes
        with store.transaction() as transaction:
            assert transaction.get(key) == b"v"
            transaction.put(key, value)
        assert list(store.scan(key, end)) == list(store.scan(prefix=key)) == [(b"k", b"v")]
        assert store.pop(key) == b"v"
        with store.batch() as batch:
            batch.put(key, value)
            batch.delete(kind(b"j"))
        store.delete_range(key, end)
        assert (store.get(b"k"), store.get_many([b"k"]), list(store.scan())) == (None, [None], [])
        kinds = {type(change.key) for change in store.changes(0)}
        assert kinds == {bytes}
        store.put(key, b"")
        store.delete(key)
        assert [version.value for version in store.history(key)][:3] == [None, b"", None]
