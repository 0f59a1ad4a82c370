"""The ordered map of the memory engine: a sorted dict for its writer, an unchanging one for
readers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine import memory_engine
from kvstore.engine.memory_engine import Edition, MemoryCursor, pieces

keys = st.binary(max_size=2)
puts = st.tuples(st.just("put"), keys, st.binary(max_size=1))
deletes = st.tuples(st.just("delete"), keys)
ranges = st.tuples(st.just("delete_range"), keys, keys)
merges = st.tuples(
    st.just("merge"), st.dictionaries(keys, st.binary(max_size=1), max_size=40).map(sorted)
)
histories = st.lists(st.one_of(puts, puts, puts, deletes, ranges, merges), max_size=60)


@pytest.fixture(autouse=True, scope="module")
def _tiny_chunks() -> Iterator[None]:
    """Chunks of four entries: every split, cut and fork happens in a few writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_engine, "CHUNK_ENTRIES_MAX", 4)
        yield


def rows(edition: Edition) -> list[tuple[bytes, bytes]]:
    return [row for ks, vs in pieces(edition) for row in zip(ks, vs, strict=True)]


def carry_out(edition: Edition, model: dict[bytes, bytes], op: str, *arguments: object) -> None:
    if op == "merge":
        found: list[bytes] = arguments[0]  # type: ignore[assignment]
        edition.merge(found, [b"m"] * len(found))
        model.update(dict.fromkeys(found, b"m"))
        return
    getattr(edition, op)(*arguments)
    if op == "put":
        model[arguments[0]] = arguments[1]  # type: ignore[index, assignment]
    elif op == "delete":
        model.pop(arguments[0], None)  # type: ignore[call-overload]
    else:
        begin, end = arguments
        for key in [key for key in model if begin <= key < end]:  # type: ignore[operator]
            del model[key]


@given(histories)
def test_it_holds_what_a_dict_would_in_order(history: list[tuple[str, object]]) -> None:
    edition, model = Edition(), dict[bytes, bytes]()
    for op in history:
        carry_out(edition, model, *op)
        edition.check()
        assert rows(edition) == sorted(model.items())
    assert len(edition) == len(model)
    assert edition.size_bytes() == sum(len(k) + len(v) for k, v in model.items())
    for key in {key for op in history for key in op[1:] if isinstance(key, bytes)}:
        assert edition.get(key) == model.get(key)
        at, index = edition.position(key)
        before = sum(len(chunk.keys) for chunk in edition.chunks[:at])
        assert before + index == bisect_left(sorted(model), key)


@given(histories, st.lists(st.integers(0, 59), max_size=10))
def test_a_forked_edition_never_changes_again(
    history: list[tuple[str, object]], forks: list[int]
) -> None:
    edition, model = Edition(), dict[bytes, bytes]()
    pictures: list[tuple[Edition, list[tuple[bytes, bytes]]]] = []
    for number, op in enumerate(history):
        if number in forks:
            pictures.append((edition, sorted(model.items())))
            edition = edition.fork()
        carry_out(edition, model, *op)
        edition.check()
    for picture, expected in pictures:
        picture.check()
        assert rows(picture) == expected
    assert rows(edition) == sorted(model.items())


def test_a_fork_shares_all_chunks_but_those_written_to() -> None:
    edition = Edition()
    for number in range(100):
        edition.put(b"%03d" % number, b"")
    forked = edition.fork()
    forked.put(b"050", b"new")
    shared = {id(chunk) for chunk in edition.chunks} & {id(chunk) for chunk in forked.chunks}
    assert len(shared) == len(edition.chunks) - 1


def test_ascending_puts_leave_full_chunks() -> None:
    edition = Edition()
    for number in range(100):
        edition.put(b"%03d" % number, b"")
    assert {len(chunk.keys) for chunk in edition.chunks} == {4}


def test_what_is_emptied_is_one_empty_chunk_again() -> None:
    edition = Edition()
    for number in range(50):
        edition.put(b"%03d" % number, b"")
    edition.delete_range(b"", b"\xff")
    edition.check()
    assert (len(edition), len(edition.chunks)) == (0, 1)


letters = st.sampled_from([bytes([letter]) for letter in b"abcdefghijklmnop"])
crowded = st.lists(
    st.one_of(
        st.tuples(st.just("put"), letters, st.just(b"")),
        st.tuples(st.just("put"), letters, st.just(b"")),
        st.tuples(st.just("delete"), letters),
        st.tuples(st.just("delete_range"), letters, letters),
    ),
    max_size=60,
)
"""Few keys, so that bounds meet the bounds of chunks."""


class Still:
    """An engine in which nothing happens."""

    is_closed = False

    def require_open(self) -> None:
        pass

    def release(self, edition: Edition) -> None:
        pass


@given(crowded, letters | st.just(b""), letters | st.none(), st.integers(1, 5), st.booleans())
def test_a_pass_keeps_to_its_bounds_wherever_chunks_begin_and_end(
    history: list[tuple[str, object]], start: bytes, end: bytes | None, count: int, reverse: bool
) -> None:
    edition, model = Edition(), dict[bytes, bytes]()
    for op in history:
        carry_out(edition, model, *op)
    inside = [row for row in sorted(model.items()) if start <= row[0] and (not end or row[0] < end)]
    cursor = MemoryCursor(Still(), edition, start, end or None, reverse=reverse)
    found: list[tuple[bytes, bytes]] = []
    while taken := list(zip(*cursor.take(count), strict=True)):
        assert len(taken) <= count
        found += taken
    assert found == (inside[::-1] if reverse else inside)


def test_a_descending_pass_ends_below_what_was_removed_from_the_front_of_a_chunk() -> None:
    edition = Edition()
    for letter in b"abcdefgh":
        edition.put(bytes([letter]), b"")
    edition.delete_range(edition.firsts[1], edition.chunks[1].keys[1])
    bound = edition.chunks[1].keys[0]
    assert edition.firsts[1] < bound
    cursor = MemoryCursor(Still(), edition, b"", bound, reverse=True)
    found = cursor.take(100)[0]
    assert found[0] < bound
    assert found[-1] == b"a"
