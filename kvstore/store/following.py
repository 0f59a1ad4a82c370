"""Standing by for another store: taking its history with its own timestamps, and promotion."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import UsageError
from kvstore.replica import Replica
from kvstore.store.capturing import Capturing
from kvstore.timestamp import Timestamp


class Following(Capturing):
    """Standing by for another store."""

    @property
    def is_replica(self) -> bool:
        """Whether it follows another store, and refuses writes of its own until `promote`."""
        return self._committer.policy.source is not None

    def replica(self) -> Replica:
        """The writing end of a replica. Raises `UsageError` if this is an ordinary store."""
        if self._live().policy.source is None:
            raise UsageError(f"{self.path} is no replica", "make one with backup.replicate")
        return Replica(self._parts, on_index_floor=self._raise_index_floor)

    def promote(self) -> Timestamp:
        """Make a replica an ordinary store; returns the `upper` its commits begin at.

        What its source did after that is not in it, and never will be. Raises as `replica`.
        """
        return self.replica().promote()

    def wait_beyond(
        self, upper: int, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Return once `self.upper` is above `upper`, `stop()` is true, or after `timeout` seconds.

        Commits wake it, and `wake` does: nothing is polled. Raises `ClosedError` on close.
        """
        committer = self._live()
        committer.wait_published(upper, timeout=timeout, stop=lambda: self._closed or stop())
        self._require_live()

    def wake(self) -> None:
        """Have those in `wait_beyond` look again."""
        self._committer.wake()
