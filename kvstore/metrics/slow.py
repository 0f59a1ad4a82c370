"""A warning for each operation of a store that takes longer than its operator expects.

    from kvstore.metrics.slow import warn_of_slow

    warn_of_slow(store, timedelta(milliseconds=200))

The logger `kvstore.slow` then has a record for each such call: its facts are the operation, the
seconds and the store. Keys and values are not among them. A scan ends when it returns its iterator.
Calls of the store, of its tables (`table.put_batch`), commits of batches and transactions
(`commit`), and the calls of clients of a server (`put_many of a client`) are operations.

Invariants
1. A store that is not watched pays nothing: the methods of one object are replaced.
2. A call behaves as before, also where it raises.
3. One operation is logged once in `WARNING_EVERY_S`, with the number of slow calls before it.
4. An operation inside another one is part of it, and is not told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from kvstore.base.arguments import AGE
from kvstore.base.notices import SlowLog
from kvstore.base.timestamp import AgeLike
from kvstore.errors import UsageError

OPERATIONS: Final = (
    *("get", "get_many", "floor", "floor_many", "history", "scan", "scan_batches", "changes"),
    *("put", "put_many", "put_if", "delete", "delete_if", "delete_range", "update", "increment"),
    *("transact", "revert_range", "revert_import", "clear_range", "gc", "checkpoint", "sync"),
)
"""The methods of a store that are watched, and traced."""

TABLE_OPERATIONS: Final = (
    *("get", "get_many", "scan", "rows", "count", "find", "history", "latest", "join", "changes"),
    *("put", "insert", "put_batch", "update", "delete", "delete_many", "delete_range"),
    *("persist", "revert", "clear", "drop", "alter", "build_index", "tidy"),
)
"""The methods of a table that are watched."""


class Watchable(Protocol):
    """A store."""

    requests: Any

    @property
    def path(self) -> Path | None:
        """See `Store`."""
        ...

    def table(self, name: str) -> Any:
        """See `Store`."""
        ...


def warn_of_slow(store: Watchable, longer_than: AgeLike) -> None:
    """Log the operations of a store that take longer, until it is closed. Costs 0.3 us for each
    call, and 20 us for each `store.table(name)`. Raises `UsageError` for a store that is watched
    already, and for a negative time."""
    if hasattr(vars(store).get("put"), "is_watched"):
        raise UsageError(f"{store!r} is watched already", "watch it once")
    least = AGE.check("longer_than", longer_than)
    log = SlowLog(str(store.path or "in memory"), least.total_seconds())
    for name in OPERATIONS:
        setattr(store, name, log.watched(getattr(store, name), name))
    vars(store)["table"] = partial(_watched_table, log, store.table)
    store.requests.watch(log)


def _watched_table(log: SlowLog, open_table: Callable[..., Any], *args: Any, **made: Any) -> Any:
    table = open_table(*args, **made)
    for name in TABLE_OPERATIONS:
        setattr(table, name, log.watched(getattr(table, name), f"table.{name}"))
    return table
