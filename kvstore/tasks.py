"""A durable queue of tasks, and the workers that do them.

A task is a queue, a payload and the time at which it becomes available. Changes of tasks are
records of a journal, so the queue survives a crash. A worker claims a task for a while; if its
process dies, the claim runs out and another worker does the task.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from sortedcontainers import SortedList

from kvstore.base.background import Failures
from kvstore.base.clock import Clock, Timeline, WallClock
from kvstore.base.forks import own
from kvstore.base.timestamp import NS_PER_SECOND, TIMESTAMP_MAX
from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    DependencyError,
    FencedError,
    FormatVersionError,
    LockedError,
    PoisonedError,
    UsageError,
    storage_errors,
)
from kvstore.limits import (
    JOURNAL_COMPACT_BYTES,
    SNAPSHOT_TASKS_MAX,
    TASK_COMPACT_FACTOR,
    TASK_HOLD_S_MAX,
    TASK_MODIFY_MAX,
    TASK_NAME_BYTES_MAX,
    TASK_PROGRESS_S,
    TASK_VALUE_BYTES_MAX,
    TASK_WAIT_S_MAX,
    TASK_WORKER_DELAY_S,
    TASK_WORKER_DELAY_S_MAX,
)
from kvstore.storage.journal import Journal, Record, Sync, replay
from kvstore.storage.os_files import OS_FILES, Files

# --------------------------------------------------------------------------------------------------
# Tasks: an action, its claimant, and the times of both.
#
# A task is available when its `available_at` has come. A claim moves `available_at` into the future
# and raises the version. So nobody has to notice that a claimant died: the time comes, and another
# one claims the task. A claimant that returns late has an old version and cannot commit.


class TaskLike(Protocol):
    """A task at a version: a `Task`, or a `TaskRef` to one."""

    @property
    def id(self) -> str:
        """The id of the task."""
        ...

    @property
    def version(self) -> int:
        """The version that was read."""
        ...


@dataclass(frozen=True, slots=True)
class TaskRef:
    """A task by id and version."""

    id: str
    version: int


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task to insert. For None the queue chooses: a fresh id, available now."""

    queue: str
    value: bytes = b""
    available_at: int | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Times are in nanoseconds since the epoch.

    `attempt` counts its claims, `claimant` has it now. A next attempt continues from `progress`.
    `error` tells why the last attempt failed.
    """

    id: str
    version: int
    queue: str
    available_at: int
    attempt: int = 0
    claimant: str = ""
    value: bytes = field(default=b"", repr=False)
    progress: bytes = field(default=b"", repr=False)
    error: str = ""
    created_at: int = 0
    changed_at: int = 0


def require_task(task: Task) -> Task:
    """Check the new state that a caller wants. Raises `UsageError`."""
    for name, text in (("id", task.id), ("queue", task.queue)):
        if not isinstance(text, str) or not 0 < len(text.encode()) <= TASK_NAME_BYTES_MAX:
            raise UsageError(
                f"a task's {name} must be 1 to {TASK_NAME_BYTES_MAX} bytes of text",
                "choose another one",
            )
    for name, data in (("value", task.value), ("progress", task.progress)):
        if not isinstance(data, bytes) or len(data) > TASK_VALUE_BYTES_MAX:
            raise UsageError(
                f"a task's {name} must be at most {TASK_VALUE_BYTES_MAX} bytes",
                "store the data elsewhere, and pass its place",
            )
    if not 0 <= task.available_at <= TIMESTAMP_MAX:
        raise UsageError(
            f"available_at {task.available_at} is outside 0..2**63 - 1", "pass a time inside"
        )
    return task


# --------------------------------------------------------------------------------------------------
# Task changes as journal records: the new state of each task, not the command that changed it.
#
#     record  := | format u8 | recorded at u64 | entry ... |                    little-endian
#     entry   := | tag u8 | body bytes u32 | body |   tag 1: task as it is now, 2: id of one deleted
#     task    := | version u64 | available at u64 | created at u64 | changed at u64 | attempt u32 |
#                | text ... |    id, queue, claimant, error, progress, value, in this order
#     text    := | bytes u32 | data |
#
# Replay sets and deletes tasks. It checks no version, limit or clock, so that a changed rule cannot
# change the meaning of an old journal.
#
# Invariants
# 1. One record is one atomic change.
# 2. A body may end early: missing fields have their defaults. A body may be longer: a later release
#    added fields, which this one passes over.
# 3. Numbers are below 2**63, an attempt below 2**31, so that a later change can count on from them.
#    Texts are UTF-8.
# 4. A reader passes over an unknown entry with a tag of 128 or above. It refuses a record with any
#    other unknown entry, and a record of another format.

FORMAT = 1
TAG_TASK, TAG_DELETED = 1, 2
TAG_OPTIONAL_MIN = 128

RECORD_HEAD = struct.Struct("<BQ")
ENTRY_HEAD = struct.Struct("<BI")
_NUMBERS = struct.Struct("<QQQQI")
_TEXT = struct.Struct("<I")
_TEXT_COUNT = 6
_NUMBER_END, _ATTEMPT_END = 1 << 63, 1 << 31

WHERE = "the task journal"


def encode(recorded_at: int, tasks: Iterable[Task], deleted: Iterable[str] = ()) -> bytes:
    """One atomic change as a record."""
    parts = [RECORD_HEAD.pack(FORMAT, recorded_at)]
    for task in tasks:
        body = _encode_task(task)
        parts += ENTRY_HEAD.pack(TAG_TASK, len(body)), body
    for task_id in deleted:
        body = task_id.encode()
        parts += ENTRY_HEAD.pack(TAG_DELETED, len(body)), body
    return b"".join(parts)


def decode(payload: bytes) -> tuple[int, list[Task | str]]:
    """The time of the record, and for each task its new state, or its id if it was deleted.

    Raises `FormatVersionError` on a record of a later release, `CorruptionError` on a broken one.
    """
    if len(payload) < RECORD_HEAD.size:
        raise CorruptionError(WHERE, f"a record of {len(payload)} bytes")
    version, recorded_at = RECORD_HEAD.unpack_from(payload)
    if version != FORMAT:
        raise FormatVersionError(WHERE, found=version, supported=FORMAT)
    if recorded_at >= _NUMBER_END:
        raise CorruptionError(WHERE, f"a record of the time {recorded_at}")
    changes: list[Task | str] = []
    for tag, body in _entries(payload):
        if tag == TAG_TASK:
            changes.append(_decode_task(body))
        elif tag == TAG_DELETED:
            changes.append(_decode_text(body))
        elif tag < TAG_OPTIONAL_MIN:
            raise FormatVersionError(WHERE, found=f"entry {tag}", supported="entries 1 and 2")
    return recorded_at, changes


def _entries(payload: bytes) -> Iterator[tuple[int, bytes]]:
    at, end = RECORD_HEAD.size, len(payload)
    while at < end:
        if at + ENTRY_HEAD.size > end:
            raise CorruptionError(WHERE, "a record ends within an entry")
        tag, size = ENTRY_HEAD.unpack_from(payload, at)
        at += ENTRY_HEAD.size
        if at + size > end:
            raise CorruptionError(WHERE, "a record ends within an entry")
        yield tag, payload[at : at + size]
        at += size


def _encode_task(task: Task) -> bytes:
    texts = (
        task.id.encode(),
        task.queue.encode(),
        task.claimant.encode(),
        task.error.encode(),
        task.progress,
        task.value,
    )
    parts = [
        _NUMBERS.pack(
            task.version, task.available_at, task.created_at, task.changed_at, task.attempt
        )
    ]
    for text in texts:
        parts += _TEXT.pack(len(text)), text
    return b"".join(parts)


def _decode_task(body: bytes) -> Task:
    if len(body) < _NUMBERS.size:
        raise CorruptionError(WHERE, f"a task of {len(body)} bytes")
    version, available_at, created_at, changed_at, attempt = _NUMBERS.unpack_from(body)
    if max(version, available_at, created_at, changed_at) >= _NUMBER_END or attempt >= _ATTEMPT_END:
        raise CorruptionError(WHERE, "a task's number is beyond its bound")
    texts: list[bytes] = []
    at = _NUMBERS.size
    while len(texts) < _TEXT_COUNT and at + _TEXT.size <= len(body):
        (size,) = _TEXT.unpack_from(body, at)
        at += _TEXT.size + size
        texts.append(body[at - size : at])
        if at > len(body):
            raise CorruptionError(WHERE, "a task ends within a text")
    texts += [b""] * (_TEXT_COUNT - len(texts))
    task_id, queue, claimant, error, progress, value = texts
    return Task(
        id=_decode_text(task_id),
        version=version,
        queue=_decode_text(queue),
        available_at=available_at,
        attempt=attempt,
        claimant=_decode_text(claimant),
        value=value,
        progress=progress,
        error=_decode_text(error),
        created_at=created_at,
        changed_at=changed_at,
    )


def _decode_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(WHERE, f"a text is not UTF-8: {error}") from error


# --------------------------------------------------------------------------------------------------
# The tasks in memory: by id, and by queue in the order in which they become available.
#
# Invariants
# 1. Each task stands once in the order of its queue, at its `available_at`.
# 2. Finding the first task of a queue takes no search, and replacing it takes logarithmic time.
# 3. Deciding (`check`) changes nothing; acting (`put`, `delete`) cannot fail.
#
# Replay calls `put` and `delete` only. `kvstore.tasks` does the locking.


class TaskState:
    """All tasks. A `kvstore.storage.journal.StateMachine`."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.recorded_at = 0
        """The newest time in any record. The timeline continues from it."""
        self._orders: dict[str, SortedList] = {}  # queue -> (available_at, id)

    # -- acting -------------------------------------------------------------------------------

    def put(self, task: Task) -> None:
        """Insert or replace a task. O(log n)."""
        self.delete(task.id)
        self.tasks[task.id] = task
        order = self._orders.get(task.queue)
        if order is None:
            order = self._orders[task.queue] = SortedList()
        order.add((task.available_at, task.id))

    def delete(self, task_id: str) -> None:
        """Remove a task if there is one. O(log n)."""
        task = self.tasks.pop(task_id, None)
        if task is None:
            return
        order = self._orders[task.queue]
        order.remove((task.available_at, task.id))
        if not order:
            del self._orders[task.queue]

    def take(self, recorded_at: int, changes: Iterable[Task | str]) -> None:
        """Apply one atomic change."""
        self.recorded_at = max(self.recorded_at, recorded_at)
        for change in changes:
            if isinstance(change, Task):
                self.put(change)
            else:
                self.delete(change)

    # -- replaying ----------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Apply the next record of the journal."""
        self.take(*decode(record.payload))

    def restore(self, record: Record) -> None:
        """Apply a record of a snapshot, which is a change like any other."""
        self.apply(record)

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The state as records for `restore`."""
        tasks = list(self.tasks.values())
        for at in range(0, max(len(tasks), 1), SNAPSHOT_TASKS_MAX):
            yield 0, encode(self.recorded_at, tasks[at : at + SNAPSHOT_TASKS_MAX])

    # -- deciding -----------------------------------------------------------------------------

    def first_available(self, queues: Iterable[str], now: int) -> Task | None:
        """The task that has been available for longest in any of the queues."""
        first = self._first(queues)
        return self.tasks[first[1]] if first is not None and first[0] <= now else None

    def next_available_at(self, queues: Iterable[str]) -> int | None:
        """The time at which the first task of the queues is available; None if they have none."""
        first = self._first(queues)
        return None if first is None else first[0]

    def check(
        self, *, inserted: Iterable[str], changed: Iterable[TaskLike], depends: Iterable[TaskLike]
    ) -> None:
        """Raise a `DependencyError` that names every task that has changed since it was read.

        Ids in `inserted` must be free; tasks in `changed` (and deleted) and `depends` must exist at
        their version. Raises `UsageError` if one change names a task twice.
        """
        named: set[str] = set()
        failures: list[tuple[str, int | None, int | None]] = []
        for task_id in inserted:
            _name_once(named, task_id)
            found = self._version(task_id)
            if found is not None:
                failures.append((task_id, None, found))
        for seen in changed:
            _name_once(named, seen.id)
            if self._version(seen.id) != seen.version:
                failures.append((seen.id, seen.version, self._version(seen.id)))
        failures += (
            (seen.id, seen.version, self._version(seen.id))
            for seen in depends
            if self._version(seen.id) != seen.version
        )
        if failures:
            raise DependencyError(failures)

    # -- looking ------------------------------------------------------------------------------

    def in_queue(self, queue: str) -> list[Task]:
        """A queue's tasks, in the order in which they become available. Costs its length."""
        return [self.tasks[task_id] for _, task_id in self._orders.get(queue, ())]

    def sizes(self, now: int) -> Mapping[str, tuple[int, int]]:
        """(available now, all) of each queue. O(queues * log n)."""
        return {
            queue: (order.bisect_left((now + 1, "")), len(order))
            for queue, order in self._orders.items()
        }

    def assert_invariants(self) -> None:
        """Assert the invariants at the top of this file, for tests."""
        listed = [
            (queue, available_at, task_id)
            for queue, order in self._orders.items()
            for available_at, task_id in order
        ]
        assert len(listed) == len(self.tasks)
        assert all(self._orders.values())
        for queue, available_at, task_id in listed:
            task = self.tasks[task_id]
            assert (task.queue, task.available_at) == (queue, available_at)

    def _first(self, queues: Iterable[str]) -> tuple[int, str] | None:
        orders = (self._orders.get(queue) for queue in queues)
        return min((order[0] for order in orders if order), default=None)

    def _version(self, task_id: str) -> int | None:
        task = self.tasks.get(task_id)
        return None if task is None else task.version


def _name_once(named: set[str], task_id: str) -> None:
    if task_id in named:
        raise UsageError(f"one change names task {task_id} twice", "name each task once")
    if len(named) >= TASK_MODIFY_MAX:
        raise UsageError(f"one change names more than {TASK_MODIFY_MAX} tasks", "make several")
    named.add(task_id)


# --------------------------------------------------------------------------------------------------
# A queue of tasks in memory, made durable by a journal. Each task is done once.
#
#     with Tasks.open(path) as tasks:
#         tasks.insert("imports", b"s3://...")
#         task = tasks.claim(["imports"], wait=10)
#         ...
#         tasks.modify(deletes=[task])
#
# Invariants
# 1. `modify` does all of a change or none of it, and is one journal record.
# 2. A claim raises the version. So of two claimants of one task only the later one can commit. The
#    `modify` of the earlier one raises a `DependencyError` that names the task.
# 3. A change is durable, as the journal's policy says, before `modify` returns. Claims and
#    renewals do not wait for the disk. A crash that loses one makes its task available sooner, and
#    loses all later records of the same log as well.
# 4. Time comes from the clock that was passed in; recorded times are only replayed.

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


# --------------------------------------------------------------------------------------------------
# Workers: they run handlers on tasks until each task is done, even if a process dies meanwhile.
#
#     worker = Worker(tasks, {"imports": do_import})
#     with worker.running(threads=2):
#         ...
#
#     def do_import(job: Job) -> Sequence[NewTask]:
#         for part in parts_after(job.progress):      # resumes where the last attempt stopped
#             ...
#             job.save(part.name)
#         return [NewTask("verify", job.value)]       # inserted as the task is deleted
#
# Invariants
# 1. Only the holder of the newest version deletes a task, in one change with the insertion of its
#    follow-up tasks. So these are inserted once, however often the task was begun.
# 2. While a handler runs, its task is renewed. A renewal that fails means that another worker has
#    the task, and nothing that the handler still does to the task is recorded.
# 3. A task that fails is tried again, later each time. After `attempts_max` claims it becomes a
#    dead letter of its queue, and stays there until it is revived.

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


# --------------------------------------------------------------------------------------------------
# Calls: tasks that name an action and its arguments, so that any process can do them.
#
#     value    := {"v": 1, argument: ...}      JSON; the queue names the action
#     progress := {fact: ...}                  JSON; the last report of the handler
#     report   := {"v": 1, "task": id, "queue": name, "result": {...}}   if `report_to` was given
#
# The form is JSON, because calls are few and people read the dead letters.
#
# Invariants
# 1. A call has no secrets, because it is on disk in the clear. The program that starts the worker
#    gives its handlers the keys of encrypted places.
# 2. Submitting a call under an id that exists changes nothing.
# 3. The change that deletes the task inserts the report, so there is one report.

VERSION: Final = 1
REPORT_TO: Final = "report_to"

Arguments: TypeAlias = Mapping[str, Any]


class TaskProgress:
    """The progress of a handler and of its earlier attempts.

    `tell` renews the task. It raises `FencedError` once another worker is known to have the task,
    so a handler that calls it before each step stops before the next step.
    """

    def __init__(self, job: Job, *, every_s: float) -> None:
        self._job = job
        self._every_s = every_s
        self._told_at = -every_s
        self.before = progress_of(job.task)
        """The progress that was told last. Empty at the first attempt."""

    @property
    def token(self) -> str:
        """A name that no other task ever has, even one with the same id."""
        return f"{self._job.task.id}@{self._job.task.created_at:x}"

    def tell(self, **facts: Any) -> None:
        """Save the progress of the work."""
        self._job.save(json.dumps(facts).encode())
        self._told_at = time.monotonic()

    def tick(self, **facts: Any) -> None:
        """`tell`, unless the last call was a moment ago. For loops."""
        if self._job.lost or time.monotonic() - self._told_at >= self._every_s:
            self.tell(**facts)


Call: TypeAlias = Callable[[JsonObject, TaskProgress], Arguments]
"""An action: takes arguments and returns a result, both JSON."""


def submit(
    tasks: Tasks,
    queue: str,
    arguments: Arguments,
    *,
    task_id: str | None = None,
    report_to: str | None = None,
) -> str:
    """Submit the action `queue` with `arguments`. Durable on return. Returns the task's id.

    Nothing happens if a task `task_id` waits or is being done. With `report_to`, the result goes to
    that queue as a task of its own.
    """
    fields = {"v": VERSION, **arguments}
    if report_to is not None:
        fields[REPORT_TO] = report_to
    try:
        return tasks.insert(queue, _encoded(fields), id=task_id).id
    except DependencyError:
        if task_id is None:
            raise
        return task_id


def handler(call: Call, *, every_s: float | None = None) -> Handler:
    """A worker's handler that runs `call` with the arguments of each task."""

    def handle(job: Job) -> Sequence[NewTask]:
        arguments = arguments_of(job.task)
        seconds = TASK_PROGRESS_S if every_s is None else every_s
        result = call(arguments, TaskProgress(job, every_s=seconds))
        report_to = arguments.optional(REPORT_TO, str)
        if report_to is None:
            return ()
        task = job.task
        report = {"v": VERSION, "task": task.id, "queue": task.queue, "result": result}
        return [NewTask(report_to, json.dumps(report).encode())]

    return handle


def arguments_of(task: Task) -> JsonObject:
    """Decode a call or a report. Raises `FormatVersionError` if a later release made it,
    `CorruptionError` if the bytes are no call."""
    where = f"task {task.id} in queue {task.queue}"
    fields = read_object(task.value, where=where)
    version = fields.field("v", int)
    if version != VERSION:
        raise FormatVersionError(where, found=version, supported=VERSION)
    return fields


def age_of(arguments: JsonObject, name: str) -> timedelta | None:
    """The age in seconds in the argument `name`. None if it is absent. Raises `CorruptionError`."""
    seconds = arguments.optional(name, float)
    try:
        return None if seconds is None else timedelta(seconds=seconds)
    except OverflowError as error:
        raise arguments.damaged(f"field {name!r}: {error}") from error


def progress_of(task: Task) -> JsonObject:
    """The progress that the handler of a call told last. Empty if it told none."""
    return read_object(task.progress or b"{}", where=f"progress of task {task.id}")


def _encoded(fields: Arguments) -> bytes:
    """A call as bytes. Raises `UsageError` on arguments that `arguments_of` would refuse."""
    try:
        data = json.dumps(fields, allow_nan=False).encode()
        read_object(data, where="the arguments")
    except (TypeError, ValueError, RecursionError, CorruptionError) as error:
        raise UsageError(f"the arguments are not JSON: {error}", "pass plain values") from error
    return data
