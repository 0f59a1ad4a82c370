"""Calls: tasks that name what is to be done and its arguments, so that any process can do them.

    value    := {"v": 1, argument: ...}      JSON; the queue names what is to be done
    progress := {fact: ...}                  JSON; what the handler told last
    report   := {"v": 1, "task": id, "queue": name, "result": {...}}   where one was asked for

JSON, because they are few and people read them when a task is among the dead letters.

Invariants
1. Nothing secret is in a call: it is on disk in the clear. What a handler needs to open an
   encrypted place it is given by whoever starts the worker.
2. Submitting a call under an id that is there already changes nothing.
3. The report is inserted in the change that deletes the task: once, by whoever committed.
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
    """What a handler tells about its work, and what an earlier attempt told.

    Telling keeps the task: it raises `FencedError` once the task is known to be reassigned, so
    a handler that tells before each step stops before the next.
    """

    def __init__(self, job: Job, *, every_s: float) -> None:
        self._job = job
        self._every_s = every_s
        self._told_at = -every_s
        self.before = progress_of(job.task)
        """What was told last; empty at the first attempt."""

    @property
    def token(self) -> str:
        """Names this task among all that ever were, ids used again included."""
        return f"{self._job.task.id}@{self._job.task.created_at:x}"

    def tell(self, **facts: Any) -> None:
        """Note how far the work has come."""
        self._job.save(json.dumps(facts).encode())
        self._told_at = time.monotonic()

    def tick(self, **facts: Any) -> None:
        """`tell`, unless something was told just now. For loops."""
        if self._job.lost or time.monotonic() - self._told_at >= self._every_s:
            self.tell(**facts)


Call: TypeAlias = Callable[[JsonObject, TaskProgress], Arguments]
"""Does what arguments say and returns the result, both of them JSON."""


def submit(
    tasks: Tasks,
    queue: str,
    arguments: Arguments,
    *,
    task_id: str | None = None,
    report_to: str | None = None,
) -> str:
    """Ask for `queue` to be done with `arguments`; durable on return. Returns the task's id.

    With a `task_id` that is waiting or being done, nothing happens. With `report_to`, the result
    is sent to that queue as a task of its own.
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
    """A worker's handler that makes a call of each task."""

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
    """What a call, or a report, says. Raises `FormatVersionError` if a later release made it,
    `CorruptionError` if it is none."""
    where = f"task {task.id} in queue {task.queue}"
    fields = read_object(task.value, where=where)
    version = fields.field("v", int)
    if version != VERSION:
        raise FormatVersionError(where, found=version, supported=VERSION)
    return fields


def age_of(arguments: JsonObject, name: str) -> timedelta | None:
    """The age in seconds that `name` holds, None if it is not there. Raises `CorruptionError`."""
    seconds = arguments.optional(name, float)
    try:
        return None if seconds is None else timedelta(seconds=seconds)
    except OverflowError as error:
        raise arguments.damaged(f"field {name!r}: {error}") from error


def progress_of(task: Task) -> JsonObject:
    """What the handler of a call told last; empty if it has told nothing."""
    return read_object(task.progress or b"{}", where=f"progress of task {task.id}")


def _encoded(fields: Arguments) -> bytes:
    """A call as bytes. Raises `UsageError` on arguments that `arguments_of` would refuse."""
    try:
        data = json.dumps(fields, allow_nan=False).encode()
        read_object(data, where="the arguments")
    except (TypeError, ValueError, RecursionError, CorruptionError) as error:
        raise UsageError(f"the arguments are not JSON: {error}", "pass plain values") from error
    return data
