"""Two workers and one task: the first is stopped in the middle, and its hold ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.base.clock import ManualClock
from kvstore.store import Store
from kvstore.tasks import Handler, Job, NewTask, Outcome, Worker

HOLD_S = 30
WAIT_S_MAX = 120
"""Seconds after which a test that hangs fails."""


class Stop:
    """Stops the first call of a wrapped function until `go_on` is set."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def before(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*args: Any, **options: Any) -> Any:
            if not self.reached.is_set():
                self.reached.set()
                assert self.go_on.wait(WAIT_S_MAX)
            return action(*args, **options)

        return stopped


def outcomes_of_rivals(
    store: Store,
    handlers: Mapping[str, Handler],
    clock: ManualClock,
    stop: Stop,
    *,
    second_ends_first: bool,
) -> tuple[Outcome | None, Outcome | None]:
    """The outcome of a task for the first worker and for the worker that takes it over.

    The first worker continues once the second one has ended, or once it has begun.
    """
    taken_over = threading.Event()

    def telling(handler: Handler) -> Handler:
        def handle(job: Job) -> Sequence[NewTask] | None:
            if job.task.attempt == 2:
                taken_over.set()
            return handler(job)

        return handle

    told = {queue: telling(handler) for queue, handler in handlers.items()}
    worker = Worker(store.tasks, told, hold=HOLD_S)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(worker.run_one)
        assert stop.reached.wait(WAIT_S_MAX)
        clock.advance(2 * HOLD_S * 1_000_000_000)
        second = pool.submit(worker.run_one)
        assert taken_over.wait(WAIT_S_MAX)
        if second_ends_first:
            second.result(WAIT_S_MAX)
        stop.go_on.set()
        return first.result(WAIT_S_MAX), second.result(WAIT_S_MAX)
