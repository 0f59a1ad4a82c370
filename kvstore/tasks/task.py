"""Tasks: an action, its claimant, and the times of both.

A task is available when its `available_at` has come. A claim moves `available_at` into the future
and raises the version. So nobody has to notice that a claimant died: the time comes, and another
one claims the task. A claimant that returns late has an old version and cannot commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvstore.errors import UsageError
from kvstore.limits import TASK_NAME_BYTES_MAX, TASK_VALUE_BYTES_MAX
from kvstore.timestamp import TIMESTAMP_MAX


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
