"""The log of a store: one line for each event that an operator wants to see, with facts as fields.

    kvstore.store              opened, recovered, closed       conflicts above a rate, slow fsyncs
    kvstore.server             starting, listening             stopping, stopped
    kvstore.requests           each request of a server
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

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache, wraps
from typing import Any, Final

from kvstore.limits import WARNING_EVERY_S

_logger: Final = cache(logging.getLogger)


def notice(logger: str, event: str, *, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event with its facts."""
    log = _logger(logger)
    if not log.isEnabledFor(level):
        return
    # `log.log` would look for the caller's line, which takes a third of the time of a request.
    record = logging.LogRecord(logger, level, "", 0, "%s: %s", (event, _Text(facts)), None)
    record.event, record.facts = event, facts
    log.handle(record)


class _Text:
    """The facts as text, made where a handler writes texts."""

    __slots__ = ("_facts",)

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def __str__(self) -> str:
        return ", ".join(f"{name} {fact}" for name, fact in self._facts.items())


def is_on(logger: str, level: int = logging.INFO) -> bool:
    """Whether an event of this level would be logged."""
    return _logger(logger).isEnabledFor(level)


_encode: Final = json.JSONEncoder(default=str).encode


class JsonLines(logging.Formatter):
    """A formatter of `logging`: one JSON object a line. Its fields are the time in UTC, the level,
    the logger, the process, the event, and the facts of the event. A record of another source has
    its message as the event."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        at = datetime.fromtimestamp(record.created, timezone.utc)
        facts: dict[str, Any] = getattr(record, "facts", {})
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="microseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "event": getattr(record, "event", None) or record.getMessage(),
        }
        line = {**line, **facts, **line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encode(line)


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


class SlowLog:
    """Tells of the operations of one store that take longer than `seconds_max`."""

    def __init__(self, where: str, seconds_max: float) -> None:
        self._where, self._seconds_max = where, seconds_max
        self._told: dict[str, tuple[float, int]] = {}
        """When an operation was told last, and how many calls of it were not told since."""
        self._inside = threading.local()

    def note(self, operation: str, seconds: float) -> None:
        """Tell of a call, if it was slow."""
        if seconds <= self._seconds_max:
            return
        now = time.monotonic()
        told_at, untold = self._told.get(operation, (float("-inf"), 0))
        if now - told_at < WARNING_EVERY_S:
            self._told[operation] = told_at, untold + 1
            return
        facts: dict[str, Any] = {"operation": operation, "store": self._where}
        facts |= {"took_s": round(seconds, 6), "before": untold}
        notice("kvstore.slow", "slow operation", level=logging.WARNING, **facts)
        self._told[operation] = now, 0

    @contextmanager
    def within(self) -> Iterator[None]:
        """The block is an operation that its caller tells of. No part of it is told."""
        before = getattr(self._inside, "is_told", False)
        self._inside.is_told = True
        try:
            yield
        finally:
            self._inside.is_told = before

    def watched(self, call: Callable[..., Any], operation: str) -> Callable[..., Any]:
        """`call`, which is told of."""
        inside = self._inside

        @wraps(call)
        def watched(*args: Any, **options: Any) -> Any:
            if getattr(inside, "is_told", False):
                return call(*args, **options)
            began, inside.is_told = time.perf_counter(), True
            try:
                return call(*args, **options)
            finally:
                inside.is_told = False
                self.note(operation, time.perf_counter() - began)

        watched.is_watched = True  # type: ignore[attr-defined]
        return watched
