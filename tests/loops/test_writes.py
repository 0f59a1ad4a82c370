"""Writes: the entries that are made of any input, in their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.changes.index import FIRST_STREAM, pack_writes
from kvstore.codec.keys import TOMBSTONE, VALUE, encode_change_key, encode_suffix, frame
from kvstore.limits import KEY_BYTES_MAX
from kvstore.loops.writes import Puts, SmallCommits, put_all
from kvstore.mvcc import WriteSet
from kvstore.opening import ENGINES
from tests.harness.bounds import bounds
from tests.loops import raw


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

    puts, taken, size = Collected("them", 12), {}, 0
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


class Recorded:
    """A batch that keeps what is put."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def put(self, *entry: object) -> None:
        self.entries.append(entry)


@given(
    st.dictionaries(raw, st.none() | raw, max_size=20),
    st.integers(1, 1 << 62),
    st.tuples(st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 64) - 1)),
    st.dictionaries(
        st.sampled_from(["COMPRESS_FROM_BYTES", "THIN_FROM_BYTES", "INLINE_VALUE_BYTES"]),
        st.integers(1, 60),
    ),
)
def test_a_small_commit_is_put_as_its_versions_and_its_entry(
    points: dict[bytes, bytes | None],
    time: int,
    changeset: tuple[int, int],
    limits: dict[str, int],
) -> None:
    writes, versions = WriteSet(), Recorded()
    for key, value in points.items():
        if value is None:
            writes.delete(key)
        else:
            writes.put(key, value)
    put_all(versions.put, points, encode_suffix(time), "data")
    small = SmallCommits(FIRST_STREAM, 1 | 1 << 16, b"\x01\x03")
    batch, entry_key = Recorded(), encode_change_key(FIRST_STREAM, time)
    with bounds(limits):
        is_done = small.put(batch.put, writes, time, changeset, "data", "changes")
        packed = pack_writes(points, (), 1 << 20, changeset)
    if is_done:
        assert batch.entries == [*versions.entries, (entry_key, packed, "changes")]
        assert all(
            len(value or b"") < limits.get("INLINE_VALUE_BYTES", 99) + 1
            for value in points.values()
        )
    else:
        assert batch.entries == []
        assert limits or not points


def test_what_put_raises_ends_it() -> None:
    def put(*entry: object) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        put_all(put, {b"a": b"1", b"b": None}, encode_suffix(1), None)


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
