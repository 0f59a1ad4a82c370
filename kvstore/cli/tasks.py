"""The command that lists the tasks of a store: waiting, claimed and given up."""

from __future__ import annotations

import time

from kvstore.cli.options import LISTED_MAX, JsonOption, ListLimitOption, StoreArgument, iso
from kvstore.cli.output import print_list
from kvstore.errors import NotAStoreError
from kvstore.opening import engine_at
from kvstore.store import TASKS_DIRECTORY
from kvstore.tasks import DEAD_SUFFIX, Task, read_tasks


def tasks(
    store: StoreArgument, limit: ListLimitOption = LISTED_MAX, as_json: JsonOption = False
) -> None:
    """List the tasks of a store with their progress. The store may be in use.

    \b
    Examples:
      kvstore tasks flights.db
      kvstore tasks flights.db --json | jq 'select(.state == "dead")'
    """
    if engine_at(store) is None:
        raise NotAStoreError(str(store), "no store is there", "check the path")
    now = time.time_ns()
    found = [_fields(task, now) for task in read_tasks(store / TASKS_DIRECTORY)]
    columns = ["queue", "task", "state", "available", "attempt", "progress", "error"]
    print_list(found, columns, limit, as_json=as_json)


def _fields(task: Task, now: int) -> dict[str, object]:
    return {
        "queue": task.queue,
        "task": task.id,
        "state": _state(task, now),
        "available": iso(task.available_at),
        "attempt": task.attempt,
        "claimant": task.claimant,
        "progress": task.progress.decode("utf-8", "backslashreplace"),
        "error": task.error,
        "value": task.value.decode("utf-8", "backslashreplace"),
    }


def _state(task: Task, now: int) -> str:
    """`dead`, `waiting`, `held` by a claimant, or `later`: for another attempt, or the first."""
    if task.queue.endswith(DEAD_SUFFIX):
        return "dead"
    if task.available_at <= now:
        return "waiting"
    return "held" if task.claimant else "later"
