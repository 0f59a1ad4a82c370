"""Commits that go to the engine in pieces, and end between two of them: killed, cut off from power,
without room on the disk, interrupted. Each is there as a whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import CorruptionError, ForkedError, StorageError, UsageError
from kvstore.mvcc.meta import STAGED, Meta
from kvstore.store import Store
from tests.crash import large
from tests.crash.test_kill import check_feed
from tests.crash.test_power_cut import live_log
from tests.harness.bounds import bounds
from tests.harness.forks import reap
from tests.harness.kills import run_until_killed
from tests.harness.parts import parts_of
from tests.harness.seeds import seeded
from tests.harness.system_faults import faults

ENGINES = ["rocksdb", "memory"]


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    with bounds(large.LIMITS):
        yield


def begun(place: Path, engine: str, streams: int = 1) -> dict[bytes, bytes]:
    """A store at the place, as it is before the large commit, and its state."""
    place.mkdir(exist_ok=True)
    with large.open_store(place, engine) as store:
        large.begin(store, streams)
        return dict(store.scan())


def check_left(place: Path, before: dict[bytes, bytes], *, is_whole: bool | None = None) -> bool:
    """Check what a crash left: one of two states, for every reader, and a store that goes on.
    Returns whether the commit is there."""
    after = large.state_after(before)
    engine = kvstore.opening.engine_at(place / "store")
    with kvstore.open_read_only(place / "store") as reader:
        seen, upper = dict(reader.scan()), reader.upper
        assert seen in (before, after)
        check_feed(reader)
    if engine == "rocksdb":
        with kvstore.follow(place / "store") as follower:
            assert dict(follower.scan()) == seen
            assert follower.upper == upper
    with large.open_store(place) as store:
        found = dict(store.scan())
        assert found == seen
        assert is_whole is None or (found == after) is is_whole
        assert store.upper >= upper
        assert store.requests.is_done(large.TOKEN) is (found == after)
        assert Meta(parts_of(store).engine).read(STAGED) is None
        store.verify().require_ok()
        check_feed(store)
        again(store, found)
    with large.open_store(place) as store:
        store.verify().require_ok()
        check_feed(store)
    return found == after


def again(store: Store, before: dict[bytes, bytes]) -> None:
    """The next commits, perhaps at the time of the one that was lost: one, then the same again."""
    upper = store.upper
    first = store.put(b"k01", b"another")
    assert first >= upper
    assert [change.key for change in store.changes(upper - 1)] == [b"k01"]
    assert dict(store.scan()) == {**before, b"k01": b"another"}
    at = large.write_large(store, None)
    assert dict(store.scan()) == large.state_after({**before, b"k01": b"another"})
    assert dict(store.scan(as_of=at - 1)) == {**before, b"k01": b"another"}


@pytest.mark.parametrize(("engine", "streams"), [("rocksdb", 3), ("memory", 1)])
def test_a_process_that_is_killed_between_any_two_pieces_leaves_all_or_nothing(
    spawn: Any, tmp_path: Path, engine: str, streams: int
) -> None:
    before = begun(tmp_path / "begun", engine, streams)
    found, stage = [], 0
    while True:
        place = shutil.copytree(tmp_path / "begun", tmp_path / f"{stage}")
        said = run_until_killed(spawn, large.die_between, (place, stage), lambda _: False, 0.0)
        found.append(check_left(place, before))
        if said[-1][0] == "done":
            break
        assert said[-1][0] == "begun"
        stage += 1
    assert stage > 6
    assert found == sorted(found)
    assert found.count(False) > 5


@pytest.mark.parametrize("engine", ENGINES)
def test_nobody_sees_a_piece_before_the_last_one(tmp_path: Path, engine: str) -> None:
    """Reads of the store, of a follower, of a handle that reads its files, and of copies of the
    engine, which are opened to be read and to be written."""
    before = begun(tmp_path, engine)
    after, copies = large.state_after(before), list[Path]()
    follower = kvstore.follow(tmp_path / "store") if engine == "rocksdb" else None

    with large.open_store(tmp_path) as store:
        first, held = store.upper, store.snapshot()

        def look(number: int) -> None:
            assert dict(store.scan()) == dict(held.scan()) == before
            assert store.get(b"k01") is None
            assert store.get_many([b"k00", b"brief"]) == [b"old", None]
            assert [version.value for version in store.history(b"k00")] == [b"old"]
            assert list(store.changes(first - 1, first)) == [] if store.upper > first else True
            if follower is not None:
                follower.refresh()
                assert dict(follower.scan()) == before
                assert follower.upper <= store.upper
                copies.append(tmp_path / f"copy-{number}" / "store")
                copies[-1].parent.mkdir()
                parts_of(store).engine.checkpoint(copies[-1])
            with kvstore.open_read_only(tmp_path / "store") as reader:
                assert dict(reader.scan()) == before

        count = len(pieces_of(tmp_path / "counted", before, engine))

        def unless_last(number: int) -> None:
            if number < count - 1:
                look(number)

        with large.acting(store, unless_last) as numbers:
            large.write_large(store)
        assert len(numbers) == count > 6
        assert dict(store.scan()) == after
        assert dict(held.scan()) == before
        held.close()
        if follower is not None:
            follower.refresh()
            assert dict(follower.scan()) == after
            follower.close()
    for copy in copies:
        check_left(copy.parent, before, is_whole=False)


def pieces_of(place: Path, before: dict[bytes, bytes], engine: str) -> list[int]:
    """The writes of the engine that make the large commit."""
    assert begun(place, engine) == before
    with large.open_store(place) as store, large.acting(store, lambda _: None) as numbers:
        large.write_large(store)
        return list(numbers)


def test_a_power_cut_inside_a_large_commit_leaves_all_or_nothing(tmp_path: Path) -> None:
    before = begun(tmp_path, "rocksdb")
    rng = seeded("KVSTORE_LARGE_COMMITS_SEED")
    with large.open_store(tmp_path) as store:
        store.sync()
        synced = live_log(tmp_path / "store").stat().st_size
        large.write_large(store)
        shutil.copytree(tmp_path / "store", tmp_path / "cut")
    whole, found = live_log(tmp_path / "cut").read_bytes(), set()
    for trial in range(8):
        place = tmp_path / f"trial-{trial}"
        shutil.copytree(tmp_path / "cut", place / "store")
        at = rng.randint(synced, len(whole)) if trial else len(whole)
        tail = rng.choice([b"", bytes(len(whole) - at), rng.randbytes(len(whole) - at)])
        live_log(place / "store").write_bytes(whole[:at] + tail)
        if tail:
            kvstore.open(place / "store").close()  # it cuts the torn tail
        found.add(check_left(place, before, is_whole=True if not trial else None))
    assert found == {False, True}


@pytest.mark.parametrize("sticky", [False, True])
def test_a_system_call_that_fails_between_pieces_leaves_all_or_nothing(
    tmp_path: Path, sticky: bool
) -> None:
    before, found = begun(tmp_path / "begun", "memory"), list[bool]()
    place = shutil.copytree(tmp_path / "begun", tmp_path / "counted")
    with faults(place) as calls, large.open_store(place) as store:
        first = len(calls.names)
        large.write_large(store)
        end = len(calls.names)
    for nth in range(first, end):
        place = shutil.copytree(tmp_path / "begun", tmp_path / f"{nth}")
        with faults(place, nth=nth, error=errno.ENOSPC, sticky=sticky) as calls:
            store = large.open_store(place)
            try:
                large.write_large(store)
            except StorageError:
                with pytest.raises(StorageError):
                    store.put(b"k", b"v")
        assert calls.failed
        with suppress(StorageError):  # the journal makes no room for its end
            store.close()
        found.append(check_left(place, before))
    assert found.count(False) > 5
    assert found == sorted(found)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupt_between_any_two_pieces_leaves_a_store_that_works(
    tmp_path: Path, engine: str
) -> None:
    before = begun(tmp_path / "begun", engine)
    after, stage, found = large.state_after(before), 0, list[bool]()

    def interrupt(number: int) -> None:
        if number == stage:
            raise KeyboardInterrupt

    while True:
        place = shutil.copytree(tmp_path / "begun", tmp_path / f"{stage}")
        with large.open_store(place) as store:
            is_over = True
            with large.acting(store, interrupt):
                try:
                    large.write_large(store)
                except KeyboardInterrupt:
                    is_over = False
            seen = dict(store.scan())
            assert seen in (before, after)
            assert Meta(parts_of(store).engine).read(STAGED) is None
            store.verify().require_ok()
            if engine == "rocksdb":
                with kvstore.follow(place / "store") as follower:
                    assert dict(follower.scan()) == seen
            again(store, seen)
        found.append(seen == after)
        if is_over:
            break
        stage += 1
    assert stage > 6
    assert found == sorted(found)


def test_a_fork_between_pieces_disturbs_neither_process(tmp_path: Path) -> None:
    before = begun(tmp_path, "rocksdb")
    statuses = []
    with large.open_store(tmp_path) as store:

        def fork(number: int) -> None:
            if number % 4:
                return
            child = os.fork()
            if not child:
                try:
                    store.get(b"k00")
                except ForkedError:
                    os._exit(0)
                os._exit(1)
            statuses.append(reap(child))

        with large.acting(store, fork):
            large.write_large(store)
        assert dict(store.scan()) == large.state_after(before)
    assert len(statuses) > 1
    assert set(statuses) == {0}
    assert check_left(tmp_path, before, is_whole=True)


def test_the_thread_that_commits_writes_nothing_between_pieces(tmp_path: Path) -> None:
    """A signal handler that wrote would complete the time of the commit, and show half of it."""
    before = begun(tmp_path, "rocksdb")
    with large.open_store(tmp_path) as store:
        inside = parts_of(store).committer.pieces
        refused = []

        def write(_: int) -> None:
            if not inside.is_under_way:
                return
            for call in (
                lambda: store.put(b"k00", b"inside"),
                lambda: store.delete_range(b"k00", b"k05"),
                lambda: store.hold("inside"),
                lambda: store.reshard(2),
                lambda: store.sync(),
            ):
                with pytest.raises(UsageError, match="inside a large commit"):
                    call()
            refused.append(dict(store.scan()) == before)

        with large.acting(store, write):
            large.write_large(store)
        assert len(refused) > 6
        assert all(refused)
        assert dict(store.scan()) == large.state_after(before)


def test_a_record_of_a_time_that_is_complete_is_damage(tmp_path: Path) -> None:
    """To remove the commit of that time would destroy history."""
    begun(tmp_path, "rocksdb")
    with large.open_store(tmp_path) as store:
        at, state = large.write_large(store), dict(store.scan())
        store.put(b"later", b"v")
        engine = parts_of(store).engine
        batch = engine.batch()
        Meta(engine).stage_timestamp(batch, STAGED, at)
        engine.write(batch)
        assert dict(store.scan()) == {**state, b"later": b"v"}
    with pytest.raises(CorruptionError, match="staged"):
        large.open_store(tmp_path)
