"""Changesets: ids, ambient scope, and the tags of commits."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import Store
from kvstore.changes.epochs import ChangesetId, Serials
from kvstore.errors import ClosedError
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

U64 = (1 << 64) - 1


def tags(store: Store) -> list[tuple[int, int]]:
    """Changeset of each row of the change index, in time order."""
    rows = parts_of(store).index.rows(since=0, upto=store.upper - 1)
    return [row.changeset for row in rows]


def fail(after: object) -> None:
    raise RuntimeError(f"halfway, after {after}")


def test_serial_is_the_time_in_32_32_fixed_point_with_an_empty_counter() -> None:
    assert Serials().next(5_500_000_000) == (5 << 32) + (1 << 31)
    assert Serials().next(1_700_000_000_123_456_789) % 128 == 0


def test_a_clock_that_stands_still_gives_128_serials_and_carries() -> None:
    serials = Serials()
    assert [serials.next(1_000_000_000) - (1 << 32) for _ in range(200)] == list(range(200))


def test_zero_is_never_given_out() -> None:
    assert Serials().next(0) == 1
    assert Serials(last=U64).next(0) == Serials(last=U64).step() == 1


@given(st.lists(st.integers(0, 1 << 62), min_size=1, max_size=50))
def test_serials_strictly_increase_whatever_the_clock_does(times: list[int]) -> None:
    serials = Serials()
    last = serials.next(times[0])
    for now_ns in times:
        serial = serials.next(now_ns)
        assert serial
        assert 0 < (serial - last) % (1 << 64) < 1 << 63
        last = serial


def test_commits_inside_carry_the_id_and_bare_ones_their_own(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        store.put(b"a", b"1")
        with store.changeset() as outer:
            store.put(b"b", b"1")
            with store.changeset() as inner:
                store.put(b"c", b"1")
                store.delete_range(b"a", b"b")
            with store.batch() as batch:
                batch.put(b"d", b"1")
                batch.put(b"e", b"1")
        store.put(b"f", b"1")
        found = tags(store)
    assert outer.id is not None
    assert inner.id is not None
    assert found[1:6] == [outer.id, inner.id, inner.id, outer.id, outer.id]
    assert len({found[0], outer.id, inner.id, found[6]}) == 4
    assert (outer.events, inner.events) == (3, 2)
    assert {domain for domain, _ in found} == {outer.id.domain}
    serials = [found[0][1], outer.id.serial, inner.id.serial, found[6][1]]
    assert serials == sorted(serials)


def test_an_error_unwinds_the_scope_and_keeps_what_was_committed(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        with store.changeset() as outer:
            inner = store.changeset()
            with pytest.raises(RuntimeError, match="halfway"), inner:
                fail(store.put(b"a", b"1"))
            store.put(b"b", b"1")
        store.put(b"c", b"1")
        assert store.get(b"a") == b"1"
        found = tags(store)
        assert found[:2] == [inner.id, outer.id]
        assert found[2] not in found[:2]
        assert list(store.epochs())[-1].quiescent


def test_a_thread_takes_part_only_in_a_copied_context(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        with store.changeset() as cs:
            context = contextvars.copy_context()
            inside = threading.Thread(target=context.run, args=(store.put, b"a", b"1"))
            outside = threading.Thread(target=store.put, args=(b"b", b"1"))
            for thread in (inside, outside):
                thread.start()
                thread.join()
        found = tags(store)
    assert found[0] == cs.id
    assert found[1] != cs.id
    assert cs.events == 1


def test_a_task_that_outlives_the_block_is_outside(tmp_path: Path) -> None:
    async def late(store: Store, gate: asyncio.Event) -> None:
        await gate.wait()
        store.put(b"late", b"1")

    async def run(store: Store) -> ChangesetId | None:
        gate = asyncio.Event()
        with store.changeset() as cs:
            task = asyncio.create_task(late(store, gate))
            await asyncio.sleep(0)
        gate.set()
        await task
        return cs.id

    with kvstore.open(tmp_path / "s", durability="async") as store:
        used = asyncio.run(run(store))
        assert tags(store)[0] != used


def test_two_stores_in_one_context_keep_apart(tmp_path: Path) -> None:
    with (
        kvstore.open(tmp_path / "a", durability="async") as one,
        kvstore.open(tmp_path / "b", durability="async") as two,
    ):
        with one.changeset() as first, two.changeset() as second:
            one.put(b"k", b"1")
            two.put(b"k", b"1")
        assert tags(one) == [first.id]
        assert tags(two) == [second.id]
        assert first.id is not None
        assert second.id is not None
        assert first.id.domain != second.id.domain


def test_a_changeset_is_entered_once(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        cs = store.changeset()
        with cs:
            pass
        with pytest.raises(ClosedError), cs:
            pass


def test_each_open_has_a_domain_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        with kvstore.open(tmp_path / "s", durability="async") as store:
            store.put(b"k", b"1")
    with kvstore.open(tmp_path / "s", durability="async") as store:
        (first, _), (second, _) = tags(store)
        assert first != second
        assert min(first, second) > 0
