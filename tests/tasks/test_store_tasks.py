"""`store.tasks`: the queue lies in the store's directory, is as durable as the store, and does not
disturb its opening and closing."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore.base.clock import ManualClock
from kvstore.errors import ClosedError, UsageError
from kvstore.tasks import NewTask, TaskRef, Tasks

ENGINES = ("rocksdb", "memory")


@pytest.mark.parametrize("engine", ENGINES)
def test_tasks_are_there_when_the_store_is_opened_again(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "store"
    with kvstore.open(path, engine) as store:
        task = store.tasks.insert("q", b"work")
        store.put(b"k", b"v")
    with kvstore.open(path, engine) as store:
        assert store.tasks.get(task.id) == task
        assert store.get(b"k") == b"v"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_that_is_not_asked_for_tasks_has_no_directory_of_them(
    tmp_path: Path, engine: str
) -> None:
    with kvstore.open(tmp_path / "store", engine):
        assert not (tmp_path / "store" / "tasks").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_with_tasks_opens_read_only_without_them(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "store"
    with kvstore.open(path, engine) as store:
        store.put(b"k", b"v")
        store.tasks.insert("q")
    with kvstore.open_read_only(path) as store:
        assert store.get(b"k") == b"v"
        with pytest.raises(UsageError, match="read only"):
            _ = store.tasks


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_takes_no_tasks_along(tmp_path: Path, engine: str) -> None:
    with kvstore.open(tmp_path / "store", engine) as store:
        store.put(b"k", b"v")
        store.tasks.insert("q", b"must not be done twice")
        store.checkpoint(tmp_path / "copy")
    with kvstore.open(tmp_path / "copy", engine) as copy:
        assert copy.get(b"k") == b"v"
        assert copy.tasks.sizes() == {}


def test_a_store_in_memory_has_its_tasks_there() -> None:
    with kvstore.open(None, engine="memory") as store:
        store.tasks.insert("q", b"work")
        task = store.tasks.claim(["q"])
        assert task is not None
        store.tasks.modify(deletes=[TaskRef(task.id, task.version)])
        assert store.tasks.sizes() == {}


def test_tasks_go_by_the_clock_of_the_store() -> None:
    clock = ManualClock(1_000_000_000)
    with kvstore.open(None, engine="memory", clock=clock) as store:
        store.tasks.insert("q", available_at=2_000_000_000)
        assert store.tasks.claim(["q"]) is None
        clock.advance(1_000_000_000)
        assert store.tasks.claim(["q"]) is not None


def test_tasks_are_closed_with_the_store(tmp_path: Path) -> None:
    store = kvstore.open(tmp_path / "store")
    tasks = store.tasks
    assert store.tasks is tasks
    store.close()
    with pytest.raises(ClosedError):
        tasks.insert("q")
    with pytest.raises(ClosedError):
        _ = store.tasks
    Tasks.open(tmp_path / "store" / "tasks").close()  # its lock was released


def journal_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def test_the_journal_of_a_queue_that_stays_open_is_bounded_by_its_tasks(tmp_path: Path) -> None:
    bound, value = 20_000, b"x" * 500
    with Tasks.open(tmp_path, compact_bytes=bound) as tasks:
        tasks.modify(inserts=[NewTask("waiting", value) for _ in range(10)])
        largest = 0
        for _ in range(300):
            tasks.insert("q", value)
            task = tasks.claim(["q"])
            assert task is not None
            tasks.modify(deletes=[task])
            largest = max(largest, journal_bytes(tmp_path))
        waiting = tasks.list("waiting")
    assert bound < largest < 2 * bound
    with Tasks.open(tmp_path) as tasks:
        assert tasks.list("waiting") == waiting
        assert tasks.list("q") == []


def test_the_journal_grows_by_a_factor_of_what_it_holds_before_it_is_rewritten(
    tmp_path: Path,
) -> None:
    value = b"x" * 1000
    with Tasks.open(tmp_path, compact_bytes=1) as tasks:
        for _ in range(50):
            tasks.insert("q", value)
        written = sum(1 for _ in tmp_path.glob("*snapshot*"))
        assert written <= 1
        assert journal_bytes(tmp_path) < 4 * 50 * 1100
