"""Ordinary writes during the imports of months: delays updated, flights cancelled."""

from __future__ import annotations

import random
import threading
from types import TracebackType

from examples.demo import flights
from kvstore.store import Store

BATCH = 20
PAUSE_S = 0.02
CANCELLED_SHARE = 0.1


class LiveTraffic:
    """A thread that updates flights already in the store, until the `with` block ends."""

    def __init__(self, store: Store, *, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._keys: list[bytes] = []
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="live-traffic")
        self.updated = 0
        self.cancelled = 0

    def now_flying(self, keys: list[bytes]) -> None:
        """From now on, write to some of these flights."""
        self._keys = keys

    def __enter__(self) -> LiveTraffic:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stop.wait(PAUSE_S):
                if self._keys:
                    self._write_some()
        except BaseException as error:  # noqa: BLE001  # handed to the main thread, which raises it
            self._failure = error

    def _write_some(self) -> None:
        chosen = self._random.sample(self._keys, BATCH)
        found = zip(chosen, self._store.get_many(chosen), strict=True)
        with self._store.batch() as batch:
            for key, value in found:
                if value is None:
                    continue
                if self._random.random() < CANCELLED_SHARE:
                    batch.delete(key)
                    self.cancelled += 1
                else:
                    flight = flights.decode(value)
                    flight["dep_delay"] = (flight["dep_delay"] or 0) + self._random.randint(1, 90)
                    batch.put(key, flights.encode(flight))
                    self.updated += 1
