"""A warning for each operation of a store that takes longer than its operator expects.

    from kvstore.metrics.slow import warn_of_slow

    warn_of_slow(store, timedelta(milliseconds=200))

The logger `kvstore.slow` then has a record for each such call: its facts are the operation, the
seconds and the store. Keys and values are not among them. A scan ends when it returns its iterator.

Invariants
1. A store that is not watched pays nothing: the methods of one object are replaced.
2. A call behaves as before, also where it raises.
3. One operation is logged once in `WARNING_EVERY_S`, with the number of slow calls before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Final, Protocol

from kvstore.base.notices import notice
from kvstore.errors import Argument, UsageError
from kvstore.limits import WARNING_EVERY_S

OPERATIONS: Final = (
    *("get", "get_many", "floor", "floor_many", "history", "scan", "scan_batches", "changes"),
    *("put", "put_many", "put_if", "delete", "delete_if", "delete_range", "update", "increment"),
    *("transact", "revert_range", "revert_import", "clear_range", "gc", "checkpoint", "sync"),
)
"""The methods of a store that are watched, and traced."""


class Watchable(Protocol):
    """A store."""

    @property
    def path(self) -> Path | None:
        """See `Store`."""
        ...


def warn_of_slow(store: Watchable, longer_than: timedelta) -> None:
    """Log the operations of a store that take longer, until it is closed. Costs 0.3 us for each
    call. Raises `UsageError` for a store that is watched already, and for a negative time."""
    if hasattr(vars(store).get("put"), "is_watched"):
        raise UsageError(f"{store!r} is watched already", "watch it once")
    if longer_than < timedelta(0):
        raise UsageError(
            Argument("longer_than", str(longer_than)), "pass a time that is not negative"
        )
    where = str(store.path or "in memory")
    for name in OPERATIONS:
        watched = _watched(getattr(store, name), name, where, longer_than.total_seconds())
        setattr(store, name, watched)


def _watched(
    call: Callable[..., Any], name: str, where: str, seconds_max: float
) -> Callable[..., Any]:
    told_at, untold = float("-inf"), 0

    def tell(seconds: float) -> None:
        nonlocal told_at, untold
        now = time.monotonic()
        if now - told_at < WARNING_EVERY_S:
            untold += 1
            return
        facts: dict[str, Any] = {"operation": name, "store": where, "took_s": round(seconds, 6)}
        notice("kvstore.slow", "slow operation", level=logging.WARNING, **facts, before=untold)
        told_at, untold = now, 0

    @wraps(call)
    def watched(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            if (took := time.perf_counter() - began) > seconds_max:
                tell(took)

    watched.is_watched = True  # type: ignore[attr-defined]
    return watched
