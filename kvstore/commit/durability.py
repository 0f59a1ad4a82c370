"""Durability: how a commit waits for the disk, and one fsync for all commits that wait together.

`"sync"` has an fsync of its own. `"async"` does not wait. `"group"` shares an fsync: the first
commit that waits becomes the leader and syncs, outside the commit lock, for all that is written by
then; the others wait for it, and one of the commits that came too late leads the next fsync.

Invariants
1. `durable <= upper`, and everything below `durable` was written before an fsync that returned.
2. A commit that is durable returns, even if the store was poisoned or closed meanwhile.
3. A leader that was interrupted lets another thread lead. One that says nothing for
   `GROUP_COMMIT_WAIT_S_MAX` is passed over: two threads may sync at once.
"""

from __future__ import annotations

import threading
from typing import Literal, TypeAlias

from kvstore.commit.frontiers import Frontiers
from kvstore.commit.health import Health
from kvstore.engine.api import Engine
from kvstore.errors import KVStoreError, UsageError
from kvstore.limits import GROUP_COMMIT_WAIT_S_MAX

Durability: TypeAlias = Literal["sync", "group", "async"]
DURABILITIES = ("sync", "group", "async")


def require_durability(durability: str) -> Durability:
    """Raise `UsageError` on an unknown one."""
    if durability not in DURABILITIES:
        raise UsageError(f"durability={durability!r}", f"pass one of {', '.join(DURABILITIES)}")
    return durability  # type: ignore[return-value]  # just checked


class GroupSync:
    """The fsyncs of one store. All that lies below `upper` when it is opened is durable."""

    def __init__(self, engine: Engine, frontiers: Frontiers, health: Health) -> None:
        self._engine = engine
        self._frontiers = frontiers
        self._health = health
        self.durable: int = frontiers.upper
        """Everything below it survives a crash."""
        self._lock = threading.RLock()  # taken by itself, as that of the frontiers
        self._synced = threading.Condition(self._lock)
        self.is_syncing = False

    def wait(self, upper: int) -> None:
        """Return once everything below `upper` is on disk, leading an fsync if nobody does."""
        while True:
            leads = False
            try:
                with self._lock:
                    while self.durable < upper and self.is_syncing:
                        if not self._synced.wait(GROUP_COMMIT_WAIT_S_MAX):
                            break
                    if self.durable >= upper:
                        return
                    self._health.require()
                    leads = self.is_syncing = True
                self.sync(leading=True)
                leads = False
            except KVStoreError:
                if self.durable < upper:
                    raise
            finally:
                if leads:
                    with self._lock:
                        self.is_syncing = False
                        self._synced.notify_all()

    def sync(self, *, leading: bool = False) -> None:
        """One fsync for all that is written by now. The leader's ends its turn."""
        upper, is_synced = self._frontiers.upper, False
        try:
            self._health.guarded(self._engine.sync)
            is_synced = True
        finally:
            with self._lock:
                if is_synced and not self._health.poison:
                    self.durable = max(self.durable, upper)
                if leading:
                    self.is_syncing = False
                self._synced.notify_all()
