"""The tasks in memory: by id, and by queue in the order in which they become available.

Invariants
1. Each task stands once in the order of its queue, at its `available_at`.
2. Finding the first task of a queue takes no search, and replacing it takes logarithmic time.
3. Deciding (`check`) changes nothing; acting (`put`, `delete`) cannot fail.

Replay calls `put` and `delete` only. `kvstore.tasks.queue` does the locking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sortedcontainers import SortedList

from kvstore.errors import DependencyError, UsageError
from kvstore.journal import Record
from kvstore.limits import SNAPSHOT_TASKS_MAX, TASK_MODIFY_MAX
from kvstore.tasks.records import decode, encode
from kvstore.tasks.task import Task, TaskLike


class TaskState:
    """All tasks. A `kvstore.journal.StateMachine`."""

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
