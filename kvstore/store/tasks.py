"""The task queue of a store, opened at its first use.

The queue lies in a directory inside the store's directory. The engine ignores that name.

Invariants
1. A store that never uses its queue has no directory for it.
2. Once closed, the queue is not opened again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.background import Failures
from kvstore.clock import WallClock
from kvstore.commit import Committer
from kvstore.errors import ClosedError

if TYPE_CHECKING:
    from kvstore.tasks import QueueSize, Tasks

TASKS_DIRECTORY: Final = "tasks"


class LazyTasks:
    """Opens the task queue of one store at the first call, and closes it with the store."""

    def __init__(self, path: Path | None, committer: Committer, clock: WallClock) -> None:
        self._path = None if path is None else path / TASKS_DIRECTORY
        self._committer = committer
        self._clock = clock
        self._failures = Failures("kvstore.tasks", clock)
        self._lock = threading.Lock()
        self._is_closed = False
        self._tasks: Tasks | None = None

    def open(self) -> Tasks:
        """The queue. Raises as `Tasks.open`, and `UsageError` where the store takes no writes."""
        from kvstore.tasks import Tasks  # and the journal, which no other part of a store needs

        with self._lock:
            self._committer.require_writable()
            if self._is_closed:
                raise ClosedError("the task queue")
            if self._tasks is None:
                self._tasks = Tasks.open(self._path, clock=self._clock, failures=self._failures)
            return self._tasks

    def close(self) -> None:
        """Close the queue, if it was opened."""
        with self._lock:
            self._is_closed = True
            if self._tasks is not None:
                self._tasks.close()

    def sizes(self) -> Mapping[str, QueueSize]:
        """How many tasks each queue has; none where this process has not opened the queues."""
        with self._lock:
            if self._tasks is None or self._is_closed:
                return {}
            return self._tasks.sizes()

    def figures(self) -> dict[str, Any]:
        """Failures of the threads that work on tasks, for `Store.stats`."""
        return self._failures.figures("tasks")
