"""GC in the background: a thread that a store owns, running at an interval and stopped by close.

A failed run is logged (`kvstore.gc`), counted in `Store.stats`, and tried again after the interval,
after twice the interval if it fails again, and so on up to `GC_DELAY_FACTOR_MAX` intervals. A
user's callback that raises is logged and counted too.

Invariants
1. The thread waits on a condition and never sleeps: closing the store ends a wait at once, and a
   run under way ends at its next step.
2. The thread ends by `stop`, on a closed store, or on a poisoned store, where nothing succeeds
   until the store is opened again. No other failure ends it.
3. The lock is not held during a run or a callback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from kvstore.arguments import require_age
from kvstore.background import Failures
from kvstore.errors import ClosedError, PoisonedError, UsageError
from kvstore.forks import own
from kvstore.gc.collect import GcReport
from kvstore.limits import GC_DELAY_FACTOR_MAX


@dataclass(frozen=True, slots=True)
class GcPolicy:
    """How much history a store keeps, and how often it removes older history."""

    keep: timedelta
    every: timedelta = timedelta(minutes=10)
    compact: bool = False
    """Whether each run rewrites the spans it touched: space comes back at once, at the cost of
    I/O."""

    def __post_init__(self) -> None:
        require_age(self.keep, name="keep")
        require_age(self.every, name="every")
        if self.keep is None or not self.every:
            raise UsageError(f"{self}", "keep must not be negative, every must be positive")


class GcWorker:
    """The thread. `run` does one collection; `after_run` gets its report."""

    def __init__(
        self,
        policy: GcPolicy,
        run: Callable[[GcPolicy], GcReport],
        *,
        failures: Failures,
        after_run: Callable[[GcReport], None] | None = None,
    ) -> None:
        self.policy = policy
        self.failures = failures
        self.error: Exception | None = None
        """The error of the last run; None if it went well."""
        self.runs = 0
        self._run = run
        self._after_run = after_run
        # Take the lock, never the condition: a signal in the entry of a condition leaves it locked.
        self._lock = threading.RLock()
        self._woken = threading.Condition(self._lock)
        self._stopping = False
        self._due = False
        own(self, "the background GC of a store", endings=("stop",))
        self._thread = threading.Thread(target=self._work, name="kvstore-gc", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Run now rather than at the end of the interval."""
        with self._lock:
            self._due = True
            self._woken.notify_all()

    def stop(self) -> None:
        """End the thread and wait for it, unless the thread itself calls. Repeatable."""
        with self._lock:
            self._stopping = True
            self._woken.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._woken.wait_for(self._is_due, self._delay_s())
                if self._stopping:
                    return
                self._due = False
            try:
                report = self._run(self.policy)
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # the next run may succeed
                self.error = error
                self.failures.note("garbage collection in the background", error)
                if isinstance(error, PoisonedError):
                    return
                continue
            self.runs += 1
            self.error = None
            self.failures.succeeded()
            if self._after_run is not None:
                self._call_back(self._after_run, report)

    def _call_back(self, after_run: Callable[[GcReport], None], report: GcReport) -> None:
        try:
            after_run(report)
        except BaseException as error:  # noqa: BLE001  # the user's: sys.exit() there is no reason
            if not self._stopping:
                self.failures.note("the callback after_run of a collection", error, delays=False)

    def _delay_s(self) -> float:
        """The wait until the next run: the interval, or longer after failures."""
        every_s = self.policy.every.total_seconds()
        delay_s = self.failures.delay_s(every_s, GC_DELAY_FACTOR_MAX * every_s)
        return min(delay_s, threading.TIMEOUT_MAX)

    def _is_due(self) -> bool:
        return self._stopping or self._due
