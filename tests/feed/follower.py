"""A consumer that follows a feed in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore import Feed, FeedBatch
from kvstore.errors import KVStoreError

WAIT_S = 120.0


def keys(batches: list[FeedBatch] | Feed) -> list[bytes]:
    return [event.key for batch in batches for event in batch.events]


class Follower:
    """A consumer that follows in a thread of its own; `wait` returns once its condition
    holds."""

    def __init__(self, feed: Feed, *, heartbeat: float | None = None) -> None:
        self.batches: list[FeedBatch] = []
        self.error: KVStoreError | None = None
        self._changed = threading.Condition()
        self._feed, self._heartbeat = feed, heartbeat
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for batch in self._feed.batches(follow=True, heartbeat=self._heartbeat):
                with self._changed:
                    self.batches.append(batch)
                    self._changed.notify_all()
        except KVStoreError as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def wait(self, until: Callable[[Follower], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: until(self), WAIT_S)

    def wait_error(self) -> KVStoreError:
        self.wait(lambda follower: follower.error is not None)
        assert self.error is not None
        return self.error
