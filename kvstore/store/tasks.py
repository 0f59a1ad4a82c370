"""The task queue of a store, which is opened when it is first asked for.

It lies in the store's directory, beside the engine, which looks at names of its own only.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

from kvstore.background import Failures
from kvstore.clock import WallClock
from kvstore.commit import Committer
from kvstore.errors import ClosedError
from kvstore.tasks import Tasks

TASKS_DIRECTORY: Final = "tasks"


class TaskQueue:
    """The place of one store's task queue, and the queue once it is open."""

    def __init__(self, path: Path | None, committer: Committer, clock: WallClock) -> None:
        self._path = None if path is None else path / TASKS_DIRECTORY
        self._committer = committer
        self._clock = clock
        self._failures = Failures("kvstore.tasks", clock)
        self._lock = threading.Lock()
        self._is_closed = False
        self._tasks: Tasks | None = None

    def open(self) -> Tasks:
        """The queue. Raises as `Tasks.open`, and where the store takes no writes."""
        with self._lock:
            self._committer.require_writable()
            if self._is_closed:
                raise ClosedError("the task queue")
            if self._tasks is None:
                self._tasks = Tasks.open(self._path, clock=self._clock, failures=self._failures)
            return self._tasks

    def close(self) -> None:
        """Close the queue, if it was opened. It is not opened any more."""
        with self._lock:
            self._is_closed = True
            if self._tasks is not None:
                self._tasks.close()

    def figures(self) -> dict[str, Any]:
        """The figures of `Store.stats` on the threads that work on tasks."""
        return self._failures.figures("tasks")
