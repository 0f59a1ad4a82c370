"""kvstore as a subject in other states: without a change log, beside range tombstones, imported,
flushed many times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvstore
from benchmarks.data import Data
from benchmarks.ours import Ours
from benchmarks.raw import copy_new_files
from benchmarks.subject import Subject, Work
from kvstore import bulk
from kvstore.mvcc.write_set import stage


class Unindexed(Ours):
    """The same store, but commits leave no entry in the change log.

    It is a process of its own. In one process the memory that one kind of commit has taken from the
    system would be free for the other kind.
    """

    name = "kvstore, no change log"

    def fill(self) -> Work:
        filled = super().fill()

        def work() -> int:
            rows = filled()
            index = self.store._parts.index
            families = self.store._parts.versions.engine.families

            def stage_versions(batch: Any, writes: Any, timestamp: int, _: object) -> list[Any]:
                stage(batch, writes, timestamp, families)
                return []

            index.stage_commit, index.stage = stage_versions, lambda *_, **__: []
            return rows

        return work


class Copied(Ours):
    """The same store, with copies of the new files of its checkpoints."""

    name = "kvstore, checkpoints copied"

    def increment(self, rows: int, is_single: bool) -> Work:
        target, checkpoint = self.directory / "copies", self.fresh("checkpoint")
        target.mkdir(exist_ok=True)

        def work() -> int:
            self.store.checkpoint(checkpoint)
            copy_new_files(checkpoint, target)
            return rows

        return work


class Tenth(Ours):
    """A store of a tenth of the rows: work in proportion to changes takes as long there."""

    name = "kvstore, a tenth of the rows"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, Data(data.rows // 10))


class HundredTombstones(Ours):
    """Beside 100 range tombstones that tile the key space, older than the rows."""

    tombstones = 100


class Sides(Subject):
    """The same rows in stores with and without range tombstones, all in one process.

    Two processes that run the same code differ by more than the effect that is measured.
    """

    name = "kvstore, range tombstones"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        kinds = {"none": Ours, "100": HundredTombstones}
        self._stores = {side: kind(self._at(side), data) for side, kind in kinds.items()}

    def fill(self) -> Work:
        return self._each("fill")

    def settle(self) -> Work:
        return self._each("settle")

    def get(self, side: str, **arguments: Any) -> Work:
        return self._stores[side].get(**arguments)

    def get_many(self, side: str, **arguments: Any) -> Work:
        return self._stores[side].get_many(**arguments)

    def scan(self, side: str = "") -> Work:
        return self._stores[side].scan() if side else self._each("scan")

    def scan_arrow(self, side: str) -> Work:
        return self._stores[side].scan_arrow()

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _at(self, side: str) -> Path:
        directory = self.directory / side.replace(" ", "-")
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _each(self, operation: str) -> Work:
        works = [getattr(store, operation)() for store in self._stores.values()]
        return lambda: sum(work() for work in works)


class Imported(Ours):
    """A store whose rows came as one bulk load: each carries a stamp reference."""

    name = "kvstore, imported"

    def fill(self) -> Work:
        def work() -> int:
            self.close()
            self.store = kvstore.open(self.fresh("db"))
            return self._load(1)

        return work

    def load_more(self) -> Work:
        """Load a hundredth of the rows once more."""

        def work() -> int:
            self.marks["before"] = self.now()
            return self._load(100)

        return work

    def changes_loaded(self) -> Work:
        """Read the changes of `load_more`. Counts the rows of the store, as a scan does."""

        def work() -> int:
            found = self.store.changes_batches(self.marks["before"])
            assert sum(batch.num_rows for batch in found) == len(self.data.keys[::100])
            return self.data.rows

        return work

    def _load(self, step: int) -> int:
        staging = self.fresh("staging")
        load = bulk.Import.create(staging)
        rows = self.data.keys[::step], self.data.values[::step]
        with load.writer() as writer:
            for key, value in zip(*rows, strict=True):
                writer.put(key, value)
        load.seal()
        bulk.ingest(self.store, staging, move=True)
        return len(rows[0])


class Flushed(Subject):
    """A store that took many checkpoints, each of them after a put."""

    name = "kvstore, after checkpoints"

    _TIMES = 32
    """A multiple of the files that are merged at once, so that the merges count in full."""

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        self.taken = 0

    def reopen(self, checkpoints: int) -> Work:
        """Open and close the store behind a number of checkpoints."""
        self._take(checkpoints)

        def work() -> int:
            for _ in range(self._TIMES):
                kvstore.open(self.directory / "db").close()
            return self._TIMES

        return work

    def checkpoint(self, checkpoints: int) -> Work:
        """Put a row and take a checkpoint behind a number of checkpoints."""
        self._take(checkpoints)

        def work() -> int:
            self._take(self.taken + self._TIMES)
            return self._TIMES

        return work

    def _take(self, checkpoints: int) -> None:
        with kvstore.open(self.directory / "db") as store:
            for number in range(self.taken, checkpoints):
                store.put(b"%09d" % number, b"")
                store.checkpoint(self.fresh("checkpoint"))
        self.taken = max(self.taken, checkpoints)
