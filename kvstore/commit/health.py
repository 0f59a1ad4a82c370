"""Health: a store is sound until a failed write poisons it, or until it is closed.

    sound --a write or an fsync fails, or an interrupt comes between two steps--> poisoned
    sound, poisoned --close--> finished

Invariants
1. After a failed write or fsync nobody knows what is on disk, so every later call raises until the
   store is opened again. (An fsync that fails once may succeed the next time without having
   written anything: fsyncgate, 2018.)
2. The stored bytes and the state in memory change together. An exception between the two changes,
   a signal's included, poisons the store.
3. Later calls report the first failure, and no thread waits for a store that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.commit.frontiers import Frontiers
from kvstore.errors import ClosedError, KVStoreError, OutOfSpaceError, PoisonedError


class Health:
    """Whether one store may still be used. `where` names the store in errors."""

    def __init__(self, frontiers: Frontiers, where: str) -> None:
        self._frontiers = frontiers
        self._where = where
        self._is_finished = False
        self.poison = ""
        """Why the store is poisoned; empty while it is sound."""

    def require(self) -> None:
        """Raise `PoisonedError` if an earlier write failed, `ClosedError` after `finish`."""
        if self._is_finished:
            raise ClosedError(self._where)
        if self.poison:
            raise PoisonedError(self._where, self.poison)

    def guarded(self, action: Callable[..., None], *arguments: object) -> None:
        """Write or sync by `action`; a failure poisons the store. Hot."""
        try:
            action(*arguments)
        except KVStoreError as error:
            self._end(error.what if isinstance(error, OutOfSpaceError) else str(error))
            raise

    @contextmanager
    def poisoning(self) -> Iterator[None]:
        """An exception inside the block, also that of a signal, poisons the store."""
        try:
            yield
        except BaseException as error:
            self.interrupted(error)
            raise

    def interrupted(self, error: BaseException) -> None:
        """Poison the store after `error`: for hot paths that save the object of `poisoning`."""
        if not self._is_finished:
            self._end(self.poison or f"interrupted: {type(error).__name__}")

    def finish(self) -> None:
        """The store was closed."""
        self._is_finished = True
        self._frontiers.is_healthy = False
        self._frontiers.wake()

    def _end(self, poison: str) -> None:
        self.poison, self._frontiers.is_healthy = poison, False
        self._frontiers.wake()
