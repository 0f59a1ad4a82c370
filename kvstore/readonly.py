"""A store that is only read: a checkpoint, or the directory of a store that nobody has open.

Any number of processes may have it open at once, for none changes a byte; hence it cannot take
part in the one thing a committer does, to move the timeline on.

Invariants
1. `upper` stays what it was at opening: times above it are not complete here, ever.
2. Every write is refused before it reaches the engine, so a refusal never poisons the reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from kvstore.commit import Committer, Durability, Stage
from kvstore.engine.api import WriteBatch
from kvstore.errors import UsageError
from kvstore.timestamp import Timestamp


class ReadOnlyCommitter(Committer):
    """The frontiers of a store that stands still. Raises `UsageError` on every commit."""

    def commit_staged(
        self,
        stage_entries: Stage,
        *,
        durability: Durability | None = None,
        check: Callable[[], None] | None = None,
    ) -> Timestamp:
        self._refuse()

    def write_meta(
        self, stage_records: Callable[[WriteBatch], None], *, durable: bool = True
    ) -> None:
        self._refuse()

    def announce(self, stage_records: Stage) -> Timestamp:
        self._refuse()

    def require_writable(self) -> None:
        self._refuse()

    def close_upto_now(self) -> Timestamp:
        return self.upper

    def sync(self) -> Timestamp:
        return self.upper

    def make_durable(self) -> Timestamp:
        return self.upper

    def finish(self) -> None:
        self._is_finished, self.is_healthy = True, False
        self.wake()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"{self._where} was opened to be read only", "open it with kvstore.open to write"
        )
