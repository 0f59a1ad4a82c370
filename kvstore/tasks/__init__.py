"""A durable queue of tasks, and workers that do them.

Floors, from the top:

    call
    worker
    queue
    state
    records
    task
"""

from kvstore.tasks.call import (
    Arguments,
    TaskProgress,
    age_of,
    arguments_of,
    handler,
    progress_of,
    submit,
)
from kvstore.tasks.queue import CONTENT, Modified, QueueSize, Tasks, read_tasks
from kvstore.tasks.state import TaskState
from kvstore.tasks.task import NewTask, Task, TaskRef
from kvstore.tasks.worker import (
    DEAD_SUFFIX,
    Handler,
    Job,
    Outcome,
    Retry,
    Worker,
    dead_letters,
    revive,
)

__all__ = [
    "Tasks",
    "Task",
    "NewTask",
    "TaskRef",
    "Modified",
    "QueueSize",
    "Worker",
    "Job",
    "Handler",
    "Outcome",
    "Retry",
    "Arguments",
    "TaskProgress",
    "age_of",
    "arguments_of",
    "handler",
    "progress_of",
    "read_tasks",
    "submit",
    "DEAD_SUFFIX",
    "dead_letters",
    "revive",
    "TaskState",
    "CONTENT",
]
