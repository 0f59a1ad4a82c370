"""Calls: tasks that name an action and its arguments, so that any process can do them.

    value    := {"v": 1, argument: ...}      JSON; the queue names the action
    progress := {fact: ...}                  JSON; the last report of the handler
    report   := {"v": 1, "task": id, "queue": name, "result": {...}}   if `report_to` was given

The form is JSON, because calls are few and people read the dead letters.

Invariants
1. A call has no secrets, because it is on disk in the clear. The program that starts the worker
   gives its handlers the keys of encrypted places.
2. Submitting a call under an id that exists changes nothing.
3. The change that deletes the task inserts the report, so there is one report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias

from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import CorruptionError, DependencyError, FormatVersionError, UsageError
from kvstore.limits import TASK_PROGRESS_S
from kvstore.tasks.queue import Tasks
from kvstore.tasks.task import NewTask, Task
from kvstore.tasks.worker import Handler, Job

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
