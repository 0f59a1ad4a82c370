"""kvstore with keys that wait for their expiry, beside a store without any: both in one process."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.data import Data
from benchmarks.ours import Ours
from benchmarks.raw import in_threads
from benchmarks.subject import Subject, Work

WAITING: Final = 1_000_000
_BATCH: Final = 20_000
_LIFE: Final = timedelta(days=365)


class Waiting(Ours):
    """A store with further keys that expire within a year: a million in a large run."""

    def fill(self) -> Work:
        filled = super().fill()
        count = min(WAITING, self.data.rows)

        def work() -> int:
            rows = filled()
            for first in range(0, count, _BATCH):
                with self.store.batch(durability="async") as batch:
                    for number in range(first, min(first + _BATCH, count)):
                        life = _LIFE - timedelta(seconds=number)
                        batch.put(b"waiting/%09d" % number, b"v", expires=life)
            return rows

        return work

    def put_expiring(self, count: int, step: int) -> Work:
        """As `put_each`, each with an expiry."""
        put = partial(self.store.put, durability="async", expires=_LIFE)
        return in_threads(put, self.data.updates(count, step), 1)


class Expiring(Subject):
    """The same rows in a store with keys that wait, and in one without."""

    name = "kvstore, keys that expire"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        kinds = {"none": Ours, "waiting": Waiting}
        self._stores = {side: kind(self._at(side), data) for side, kind in kinds.items()}

    def fill(self) -> Work:
        return self._each("fill")

    def settle(self) -> Work:
        return self._each("settle")

    def scan(self) -> Work:
        return self._each("scan")

    def get(self, side: str, **arguments: Any) -> Work:
        return self._stores[side].get(**arguments)

    def put_each(self, side: str, **arguments: Any) -> Work:
        return self._stores[side].put_each(**arguments)

    def put_expiring(self, side: str, **arguments: Any) -> Work:
        return self._stores[side].put_expiring(**arguments)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _at(self, side: str) -> Path:
        directory = self.directory / side
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _each(self, operation: str) -> Work:
        works = [getattr(store, operation)() for store in self._stores.values()]
        return lambda: sum(work() for work in works)
