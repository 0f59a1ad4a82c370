"""A queue of tasks in memory, made durable by a journal. Each task is done once.

    with Tasks.open(path) as tasks:
        tasks.insert("imports", b"s3://...")
        task = tasks.claim(["imports"], wait=10)
        ...
        tasks.modify(deletes=[task])

Invariants
1. `modify` does all of a change or none of it, and is one journal record.
2. A claim raises the version. So of two claimants of one task only the later one can commit. The
   `modify` of the earlier one raises a `DependencyError` that names the task.
3. A change is durable, as the journal's policy says, before `modify` returns. Claims and
   renewals do not wait for the disk. A crash that loses one makes its task available sooner, and
   loses all later records of the same log as well.
4. Time comes from the clock that was passed in; recorded times are only replayed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvstore.background import Failures
from kvstore.clock import Clock, Timeline, WallClock
from kvstore.errors import ClosedError, LockedError, UsageError
from kvstore.errors.system import storage_errors
from kvstore.forks import own
from kvstore.journal import OS_FILES, Files, Journal, Sync, replay
from kvstore.limits import (
    JOURNAL_COMPACT_BYTES,
    TASK_COMPACT_FACTOR,
    TASK_HOLD_S_MAX,
    TASK_WAIT_S_MAX,
)
from kvstore.tasks.records import encode
from kvstore.tasks.state import TaskState
from kvstore.tasks.task import NewTask, Task, TaskLike, require_task
from kvstore.timestamp import NS_PER_SECOND

CONTENT = "kvstore.tasks"
"""The content that a task journal's header names."""

HOLD_S = 30.0
"""The default time for which a claim hides its task: long enough to renew in it, short enough
to wait for after a crash."""


@dataclass(frozen=True, slots=True)
class Modified:
    """The result of a change: the tasks in their new state, in the order given."""

    inserted: tuple[Task, ...]
    changed: tuple[Task, ...]


class QueueSize(NamedTuple):
    """The number of tasks of a queue that can be claimed now, and of all its tasks."""

    available: int
    total: int


class Tasks:
    """An open task queue. Safe to use from several threads."""

    def __init__(
        self,
        state: TaskState,
        journal: Journal | None,
        clock: WallClock,
        *,
        compact_bytes: int | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.failures = failures or Failures("kvstore.tasks", clock)
        """The failures of the threads that do these tasks."""
        self._state = state
        self._journal = journal
        self._clock = clock
        self._timeline = Timeline(clock, last=state.recorded_at)
        # The lock is taken by itself: a signal while a condition is entered would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._compact_bytes = JOURNAL_COMPACT_BYTES if compact_bytes is None else compact_bytes
        self._snapshot_bytes = 0 if journal is None else journal.recovery.snapshot_bytes
        self._grown_bytes = 0 if journal is None else journal.recovery.journal_bytes
        own(self, "the task queue", closed="_closed")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        clock: WallClock | None = None,
        sync: Sync | None = None,
        files: Files = OS_FILES,
        compact_bytes: int | None = None,
        failures: Failures | None = None,
    ) -> Tasks:
        """Open or create the queue whose journal is in `path`; None keeps it in memory only.

        Replays the journal. Compacts it now and later, whenever it has grown by `compact_bytes` and
        by a multiple of the size of the tasks. Threads that work on the tasks note failures in
        `failures`. Raises as `Journal.open`.
        """
        state = TaskState()
        journal = None
        if path is not None:
            journal = Journal.open(
                path,
                apply=state.apply,
                restore=state.restore,
                snapshot=state.records,
                content=CONTENT,
                sync=Sync.always() if sync is None else sync,
                files=files,
                compact_bytes=compact_bytes,
            )
        clock = Clock() if clock is None else clock
        return cls(state, journal, clock, compact_bytes=compact_bytes, failures=failures)

    # -- changing -----------------------------------------------------------------------------

    def insert(
        self,
        queue: str,
        value: bytes = b"",
        *,
        available_at: int | None = None,
        id: str | None = None,  # noqa: A002 - the field's word
    ) -> Task:
        """Add one task, by default available now. Raises `DependencyError` if `id` is taken."""
        return self.modify(inserts=[NewTask(queue, value, available_at, id)]).inserted[0]

    def modify(
        self,
        *,
        inserts: Sequence[NewTask] = (),
        changes: Sequence[Task] = (),
        deletes: Sequence[TaskLike] = (),
        depends: Iterable[TaskLike] = (),
    ) -> Modified:
        """Make one atomic change.

        Each item of `changes` is the new state of a task, made by `dataclasses.replace` from a task
        that was read. The stored task must still have the version that was read, and gets the next
        version. Tasks in `deletes` and `depends` must still have their versions, and new ids must
        be free.

        Raises a `DependencyError` that names every task at another version (nothing was done: read
        them again), `UsageError`, and the errors of `Journal.append`.
        """
        with self._lock:
            self._require_open()
            recorded_at = self._timeline.next()
            inserted = tuple(
                self._make(new, recorded_at, number) for number, new in enumerate(inserts)
            )
            self._state.check(
                inserted=[task.id for task in inserted],
                changed=[*changes, *deletes],
                depends=depends,
            )
            changed = tuple(
                require_task(replace(task, version=task.version + 1, changed_at=recorded_at))
                for task in changes
            )
            ordinal = self._commit(
                recorded_at, (*inserted, *changed), [seen.id for seen in deletes]
            )
        if self._journal is not None:
            self._journal.settle(ordinal)
        return Modified(inserted, changed)

    def claim(
        self,
        queues: Sequence[str],
        *,
        wait: float = 0.0,
        hold: float = HOLD_S,
        claimant: str = "",
    ) -> Task | None:
        """Take the task that has been available for longest, and hide it for `hold` seconds.

        Waits up to `wait` seconds for one, then returns None. The cost does not depend on the
        number of waiting tasks. The claimant renews the task or commits before the hold ends. Later
        another process may claim it, and then the first claimant can no longer commit.
        """
        if isinstance(queues, str) or not queues:
            raise UsageError("queues must be a sequence of names", "pass [name]")
        hold_ns = _nanoseconds(hold, name="hold", least=1)
        with self._lock:
            deadline = self._clock.wall_ns() + _nanoseconds(wait, name="wait", least=0)
            while True:
                self._require_open()
                now = self._clock.wall_ns()
                task = self._state.first_available(queues, now)
                if task is not None:
                    return self._claimed(task, now + hold_ns, claimant)
                if now >= deadline:
                    return None
                following = self._state.next_available_at(queues)
                until = deadline if following is None else min(deadline, following)
                self._changed.wait(min((until - now) / NS_PER_SECOND, TASK_WAIT_S_MAX))

    def renew(self, task: Task, *, hold: float = HOLD_S, progress: bytes | None = None) -> Task:
        """Keep a claimed task for `hold` seconds from now, and save its progress.

        Returns the task at its new version: use that from now on. Raises `DependencyError` if the
        task was reassigned meanwhile: stop working on it.
        """
        hold_ns = _nanoseconds(hold, name="hold", least=1)
        with self._lock:
            self._require_open()
            self._state.check(inserted=(), changed=[task], depends=())
            recorded_at = self._timeline.next()
            renewed = replace(
                task,
                version=task.version + 1,
                available_at=self._clock.wall_ns() + hold_ns,
                progress=task.progress if progress is None else progress,
                changed_at=recorded_at,
            )
            self._commit(recorded_at, (require_task(renewed),))
        return renewed

    def wake(self) -> None:
        """Make waiting claims look at the clock again. Tests call it after they move their
        clock."""
        with self._lock:
            self._changed.notify_all()

    def compact(self) -> None:
        """Write a snapshot of the tasks in place of the journal so far. Other calls wait meanwhile.

        The queue compacts by itself as it grows; `kvstore journal compact` compacts beside it.
        """
        with self._lock:
            self._require_open()
            if self._journal is not None:
                self._compact(self._journal)

    # -- looking ------------------------------------------------------------------------------

    def get(self, task_id: str) -> Task | None:
        """The task with that id, at its present version; None if there is none."""
        with self._lock:
            return self._state.tasks.get(task_id)

    def list(self, queue: str) -> list[Task]:
        """A queue's tasks, in the order in which they become available. Costs its length."""
        with self._lock:
            return self._state.in_queue(queue)

    def sizes(self) -> Mapping[str, QueueSize]:
        """How many tasks each queue has. Leaves out empty queues."""
        with self._lock:
            sizes = self._state.sizes(self._clock.wall_ns())
        return {queue: QueueSize(*size) for queue, size in sizes.items()}

    def now(self) -> int:
        """The clock's time."""
        return self._clock.wall_ns()

    def close(self) -> None:
        """Close the journal; waiting claims raise `ClosedError`."""
        if not self._closed:
            self._close()

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            if self._journal is not None:
                self._journal.close()

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- within the lock ----------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the task queue")

    def _make(self, new: NewTask, recorded_at: int, number: int) -> Task:
        now = self._clock.wall_ns()
        return require_task(
            Task(
                id=f"{recorded_at:016x}{number:04x}" if new.id is None else new.id,
                version=1,
                queue=new.queue,
                available_at=now if new.available_at is None else new.available_at,
                value=new.value,
                created_at=recorded_at,
                changed_at=recorded_at,
            )
        )

    def _claimed(self, task: Task, available_at: int, claimant: str) -> Task:
        recorded_at = self._timeline.next()
        claimed = Task(
            id=task.id,
            version=task.version + 1,
            queue=task.queue,
            available_at=available_at,
            attempt=task.attempt + 1,
            claimant=claimant,
            value=task.value,
            progress=task.progress,
            error=task.error,
            created_at=task.created_at,
            changed_at=recorded_at,
        )
        self._commit(recorded_at, (claimed,))
        return claimed

    def _commit(self, recorded_at: int, tasks: Sequence[Task], deleted: Sequence[str] = ()) -> int:
        """Log a checked change, then make it. Returns its ordinal."""
        ordinal = 0
        if self._journal is not None:
            payload = encode(recorded_at, tasks, deleted)
            self._grown_bytes += len(payload)
            if self._grown_bytes > self._bytes_before_compaction():
                with suppress(LockedError):  # another process compacts it
                    self._compact(self._journal)
            ordinal = self._journal.append(payload, settle=False)
        self._state.take(recorded_at, (*tasks, *deleted))
        self._changed.notify_all()
        return ordinal

    def _bytes_before_compaction(self) -> int:
        return max(self._compact_bytes, TASK_COMPACT_FACTOR * self._snapshot_bytes)

    def _compact(self, journal: Journal) -> None:
        """Compact before a record is logged, never after: a failure then means that nothing was
        done."""
        self._grown_bytes = 0  # even if it fails, so that not every record tries again
        self._snapshot_bytes = journal.snapshot(self._state.records()).bytes


def read_tasks(path: str | os.PathLike[str], *, files: Files = OS_FILES) -> list[Task]:
    """All tasks of the journal in `path`, by queue, in the order in which they become available.

    Writes nothing, and works beside the owner of the queue. Empty if there is no queue. Costs a
    replay. Raises `RetryableError` if the owner compacted meanwhile, and `JournalDamagedError`.
    """
    state, directory = TaskState(), os.path.abspath(os.fspath(path))
    with storage_errors(directory):
        try:
            os.stat(directory)  # `isdir` would take a failing disk for a missing directory
        except FileNotFoundError:
            return []
        replay(files, directory, restore=state.restore, apply=state.apply, content=CONTENT)
    return sorted(state.tasks.values(), key=lambda task: (task.queue, task.available_at, task.id))


def _nanoseconds(seconds: float, *, name: str, least: int) -> int:
    ns = int(min(seconds, TASK_HOLD_S_MAX) * NS_PER_SECOND)
    if ns < least:
        raise UsageError(
            f"{name}={seconds} is too short", f"pass {least / NS_PER_SECOND:g} or more"
        )
    return ns
