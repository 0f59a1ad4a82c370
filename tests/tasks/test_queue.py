"""The task queue: atomic changes, claims, time, waiting, threads, limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.base.clock import ManualClock
from kvstore.errors import ClosedError, DependencyError, LockedError, NotAStoreError, UsageError
from kvstore.storage.journal import Journal
from kvstore.tasks import NewTask, Task, TaskRef, Tasks
from tests.harness.disk import MemoryDisk

SECOND = 1_000_000_000


def test_a_task_is_claimed_in_the_order_of_availability(tasks: Tasks, clock: ManualClock) -> None:
    for name, at in (("late", 990), ("early", 980), ("future", 1001)):
        tasks.insert("q", name.encode(), available_at=at * SECOND)
    first, second, third = (tasks.claim(["q"]) for _ in range(3))
    assert first is not None
    assert second is not None
    assert (first.value, second.value, third) == (b"early", b"late", None)
    clock.advance(SECOND)
    future = tasks.claim(["q"])
    assert future is not None
    assert future.value == b"future"


def test_equal_times_are_served_in_the_order_of_insertion(tasks: Tasks) -> None:
    tasks.modify(inserts=[NewTask("q", b"%d" % number, available_at=0) for number in range(20)])
    for number in range(20, 40):
        tasks.insert("q", b"%d" % number, available_at=0)
    claimed = [tasks.claim(["q"]) for _ in range(40)]
    assert [task.value for task in claimed if task] == [b"%d" % number for number in range(40)]


def test_claims_take_from_several_queues_whatever_waited_longest(tasks: Tasks) -> None:
    tasks.insert("a", b"2", available_at=2)
    tasks.insert("b", b"1", available_at=1)
    tasks.insert("c", b"0", available_at=0)
    claimed = [tasks.claim(["a", "b"]) for _ in range(3)]
    assert [task and task.value for task in claimed] == [b"1", b"2", None]


def test_a_claim_hides_the_task_and_counts_the_attempt(tasks: Tasks, clock: ManualClock) -> None:
    inserted = tasks.insert("q", b"work")
    claimed = tasks.claim(["q"], hold=10, claimant="me")
    assert claimed is not None
    assert (claimed.id, claimed.version, claimed.attempt) == (inserted.id, 2, 1)
    assert (claimed.claimant, claimed.available_at) == ("me", clock.wall_ns() + 10 * SECOND)
    assert tasks.claim(["q"]) is None
    assert tasks.sizes() == {"q": (0, 1)}
    clock.advance(10 * SECOND)
    again = tasks.claim(["q"])
    assert again is not None
    assert (again.id, again.version, again.attempt) == (inserted.id, 3, 2)


def test_a_late_claimant_whose_task_was_reassigned_cannot_commit(
    tasks: Tasks, clock: ManualClock
) -> None:
    tasks.insert("q", b"work")
    late = tasks.claim(["q"], hold=10)
    assert late is not None
    clock.advance(11 * SECOND)
    current = tasks.claim(["q"], hold=10)
    assert current is not None
    with pytest.raises(DependencyError) as caught:
        tasks.modify(deletes=[late], inserts=[NewTask("done", b"by the late one")])
    assert caught.value.failures == ((late.id, 2, 3),)
    with pytest.raises(DependencyError):
        tasks.renew(late)
    tasks.modify(deletes=[current], inserts=[NewTask("done", b"by the current one")])
    assert [task.value for task in tasks.list("done")] == [b"by the current one"]


def test_a_late_claimant_whose_task_nobody_took_may_still_commit(
    tasks: Tasks, clock: ManualClock
) -> None:
    tasks.insert("q")
    late = tasks.claim(["q"], hold=10)
    assert late is not None
    clock.advance(1000 * SECOND)
    tasks.modify(deletes=[late])
    assert tasks.sizes() == {}


def test_renewing_keeps_a_task_and_its_progress(tasks: Tasks, clock: ManualClock) -> None:
    tasks.insert("q")
    task = tasks.claim(["q"], hold=10)
    assert task is not None
    for part in range(3):
        clock.advance(9 * SECOND)
        task = tasks.renew(task, hold=10, progress=b"%d" % part)
        assert tasks.claim(["q"]) is None
    task = tasks.renew(task, hold=10)
    clock.advance(11 * SECOND)
    again = tasks.claim(["q"])
    assert again is not None
    assert again.progress == b"2"


def test_a_change_does_all_or_names_everything_that_failed(tasks: Tasks) -> None:
    kept = tasks.insert("q", b"kept")
    stale = tasks.insert("q", b"stale")
    current = tasks.modify(changes=[replace(stale, value=b"newer")]).changed[0]
    before = [tasks.get(kept.id), tasks.get(stale.id)]
    with pytest.raises(DependencyError) as caught:
        tasks.modify(
            inserts=[NewTask("q", b"new", id="new"), NewTask("q", id=kept.id)],
            changes=[replace(stale, value=b"oldest")],
            deletes=[kept.__class__(id="nobody", version=4, queue="q", available_at=0)],
            depends=[TaskRef(current.id, 9), TaskRef("gone", 1), current],
        )
    assert caught.value.failures == (
        (kept.id, None, 1),
        (stale.id, 1, 2),
        ("nobody", 4, None),
        (current.id, 9, 2),
        ("gone", 1, None),
    )
    assert "absent" in str(caught.value)
    assert [tasks.get(kept.id), tasks.get(stale.id), tasks.get("new")] == [*before, None]


def test_one_change_inserts_changes_moves_and_deletes(tasks: Tasks) -> None:
    one, two = tasks.insert("a", b"1"), tasks.insert("a", b"2")
    done = tasks.modify(
        inserts=[NewTask("b", b"3")],
        changes=[replace(one, queue="c")],
        deletes=[two],
        depends=[one],
    )
    assert done.changed[0].version == 2
    assert {queue: size.total for queue, size in tasks.sizes().items()} == {"b": 1, "c": 1}


@pytest.mark.parametrize("wrong", ["twice", "queue", "value", "time", "string", "hold"])
def test_wrong_calls_are_refused_and_change_nothing(tasks: Tasks, wrong: str) -> None:
    task = tasks.insert("q")
    calls: dict[str, Callable[[], object]] = {
        "twice": lambda: tasks.modify(changes=[task], deletes=[task]),
        "queue": lambda: tasks.insert(""),
        "value": lambda: tasks.modify(changes=[replace(task, value="text")]),  # type: ignore[arg-type]
        "time": lambda: tasks.insert("q", available_at=-1),
        "string": lambda: tasks.claim("q"),
        "hold": lambda: tasks.claim(["q"], hold=0),
    }
    with pytest.raises(UsageError):
        calls[wrong]()
    assert tasks.list("q") == [task]


def test_a_waiting_claim_gets_a_task_as_soon_as_it_is_inserted(tasks: Tasks) -> None:
    got: list[Task | None] = []
    waiter = threading.Thread(target=lambda: got.append(tasks.claim(["q"], wait=60)))
    waiter.start()
    inserted = tasks.insert("q", b"work")
    waiter.join(120)
    assert got[0] is not None
    assert got[0].id == inserted.id


def test_a_waiting_claim_gets_a_task_when_its_time_comes(tasks: Tasks, clock: ManualClock) -> None:
    tasks.insert("q", b"later", available_at=clock.wall_ns() + 40 * SECOND)
    got: list[Task | None] = []
    waiter = threading.Thread(target=lambda: got.append(tasks.claim(["q"], wait=60)))
    waiter.start()
    clock.advance(41 * SECOND)
    while not got:
        tasks.wake()
        waiter.join(0.01)
    assert got[0] is not None


def test_a_waiting_claim_gives_up_at_its_deadline(tasks: Tasks, clock: ManualClock) -> None:
    got: list[Task | None] = []
    waiter = threading.Thread(target=lambda: got.append(tasks.claim(["q"], wait=60)))
    waiter.start()
    while not got:
        clock.advance(61 * SECOND)
        tasks.wake()
        waiter.join(0.01)
    assert got == [None]


def test_closing_ends_waiting_claims(tasks: Tasks) -> None:
    got: list[BaseException] = []

    def wait() -> None:
        try:
            tasks.claim(["q"], wait=float("inf"))
        except ClosedError as error:
            got.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    tasks.close()
    tasks.close()
    waiter.join(120)
    assert len(got) == 1
    with pytest.raises(ClosedError):
        tasks.insert("q")


def test_threads_claim_each_task_once(tmp_path: Path) -> None:
    with Tasks.open(tmp_path) as tasks:
        tasks.modify(inserts=[NewTask("q", b"%d" % number) for number in range(60)])
        done: list[bytes] = []

        def work() -> None:
            while (task := tasks.claim(["q"])) is not None:
                tasks.modify(deletes=[task])
                done.append(task.value)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(done, key=int) == [b"%d" % number for number in range(60)]
    with Tasks.open(tmp_path) as tasks:
        assert tasks.sizes() == {}


def test_tasks_outlive_the_process_with_versions_times_and_progress(
    tmp_path: Path, clock: ManualClock
) -> None:
    with Tasks.open(tmp_path, clock=clock) as tasks:
        tasks.insert("q", b"work")
        claimed = tasks.claim(["q"], hold=10, claimant="me")
        assert claimed is not None
        renewed = tasks.renew(claimed, hold=10, progress=b"half")
        tasks.insert("other", b"\xfe\xfd")
    for compact in (False, True):
        with Tasks.open(tmp_path, clock=clock) as tasks:
            assert tasks.get(renewed.id) == renewed
            assert tasks.claim(["q"]) is None
            assert [task.value for task in tasks.list("other")] == [b"\xfe\xfd"]
            if compact:
                tasks.compact()
    with Tasks.open(tmp_path, clock=clock) as tasks:
        tasks.modify(deletes=[renewed])


def test_a_clock_set_back_over_a_restart_gives_no_id_twice(
    tmp_path: Path, clock: ManualClock
) -> None:
    ids = set()
    for _ in range(3):
        with Tasks.open(tmp_path, clock=clock) as tasks:
            for _ in range(3):
                task = tasks.insert("q")
                ids.add(task.id)
                tasks.modify(deletes=[task])
        clock.set(clock.wall_ns() - 100 * SECOND)
    assert len(ids) == 9


def test_one_process_has_the_queue_and_other_journals_are_refused(tmp_path: Path) -> None:
    with Tasks.open(tmp_path / "tasks"), pytest.raises(LockedError):
        Tasks.open(tmp_path / "tasks")
    Journal.open(tmp_path / "memory", content="memory").close()
    with pytest.raises(NotAStoreError):
        Tasks.open(tmp_path / "memory")


def test_a_power_cut_takes_back_a_claim_at_most_and_never_what_was_committed(
    clock: ManualClock,
) -> None:
    disk = MemoryDisk()
    tasks = Tasks.open("/tasks", clock=clock, files=disk)
    tasks.insert("q", b"work")
    claimed = tasks.claim(["q"])
    assert claimed is not None
    cuts = list(disk.power_cuts())
    tasks.modify(deletes=[claimed], inserts=[NewTask("done")])
    for image in cuts:
        with Tasks.open("/tasks", clock=clock, files=image) as found:
            assert [task.version for task in found.list("q")] in ([1], [2])
    for image in disk.power_cuts():
        with Tasks.open("/tasks", clock=clock, files=image) as found:
            assert {queue: size.total for queue, size in found.sizes().items()} == {"done": 1}
