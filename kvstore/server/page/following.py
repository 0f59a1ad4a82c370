"""The store of `kvstore ui`: read as it moves, and never in the way of the process that owns it.

A live reader takes no lock, so a service can start while the page is open. A store in memory is
read from its journal, as of the opening. Only a revert opens the store to write, or asks its owner.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from kvstore.live import follow
from kvstore.opening import engine_at, open_read_only
from kvstore.store import Store

PAGE_STALENESS_S = 0.5


def opened_to_look(path: Path) -> AbstractContextManager[Store]:
    """The store at `path`, to read. Raises as `kvstore.follow`."""
    if engine_at(path) == "memory":
        return open_read_only(path)
    return follow(path, PAGE_STALENESS_S)
