"""Quiescent points: whole changesets only, and a stop where something is missing."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import Epoch, Store, Timestamp
from kvstore.changes import epochs
from kvstore.changes.epochs import Audit
from kvstore.codec.keys import encode_change_key
from kvstore.engine import CHANGES
from kvstore.errors import ClosedError, CorruptionError, EventsMissingError
from kvstore.feeds import feed
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def epoch(begin: int, end: int, events: int, *, quiescent: bool = True, domain: int = 7) -> Epoch:
    return Epoch(domain, begin, end, events, Timestamp(end * 10), quiescent)


def apply(store: Store, since: int = 0) -> tuple[dict[bytes, bytes], list[Timestamp]]:
    """The state that the points add up to, checked at each."""
    state = dict(store.scan(as_of=since)) if since else {}
    times = []
    for point in store.feeds.quiescent_points(since):
        for change in point.changes():
            if change.op == "put":
                assert change.value is not None
                state[change.key] = change.value
            elif change.op == "delete":
                state.pop(change.key, None)
            else:
                assert change.end_key is not None
                for key in [key for key in state if change.key <= key < change.end_key]:
                    del state[key]
        assert state == dict(store.scan(as_of=point.timestamp))
        times.append(point.timestamp)
    return state, times


# -- the audit, without a store -------------------------------------------------------------


def test_epochs_that_fit_pass() -> None:
    audit = Audit()
    audit.add((7, 3), 2)
    audit.add((7, 5), 1)
    audit.add((0, 0), 9)  # restored: counted by no epoch
    audit.close(epoch(0, 4, 2, quiescent=False))
    audit.close(epoch(4, 9, 1))
    audit.close(epoch(9, 12, 0))
    audit.add((8, 1), 1)
    audit.close(epoch(0, 5, 1, domain=8))


def test_a_gap_between_epochs_stops_the_reader() -> None:
    audit = Audit(after=epoch(0, 4, 1))
    with pytest.raises(EventsMissingError, match="begins at 5"):
        audit.close(epoch(5, 9, 0))


def test_a_domain_that_does_not_begin_at_its_beginning_is_a_gap() -> None:
    audit = Audit(after=epoch(0, 4, 1))
    with pytest.raises(EventsMissingError, match="begins at 3"):
        audit.close(epoch(3, 9, 0, domain=8))


@pytest.mark.parametrize("seen", [0, 1, 3])
def test_a_wrong_count_stops_the_reader(seen: int) -> None:
    audit = Audit()
    if seen:
        audit.add((7, 2), seen)
    with pytest.raises(EventsMissingError, match=f"counts 2 events, {seen} are there"):
        audit.close(epoch(0, 4, 2))


def test_changes_in_no_epoch_stop_the_reader_at_the_next_quiescent_point() -> None:
    audit = Audit()
    audit.add((7, 99), 1)
    audit.close(epoch(0, 4, 0, quiescent=False))
    with pytest.raises(EventsMissingError, match="in no epoch"):
        audit.close(epoch(4, 9, 0))


# -- on a store -----------------------------------------------------------------------------


def test_a_changeset_appears_whole(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        before = store.put(b"a", b"0")
        with store.changeset():
            store.put(b"a", b"1")
            store.put(b"b", b"1")
            assert apply(store)[1] == [before]
            store.delete(b"a")
        state, times = apply(store)
        assert state == {b"b": b"1"}
        assert len(times) == 2, "the half-done states were never handed out"


def test_points_of_concurrent_changesets_hold_whole_ones(tmp_path: Path) -> None:
    """Each changeset moves 10 keys to its own number: a point shows all ten, or none."""
    with kvstore.open(tmp_path / "s", durability="async") as store:

        def work(worker: int) -> None:
            for number in range(30):
                with store.changeset():
                    for part in range(10):
                        store.put(b"%d/%d" % (worker, part), b"%d" % number)

        workers = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
        for thread in workers:
            thread.start()
        store.reshard(3)
        for thread in workers:
            thread.join()
        for point in store.feeds.quiescent_points():
            for worker in range(3):
                prefix = b"%d/" % worker
                rows = dict(store.scan(prefix=prefix, as_of=point.timestamp))
                assert len(rows) in (0, 10)
                assert len(set(rows.values())) <= 1
        state, times = apply(store)
        assert times[-1] == store.upper - 1 or state == dict(store.scan())


def test_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        store.put(b"a", b"1")
        reader = store.feeds.quiescent_points()
        first = [point.timestamp for point in reader]
        assert list(reader) == []
        second = store.put(b"b", b"1")
        assert [point.timestamp for point in reader] == [second]
        assert first < [second]


@pytest.mark.damages_store
def test_a_missing_entry_is_noticed(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        stamps = [store.put(b"%d" % number, b"1") for number in range(5)]
        batch = parts_of(store).engine.batch()
        stream = store.generations()[0].streams[0]
        batch.delete(encode_change_key(stream, stamps[2]), parts_of(store).engine.families[CHANGES])
        parts_of(store).engine.write(batch)
        reached = iter(store.feeds.quiescent_points())
        assert [next(reached).timestamp, next(reached).timestamp] == stamps[:2]
        with pytest.raises(EventsMissingError) as raised:
            next(reached)
        assert isinstance(raised.value, CorruptionError)
        beyond = [point.timestamp for point in store.feeds.quiescent_points(stamps[2])]
        assert beyond == stamps[3:], "what lies after it is whole"


def test_a_changeset_over_the_trimmed_part_of_the_index_is_not_taken_for_a_loss(
    tmp_path: Path,
) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        with store.changeset():
            store.put(b"a", b"1")
            middle = store.put(b"a", b"2")
            store.gc(before=middle)
            store.put(b"a", b"3")
        last = store.put(b"a", b"4")
        state, times = apply(store, middle)
        assert state == {b"a": b"4"}
        assert times == [last]


def test_an_epoch_over_the_trimmed_part_is_not_counted_while_no_quiescent_one_follows(
    tmp_path: Path,
) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        first, second = store.changeset(), store.changeset()
        first.__enter__()
        middle = [store.put(b"a", b"%d" % number) for number in range(3)][1]
        second.__enter__()
        store.gc(before=middle)
        first.__exit__(None, None, None)  # closes an epoch of three events; two are trimmed
        assert list(store.feeds.quiescent_points(middle)) == []
        second.__exit__(None, None, None)
        last = store.put(b"a", b"4")
        assert apply(store, middle) == ({b"a": b"4"}, [last])


def test_points_survive_trimming_restarts_and_positions_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "EPOCHS_PENDING_MAX", 2)
    for _ in range(3):
        with kvstore.open(tmp_path / "s", durability="async") as store:
            stamps = [store.put(b"%d" % number, b"1") for number in range(6)]
            with store.changeset():
                store.put(b"x", b"1")
                middle = store.put(b"x", b"2")
            assert apply(store, stamps[2])[1][:3] == stamps[3:6]
            assert apply(store, middle - 1)[0] == dict(store.scan())
            store.gc(before=stamps[1])
            assert apply(store, stamps[1])[0] == dict(store.scan())


@given(st.lists(st.sampled_from(["open", "close", "put", "range", "reopen", "read"]), max_size=40))
def test_every_point_of_a_random_history_checks(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = kvstore.open(Path(directory) / "s", durability="async")
        stack: list[kvstore.Changeset] = []
        for number, step in enumerate(steps):
            if step == "open":
                stack.append(store.changeset())
                stack[-1].__enter__()
            elif step == "close" and stack:
                stack.pop().__exit__(None, None, None)
            elif step == "put":
                store.put(b"%d" % (number % 5), b"%d" % number)
            elif step == "range":
                store.delete_range(b"1", b"3")
            elif step == "reopen":
                store.close()
                while stack:
                    stack.pop().__exit__(None, None, None)
                store = kvstore.open(Path(directory) / "s", durability="async")
            elif step == "read":
                apply(store)
        while stack:
            stack.pop().__exit__(None, None, None)
        assert apply(store)[0] == dict(store.scan())
        store.close()


def test_gc_beside_a_reader_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        for number in range(5):
            store.put(b"%d" % number, b"v")
        find = feed.find_anchor

        def late(*arguments: Any, **options: Any) -> Any:
            found = find(*arguments, **options)
            store.gc(before=store.now())
            return found

        monkeypatch.setattr(feed, "find_anchor", late)
        points = list(store.feeds.quiescent_points())
        assert [len(list(point.changes())) for point in points] == [1] * 5
        assert store.gc(before=store.now()).since > points[-1].timestamp  # it released its pin


def test_who_waits_for_quiescence_hears_that_the_store_was_closed(tmp_path: Path) -> None:
    store = kvstore.open(tmp_path / "s")
    heard: list[BaseException] = []
    store.changeset().__enter__()

    def force() -> None:
        try:
            store.force_quiescence()
        except ClosedError as error:
            heard.append(error)

    waiting = threading.Thread(target=force)
    waiting.start()
    while not parts_of(store).changesets.forcing:
        pass
    store.close()
    waiting.join(120)
    assert len(heard) == 1
