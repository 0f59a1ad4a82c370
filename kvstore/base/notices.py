"""The log of a store: one line for each event that an operator wants to see, with facts as fields.

    kvstore.store              opened, recovered, closed       conflicts above a rate, slow fsyncs
    kvstore.slow                                               operations above a bound
    kvstore.retention.gc       collected, span cleared         failures of background collection
    kvstore.timeline.imports   added, reverted
    kvstore.backup             backed up, compacted, expired   waits for the storage
    kvstore.pull               push added, reverted, refused   failures of looks at a log of pushes
    kvstore.tasks              failures of tasks

A record has the attributes `event`, the name of the event, and `facts`, a mapping of names to
numbers, texts and times. Its message has both as text.

Invariants
1. Keys and values are never logged. A span is, by its bounds.
2. A logger that is off costs one comparison. Each logger is looked up once: the look takes a lock
   of `logging`, which an interrupt in the wrong place leaves held, for all threads and for ever.
3. Warnings that could come with each call come once in `WARNING_EVERY_S`.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any, Final

from kvstore.limits import WARNING_EVERY_S

_logger: Final = cache(logging.getLogger)


def notice(logger: str, event: str, *, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event with its facts."""
    log = _logger(logger)
    if not log.isEnabledFor(level):
        return
    text = ", ".join(f"{name} {fact}" for name, fact in facts.items())
    log.log(level, "%s: %s", event, text, extra={"event": event, "facts": facts})


class Burst:
    """Counts events, and logs a warning when `limit` of them come within `WARNING_EVERY_S`."""

    __slots__ = ("_begun", "_count", "_limit", "_logger", "_what")

    def __init__(self, logger: str, what: str, limit: int) -> None:
        self._logger, self._what, self._limit = logger, what, limit
        self._begun = float("-inf")
        self._count = 0

    def count(self, **facts: Any) -> None:
        """Count one event. `facts` are logged with the warning. 0.1 us."""
        now = time.monotonic()
        if now - self._begun > WARNING_EVERY_S:
            self._begun, self._count = now, 0
        self._count += 1
        if self._count == self._limit:
            notice(
                self._logger,
                self._what,
                level=logging.WARNING,
                count=self._count,
                seconds=round(now - self._begun, 3),
                **facts,
            )
