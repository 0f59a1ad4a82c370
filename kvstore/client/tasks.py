"""The task queue of a store that another process owns, for programs that submit tasks to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.clock import Clock
from kvstore.errors import UsageError
from kvstore.protocol import to_json
from kvstore.tasks import Modified, Task, Tasks, TaskState


class ClientTasks(Tasks):
    """Takes tasks for the queue of the owner. Workers run in the owner's process."""

    def __init__(self, call: Callable[..., dict[str, Any]]) -> None:
        """`call` calls a verb."""
        super().__init__(TaskState(), None, Clock())
        self._call = call

    def insert(
        self,
        queue: str,
        value: bytes = b"",
        *,
        available_at: int | None = None,
        id: str | None = None,  # noqa: A002 - the field's word
    ) -> Task:
        """See `Tasks.insert`."""
        fields = {"queue": queue, "value": to_json(value), "available_at": available_at, "id": id}
        found = self._call("submit_task", **fields)["task"]
        return Task(**found, value=value)

    def modify(self, **_: Any) -> Modified:
        """Refused. Raises `UsageError`."""
        raise UsageError(
            "a change of tasks by a client", "run the worker in the process that owns the store"
        )

    def claim(self, *_: Any, **__: Any) -> Task | None:
        """Refused. Raises `UsageError`."""
        raise UsageError(
            "a worker of a client", "run the worker in the process that owns the store"
        )
