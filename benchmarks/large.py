"""kvstore as a subject that holds many rows: a hundred million of them are to cost what ten cost.

The rows come as one bulk load, as a cluster brings them. Each operation does the same work at any
number of rows, or work in proportion to the rows, so two stores of different sizes compare. Rows
are made in pieces, and their making is not timed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import kvstore
from benchmarks.data import Data
from benchmarks.ours import Ours, batches
from benchmarks.subject import Stopwatch, Timed, Work
from kvstore import bulk

_PIECE: Final = 1 << 20
_STRETCH: Final = 100_000
_TIMES: Final = 10


class Large(Ours):
    """A store whose rows came as one bulk load."""

    name = "kvstore, many rows"

    def load(self) -> Work:
        """Write all rows to a staging directory, and add them to a new store."""

        def work() -> Timed:
            self.close()
            watch, staging = Stopwatch(), self.fresh("staging")
            self.store = self._opened(self.fresh("db"))
            load = bulk.Import.create(staging)
            with load.writer() as writer:
                for first in range(0, self.data.rows, _PIECE):
                    piece = batches(self.data, first, min(first + _PIECE, self.data.rows))
                    with watch:
                        for each in piece:
                            writer.write(each)
            with watch:
                load.seal()
                bulk.ingest(self.store, staging, move=True)
            return watch.total(self.data.rows)

        return work

    def reopen(self) -> Work:
        """Open and close the store."""

        def work() -> int:
            for _ in range(_TIMES):
                self.close()
                self.store = self._opened(self.directory / "db")
            return _TIMES

        return work

    def get_near(self, count: int, step: int) -> Work:
        """Read rows of one stretch of neighbours: cold blocks are not the subject."""
        first = (self.data.rows - _STRETCH) // 2
        keys = random.Random(step).choices(self.data.keys[first : first + _STRETCH], k=count)
        for key in keys:
            assert self.store.get(key) is not None

        def work() -> int:
            return sum(self.store.get(key) is not None for key in keys)

        return work

    def _opened(self, path: Path) -> kvstore.Store:
        # No cache of newest values: a look-up is to go to the files.
        return kvstore.open(path, options=kvstore.Options(value_cache_bytes=0))


class LargeTenth(Large):
    """The same with a tenth of the rows, in a process of its own."""

    name = "kvstore, a tenth of the rows"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, Data(data.rows // 10))
