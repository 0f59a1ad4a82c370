"""Workers: they run handlers on tasks until each task is done, even if a process dies meanwhile.

    worker = Worker(tasks, {"imports": do_import})
    with worker.running(threads=2):
        ...

    def do_import(job: Job) -> Sequence[NewTask]:
        for part in parts_after(job.progress):      # resumes where the last attempt stopped
            ...
            job.save(part.name)
        return [NewTask("verify", job.value)]       # inserted as the task is deleted

Invariants
1. Only the holder of the newest version deletes a task, in one change with the insertion of its
   follow-up tasks. So these are inserted once, however often the task was begun.
2. While a handler runs, its task is renewed. A renewal that fails means that another worker has the
   task, and nothing that the handler still does to the task is recorded.
3. A task that fails is tried again, later each time. After `attempts_max` claims it becomes a dead
   letter of its queue, and stays there until it is revived.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum

from kvstore.background import Failures
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    DependencyError,
    FencedError,
    PoisonedError,
    UsageError,
)
from kvstore.forks import own
from kvstore.limits import TASK_WORKER_DELAY_S, TASK_WORKER_DELAY_S_MAX
from kvstore.tasks.queue import HOLD_S, Tasks
from kvstore.tasks.task import NewTask, Task
from kvstore.timestamp import NS_PER_SECOND

DEAD_SUFFIX = "/dead"
IDLE_WAIT_S = 0.5
"""The time that an idle worker's claim waits before the worker checks for a stop."""

RENEWALS_PER_HOLD = 3
"""Renewals in the time of one hold: one of them may fail without losing the task."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The number of attempts of a task, and the wait after a failed one."""

    attempts_max: int = 5
    first_s: float = 1.0
    factor: float = 2.0
    longest_s: float = 300.0

    def delay_ns(self, attempt: int) -> int:
        """The wait after the failure of attempt number `attempt`, which counts from 1."""
        exponent = min(max(attempt - 1, 0), 64)  # 2**64 seconds: beyond any longest_s
        seconds = min(self.first_s * self.factor**exponent, self.longest_s)
        return int(seconds * NS_PER_SECOND)


class Outcome(Enum):
    """The end of a task that a worker had claimed."""

    DONE = "done"
    RETRY = "retry"
    DEAD = "dead"
    LOST = "lost"


class Job:
    """A claimed task, as its handler sees it."""

    def __init__(self, tasks: Tasks, task: Task, *, hold: float) -> None:
        self._tasks = tasks
        self._task = task
        self._hold = hold
        self._lock = threading.Lock()
        self._lost = False
        own(self, f"the claim of task {task.id}")

    @property
    def task(self) -> Task:
        """The task at its newest version."""
        return self._task

    @property
    def value(self) -> bytes:
        """The value of the task, which the handler interprets."""
        return self._task.value

    @property
    def progress(self) -> bytes:
        """The progress that this or an earlier attempt saved. Empty at first."""
        return self._task.progress

    @property
    def lost(self) -> bool:
        """Whether another worker is known to have the task. Stop then."""
        return self._lost

    def save(self, progress: bytes) -> None:
        """Save the progress, and keep the task. Raises `FencedError` if it was lost.

        Cheap, but written to the journal: once a second is plenty. A crash of the machine may
        lose the last save, so redoing a step must be harmless.
        """
        self._renew(progress)

    def renew(self) -> None:
        """Keep the task. Raises `FencedError` if it was lost."""
        self._renew(None)

    def _renew(self, progress: bytes | None) -> None:
        with self._lock:
            if not self._lost:
                try:
                    self._task = self._tasks.renew(self._task, hold=self._hold, progress=progress)
                except DependencyError:
                    self._lost = True
            if self._lost:
                raise FencedError(f"task {self._task.id}")

    def finish(self, *, inserts: Sequence[NewTask] = (), become: Task | None = None) -> bool:
        """Delete or change the task, and insert its follow-up tasks. False if it was lost."""
        with self._lock:
            if self._lost:
                return False
            try:
                self._tasks.modify(
                    inserts=inserts,
                    changes=[] if become is None else [become],
                    deletes=[self._task] if become is None else [],
                )
            except DependencyError:
                self._lost = True
            return not self._lost


Handler = Callable[[Job], "Sequence[NewTask] | None"]


class Worker:
    """Claims tasks and hands them to the handler of their queue."""

    def __init__(
        self,
        tasks: Tasks,
        handlers: Mapping[str, Handler],
        *,
        hold: float = HOLD_S,
        retry: Retry | None = None,
        name: str = "worker",
    ) -> None:
        if not handlers:
            raise UsageError("a worker without handlers has nothing to do", "add a handler")
        self._tasks = tasks
        self._handlers = dict(handlers)
        self._hold = hold
        self._retry = Retry() if retry is None else retry
        self._name = name

    def run_one(self, *, wait: float = 0.0) -> Outcome | None:
        """Do one task; None if none came within `wait` seconds."""
        task = self._tasks.claim(
            list(self._handlers), wait=wait, hold=self._hold, claimant=self._name
        )
        if task is None:
            return None
        job = Job(self._tasks, task, hold=self._hold)
        if task.attempt > self._retry.attempts_max:  # the task ends its worker each time
            return self._set_aside(job, "its worker died at every attempt", retry=False)
        try:
            with _renewing(job, self._hold / RENEWALS_PER_HOLD, self._tasks.failures):
                inserts = self._handlers[task.queue](job)
            return Outcome.DONE if job.finish(inserts=inserts or ()) else Outcome.LOST
        except FencedError:
            return Outcome.LOST
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            self._tasks.failures.note(f"task {task.id} of queue {task.queue}", error, delays=False)
            # A closed store is opened again. Other wrong calls, and damage, would fail again.
            hopeless = isinstance(error, UsageError | CorruptionError)
            hopeless = hopeless and not isinstance(error, ClosedError)
            problem = f"{type(error).__name__}: {error}"
            return self._set_aside(job, problem, retry=not hopeless)

    def run(self, stop: threading.Event) -> None:
        """Do tasks until `stop` is set or the queue is closed. Finishes the current task first.

        A failure of the queue itself is logged (`kvstore.tasks`) and noted in `Tasks.failures`; the
        worker continues after a while. Raises `PoisonedError` once the queue has to be reopened.
        """
        with suppress(ClosedError):
            while not stop.is_set():
                delay_s = self._try_one()
                stop.wait(delay_s)

    def _try_one(self) -> float:
        """Do one task, if there is one. Returns the wait after a failure of the queue."""
        failures = self._tasks.failures
        try:
            self.run_one(wait=IDLE_WAIT_S)
        except Exception as error:
            if isinstance(error, ClosedError):
                raise
            failures.note(f"the task worker {self._name}", error)
            if isinstance(error, PoisonedError):
                raise
            return failures.delay_s(TASK_WORKER_DELAY_S, TASK_WORKER_DELAY_S_MAX)
        failures.succeeded()
        return 0.0

    @contextmanager
    def running(self, *, threads: int = 1) -> Iterator[None]:
        """Run in `threads` threads within a `with` block."""
        stop = threading.Event()
        running = [
            threading.Thread(target=self.run, args=(stop,), name=f"{self._name}-{number}")
            for number in range(threads)
        ]
        for thread in running:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in running:
                thread.join()

    def _set_aside(self, job: Job, problem: str, *, retry: bool) -> Outcome:
        """Put a failed task back for later, or among the dead letters."""
        task, now = job.task, self._tasks.now()
        later = retry and task.attempt < self._retry.attempts_max
        become = replace(
            task,
            queue=task.queue if later else task.queue + DEAD_SUFFIX,
            available_at=now + (self._retry.delay_ns(task.attempt) if later else 0),
            claimant="",
            error=problem,
        )
        if not job.finish(become=become):
            return Outcome.LOST
        return Outcome.RETRY if later else Outcome.DEAD


def dead_letters(tasks: Tasks, queue: str) -> list[Task]:
    """The tasks of `queue` that ran out of attempts, with the error of the last attempt."""
    return tasks.list(queue + DEAD_SUFFIX)


def revive(tasks: Tasks, task: Task) -> Task:
    """Put a dead letter back into its queue, available now and with all its attempts.

    Keeps its progress. Raises `UsageError` if it is no dead letter, `DependencyError` if it has
    changed.
    """
    if not task.queue.endswith(DEAD_SUFFIX):
        raise UsageError(
            f"task {task.id} in queue {task.queue} is not a dead letter",
            "see kvstore.tasks.dead_letters(tasks, queue)",
        )
    queue = task.queue.removesuffix(DEAD_SUFFIX)
    back = replace(task, queue=queue, available_at=tasks.now(), attempt=0)
    return tasks.modify(changes=[back]).changed[0]


@contextmanager
def _renewing(job: Job, seconds: float, failures: Failures) -> Iterator[None]:
    """Renew a job's task at intervals while the handler runs. A failure is noted, and the next
    renewal may still be in time."""
    stopped = threading.Event()
    owner = os.getpid()

    def renew() -> None:
        while not stopped.wait(seconds) and _renewed(job, failures):
            pass

    thread = threading.Thread(target=renew, name="kvstore-task-renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        if os.getpid() == owner:  # a fork has no such thread, and perhaps a locked event
            stopped.set()
            thread.join()


def _renewed(job: Job, failures: Failures) -> bool:
    """Renew a job's task; False if no other try can succeed."""
    try:
        job.renew()
    except (FencedError, ClosedError):  # `finish` will tell
        return False
    except Exception as error:  # noqa: BLE001  # a thread that dies would lose the task
        failures.note(f"renewing task {job.task.id}", error, delays=False)
        return not isinstance(error, PoisonedError)
    return True
