"""Workers: done once, retried, set aside, resumed, and powerless once replaced."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.base.clock import ManualClock
from kvstore.errors import ClosedError, FencedError, PoisonedError, StorageError, UsageError
from kvstore.tasks import Job, NewTask, Outcome, Retry, Tasks, Worker, dead_letters, revive

SECOND = 1_000_000_000


def fail(job: Job) -> None:
    raise RuntimeError(f"attempt {job.task.attempt} failed")


def nothing(job: Job) -> None:
    pass


def test_a_task_is_deleted_together_with_the_insertion_of_what_follows(tasks: Tasks) -> None:
    def split(job: Job) -> Sequence[NewTask]:
        return [NewTask("part", part) for part in job.value.split()]

    worker = Worker(tasks, {"whole": split, "part": nothing})
    tasks.insert("whole", b"a b")
    assert worker.run_one() is Outcome.DONE
    assert [task.value for task in tasks.list("part")] == [b"a", b"b"]
    assert [worker.run_one() for _ in range(3)] == [Outcome.DONE, Outcome.DONE, None]
    assert tasks.sizes() == {}


def test_a_failed_task_is_retried_later_each_time_and_then_set_aside(
    tasks: Tasks, clock: ManualClock
) -> None:
    worker = Worker(tasks, {"q": fail}, retry=Retry(attempts_max=3, first_s=1, factor=2))
    tasks.insert("q", b"work")
    for attempt, delay in ((1, 1), (2, 2)):
        assert worker.run_one() is Outcome.RETRY
        (task,) = tasks.list("q")
        assert task.available_at == clock.wall_ns() + delay * SECOND
        assert task.error == f"RuntimeError: attempt {attempt} failed"
        assert worker.run_one() is None
        clock.advance(delay * SECOND)
    assert worker.run_one() is Outcome.DEAD
    (dead,) = dead_letters(tasks, "q")
    assert dead.error == "RuntimeError: attempt 3 failed"
    revived = revive(tasks, dead)
    assert (revived.queue, revived.attempt) == ("q", 0)
    assert Worker(tasks, {"q": nothing}).run_one() is Outcome.DONE
    with pytest.raises(UsageError, match="not a dead letter"):
        revive(tasks, revived)


def test_backoff_grows_to_its_bound() -> None:
    retry = Retry(first_s=1, factor=2, longest_s=10)
    assert [retry.delay_ns(attempt) // SECOND for attempt in (1, 2, 3, 4, 5, 10_000)] == [
        *(1, 2, 4, 8, 10, 10)
    ]


def test_a_task_that_cannot_succeed_is_not_retried(tasks: Tasks) -> None:
    def wrong(job: Job) -> None:
        raise UsageError("no such path")

    tasks.insert("q")
    assert Worker(tasks, {"q": wrong}).run_one() is Outcome.DEAD
    assert dead_letters(tasks, "q")[0].error == "UsageError: no such path"


def test_wrong_followers_set_the_task_aside_and_the_worker_goes_on(tasks: Tasks) -> None:
    tasks.insert("q")
    assert Worker(tasks, {"q": lambda job: [NewTask("")]}).run_one() is Outcome.DEAD


def test_a_task_that_takes_its_worker_down_is_set_aside(tasks: Tasks, clock: ManualClock) -> None:
    tasks.insert("q")
    for _ in range(3):
        assert tasks.claim(["q"], hold=10) is not None  # and its process dies
        clock.advance(10 * SECOND)
    assert Worker(tasks, {"q": nothing}, retry=Retry(attempts_max=3)).run_one() is Outcome.DEAD
    assert "died" in dead_letters(tasks, "q")[0].error


def test_a_resumed_task_goes_on_from_its_progress(tmp_path: Path, clock: ManualClock) -> None:
    steps: list[int] = []

    def handler(job: Job) -> None:
        for step in range(int(job.progress or b"0"), 6):
            if step == 3 and job.task.attempt == 1:
                raise SystemExit  # the process ends before the task is handled
            steps.append(step)
            job.save(b"%d" % (step + 1))

    with Tasks.open(tmp_path, clock=clock) as tasks:
        tasks.insert("q")
        with pytest.raises(SystemExit):
            Worker(tasks, {"q": handler}).run_one()
    clock.advance(60 * SECOND)
    with Tasks.open(tmp_path, clock=clock) as tasks:
        assert Worker(tasks, {"q": handler}).run_one() is Outcome.DONE
    assert steps == [0, 1, 2, 3, 4, 5]


def test_a_late_worker_whose_task_was_reassigned_commits_nothing(
    tasks: Tasks, clock: ManualClock
) -> None:
    tasks.insert("q", b"work")

    def overtaken(job: Job) -> Sequence[NewTask]:
        clock.advance(100 * SECOND)
        other = Worker(tasks, {"q": lambda job: [NewTask("done", b"other")]})
        assert other.run_one() is Outcome.DONE
        return [NewTask("done", b"late")]

    assert Worker(tasks, {"q": overtaken}).run_one() is Outcome.LOST
    assert [task.value for task in tasks.list("done")] == [b"other"]


def test_a_late_worker_is_told_when_it_saves(tasks: Tasks, clock: ManualClock) -> None:
    tasks.insert("q")
    told: list[bool] = []

    def overtaken(job: Job) -> None:
        clock.advance(100 * SECOND)
        assert tasks.claim(["q"]) is not None
        for _ in range(2):
            with pytest.raises(FencedError):
                job.save(b"half")
        told.append(job.lost)
        job.renew()

    assert Worker(tasks, {"q": overtaken}).run_one() is Outcome.LOST
    assert told == [True]


def test_a_task_is_renewed_while_its_handler_runs(tasks: Tasks) -> None:
    tasks.insert("q")
    versions: list[int] = []

    def slow(job: Job) -> None:
        while job.task.version < 5:
            threading.Event().wait(0.001)
        versions.append(job.task.version)

    assert Worker(tasks, {"q": slow}, hold=0.01).run_one() is Outcome.DONE
    assert versions[0] >= 5


def test_running_workers_do_everything_and_stop(tmp_path: Path) -> None:
    done: list[bytes] = []
    finished = threading.Event()

    def handler(job: Job) -> None:
        done.append(job.value)
        if len(done) == 30:
            finished.set()

    with Tasks.open(tmp_path) as tasks:
        with Worker(tasks, {"q": handler}).running(threads=3):
            tasks.modify(inserts=[NewTask("q", b"%d" % number) for number in range(30)])
            assert finished.wait(120)
        assert tasks.sizes() == {}
    assert sorted(done, key=int) == [b"%d" % number for number in range(30)]


def test_a_worker_stops_when_its_queue_is_closed(tasks: Tasks) -> None:
    with Worker(tasks, {"q": nothing}).running():
        tasks.close()


def test_a_worker_needs_handlers(tasks: Tasks) -> None:
    with pytest.raises(UsageError):
        Worker(tasks, {})


# -- failures beside the handler --------------------------------------------------------------


class FailsOnce:
    """Wraps a method of the queue: the first call raises, and the second one sets `again`."""

    def __init__(self, owner: object, name: str, error: Exception) -> None:
        self.again = threading.Event()
        self._error: Exception | None = error
        self._inner = getattr(owner, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self.again.set()
        return self._inner(*arguments, **options)


def test_a_worker_goes_on_after_its_queue_failed_and_tells_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread once ended, and tasks waited for ever."""
    tasks = Tasks.open(None)  # with a clock that does not move, an idle worker would wait for ever
    monkeypatch.setattr("kvstore.tasks.TASK_WORKER_DELAY_S", 0.001)
    monkeypatch.setattr(tasks, "claim", FailsOnce(tasks, "claim", OSError("of the disk")))
    done = threading.Event()
    tasks.insert("q", b"work")
    with Worker(tasks, {"q": lambda job: done.set()}).running():
        assert done.wait(120)
    assert tasks.failures.count == 1
    assert "OSError: of the disk" in caplog.text


def test_a_worker_of_a_poisoned_queue_ends_and_says_so(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned = FailsOnce(tasks, "claim", PoisonedError("the journal", "a failed write"))
    monkeypatch.setattr(tasks, "claim", poisoned)
    with pytest.raises(PoisonedError):
        Worker(tasks, {"q": nothing}).run(threading.Event())
    assert tasks.failures.figures("tasks")["tasks_failures"] == 1


def test_a_renewal_that_fails_is_told_and_the_next_one_keeps_the_task(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The renewals once ended with the first failure, and another worker took the task."""
    renew = FailsOnce(tasks, "renew", StorageError("the disk was busy"))
    monkeypatch.setattr(tasks, "renew", renew)
    tasks.insert("q", b"work")

    def wait(job: Job) -> None:
        assert renew.again.wait(120)

    assert Worker(tasks, {"q": wait}, hold=0.003).run_one() is Outcome.DONE
    assert tasks.failures.count == 1
    assert "the disk was busy" in caplog.text


def test_a_task_whose_store_was_closed_meanwhile_is_tried_again(tasks: Tasks) -> None:
    """The task was once set aside for ever, because a closed store counted as a wrong call."""

    def closing(job: Job) -> None:
        raise ClosedError("the store")

    tasks.insert("q", b"work")
    assert Worker(tasks, {"q": closing}).run_one() is Outcome.RETRY
    assert dead_letters(tasks, "q") == []
