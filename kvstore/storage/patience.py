"""Patience: how long a call is repeated after a failure that may pass.

A failure that may pass is a timeout, an answer of 429 or 5xx, a lost reply, or another script that
was faster: `DeterminateError` and `IndeterminateError`. Another attempt would meet every other
failure again (a refusal, a full or broken disk, a missing bucket), so that is raised at once.

Invariants
1. A call takes at most the `seconds` of its patience and the length of its last attempt.
2. Pauses grow with the time already waited, so the number of attempts is logarithmic in it.
3. A wait above `RETRY_TOLD_S` is reported to the log `kvstore.backup`, and to `tell` if given.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Final, NamedTuple, NoReturn, TypeVar

from kvstore.errors import Argument, DeterminateError, IndeterminateError, UsageError
from kvstore.limits import RETRY_S, RETRY_TOLD_S

LOG: Final = logging.getLogger("kvstore.backup")

_PAUSE_S_MIN = 0.001
_PAUSE_S_MAX = 10.0
_PAUSE_S_QUICK = 0.25
"""Longest pause of the first seconds, in which contention ends."""
_PAUSE_SHARE = 8
"""A later pause is at most an eighth of the time waited: the end of an outage is noticed soon."""

_T = TypeVar("_T")


class Waiting(NamedTuple):
    """A call that is being tried again: `cause` is its last failure."""

    cause: str
    waited_s: float
    patience_s: float

    def __str__(self) -> str:
        return f"tried again for {self.waited_s:.0f} s of {self.patience_s:g} s: {self.cause}"


class Patience:
    """How long, and at which pauses, calls are repeated. Shared by any number of calls."""

    def __init__(
        self,
        seconds: float | None = None,
        *,
        tell: Callable[[Waiting], None] | None = None,
        pause: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Long waits are reported to `tell`; an exception from it ends the wait.

        Raises `UsageError` unless `seconds` is a number of at least 0.
        """
        if seconds is not None:
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise UsageError(
                    (Argument.of("patience", seconds), " is no number"), "pass seconds"
                )
            if not 0 <= seconds < math.inf:
                raise UsageError(
                    (Argument.of("patience", seconds), " is out of range"),
                    "pass seconds, 0 or more",
                )
        self._seconds = seconds
        self.tell = tell
        self.pause = pause
        self.monotonic = monotonic

    @property
    def seconds(self) -> float:
        """How long a call is repeated; `RETRY_S` by default."""
        return RETRY_S if self._seconds is None else self._seconds

    def tries(self) -> Tries:
        """Begin a call that may be made several times."""
        return Tries(self, self.monotonic())

    def over(self, call: Callable[[], _T]) -> _T:
        """Repeat an idempotent call until it succeeds. Raises the last failure at the end."""
        tries: Tries | None = None
        began = self.monotonic()
        while True:
            try:
                return call()
            except (DeterminateError, IndeterminateError) as error:  # noqa: PERF203  # rare
                tries = tries or Tries(self, began)
                tries.wait(error)


class Tries:
    """The attempts of one call."""

    def __init__(self, patience: Patience, began: float) -> None:
        self._patience = patience
        self._began = began
        self._paused = 0.0
        self._count = 0
        self._tell_at = RETRY_TOLD_S

    def wait(self, error: DeterminateError | IndeterminateError) -> None:
        """Pause before the next attempt. Raises `error` when patience has ended."""
        patience = self._patience
        # Pauses are summed too: a pause in a test moves no clock.
        waited = max(patience.monotonic() - self._began, self._paused)
        if waited >= patience.seconds:
            self._give_up(error, waited)
        if waited >= self._tell_at:
            self._tell_at = 2 * waited
            told = Waiting(str(error), waited, patience.seconds)
            LOG.warning("%s", told)
            if patience.tell is not None:
                patience.tell(told)
        seconds = self._next_pause(waited)
        self._paused += seconds
        patience.pause(seconds)

    def _next_pause(self, waited: float) -> float:
        most = min(max(_PAUSE_S_QUICK, waited / _PAUSE_SHARE), _PAUSE_S_MAX)
        limit = min(_PAUSE_S_MIN * 2 ** min(self._count, 20), most)
        self._count += 1
        # Jitter: two scripts that collided do not collide again.
        seconds: float = min(limit * random.uniform(0.5, 1.0), self._patience.seconds - waited)
        return max(seconds, 0.0)  # the patience may have become shorter since `wait` looked

    def _give_up(self, error: DeterminateError | IndeterminateError, waited: float) -> NoReturn:
        if self._count:
            LOG.warning("given up after %.0f s: %s", waited, error)
        raise error


PATIENCE: Final = Patience()
"""The patience of a storage that was opened without one."""
