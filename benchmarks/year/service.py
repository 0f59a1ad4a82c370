"""The actions of a service, each made on the store and on the model, and timed.

Times are in seconds of one call, of one look-up or of one row, as the name of the cost says.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import kvstore
from benchmarks.subject import tree_bytes
from benchmarks.year.levels import PROCESSOR
from benchmarks.year.model import Model
from benchmarks.year.plan import Plan
from kvstore import backup, bulk
from tests.harness.parts import parts_of

HOT: Final = (b"hot/a", b"hot/b", b"hot/c")
_CHECKPOINTS_KEPT: Final = 2
_LOOKUPS: Final = 100
_SCANNED_ROWS: Final = 1_000
_COMMIT_ROWS: Final = 10
_COUNTERS: Final = 10
_DELETED_SHARE: Final = 0.05
"""Deletes among the rows of an import."""
_PAGE: Final = 4096


class Costs:
    """The times and the amounts since the last `take`, by name."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def time(self, name: str, items: int = 1) -> Iterator[None]:
        """Time the block, and note its processor time beside it."""
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        cpu, took = time.process_time() - cpu_began, time.perf_counter() - began
        self._found[name].append(took / items)
        self._found[name + PROCESSOR].append(cpu / items)

    def note(self, name: str, amount: float) -> None:
        self._found[name].append(amount)

    def take(self) -> dict[str, float]:
        """The median of each."""
        found, self._found = self._found, defaultdict(list)
        return {name: statistics.median(values) for name, values in found.items()}


class Service:
    """One store with its model, its collection of backups, and a clock that it moves itself."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.plan = plan
        self.clock = kvstore.ManualClock(1_767_225_600 * 10**9)
        self.model = Model()
        self.costs = Costs()
        self.directory = directory
        self.collection = backup.Collection(directory / "collection", clock=self.clock)
        self.store = self._open()
        self._pick = random.Random(2026)
        self._users = [b"user/%06d/" % number for number in range(plan.users)]
        self._filler = self._pick.randbytes(_PAGE + plan.value_bytes)
        self._recent: deque[int] = deque()
        self._checkpoints: deque[Path] = deque()
        self._count = 0

    @property
    def actions(self) -> dict[Callable[[], None], int]:
        """How often a day has each action."""
        plan = self.plan
        return {
            self.add_import: plan.imports,
            self.revert_import: plan.reverts,
            self.delete_user: plan.deletes,
            self.put_hot: plan.hot_puts,
            self.commit: plan.commits,
            self.transact: plan.transactions,
            self.checkpoint: plan.checkpoints,
            self.read: plan.reads,
        }

    # -- writing ----------------------------------------------------------------------------

    def load(self) -> None:
        """Begin with most rows of all users, as the year would leave them."""
        keys = (user + b"%04d" % row for user in self._users for row in range(self._rows))
        rows = {key: self._value() for key in keys if self._pick.random() < 0.8}
        bulk.ingest(self.store, self._staged(rows), move=True)
        for key, value in rows.items():
            self.model.put(key, value)

    def add_import(self) -> None:
        rows: dict[bytes, bytes | None] = {}
        first = self._pick.randrange(len(self._users))
        users = self._users[first : first + self.plan.import_users]
        for _ in range(self.plan.import_rows):
            is_deleted = self._pick.random() < _DELETED_SHARE
            rows[self._key(users)] = None if is_deleted else self._value()
        staging = self._staged(rows)
        import_id = bulk.read_manifest(staging).import_id
        with self.costs.time("import"):
            bulk.ingest(self.store, staging, move=True)
        shutil.rmtree(staging)
        self.model.add(import_id, rows)
        self._recent.append(import_id)
        if len(self._recent) > self.plan.imports:
            self.model.keep(self._recent.popleft())

    def revert_import(self) -> None:
        if self._recent:
            import_id = self._pick.choice(self._recent)
            with self.costs.time("revert"):
                self.store.revert_import(import_id)
            self._recent.remove(import_id)
            self.model.revert(import_id)

    def delete_user(self) -> None:
        user = self._pick.choice(self._users)
        with self.costs.time("delete_range"):
            self.store.delete_range(user, _behind(user), durability="async")
        self.model.delete_user(user)

    def put_hot(self) -> None:
        key, value = self._pick.choice(HOT), b"%d" % self._next()
        self.store.put(key, value, durability="async")
        self.model.put(key, value)

    def commit(self) -> None:
        rows = {self._key(): self._value() for _ in range(_COMMIT_ROWS)}
        with self.costs.time("commit"), self.store.batch() as batch:
            for key, value in rows.items():
                batch.put(key, value)
        for key, value in rows.items():
            self.model.put(key, value)

    def transact(self) -> None:
        key = b"count/%02d" % self._pick.randrange(_COUNTERS)
        with self.costs.time("transaction"), self.store.transaction(durability="async") as txn:
            value = b"%d" % (int(txn.get(key) or 0) + 1)
            txn.put(key, value)
        self.model.put(key, value)

    # -- reading ----------------------------------------------------------------------------

    def read(self) -> None:
        """Look rows up, scan some, and scan across a hot key; each answer is compared."""
        keys = [self._key() for _ in range(_LOOKUPS)]
        with self.costs.time("get", _LOOKUPS):
            values = [self.store.get(key) for key in keys]
        _require(values == [self.model.get(key) for key in keys], "look-ups")
        start = self._pick.choice(self._users[: len(self._users) // 2])
        with self.costs.time("scan"):
            rows = list(self.store.scan(start, limit=_SCANNED_ROWS))
        _require(all(self.model.get(key) == value for key, value in rows), "a scan")
        with self.costs.time("scan of hot keys, limit 2"):
            hot = list(self.store.scan(HOT[0], limit=2))
        known = [(key, value) for key in HOT if (value := self.model.get(key)) is not None]
        _require(hot[: len(known)] == known[:2], "a scan of hot keys")

    def scan_parallel(self) -> None:
        with self.costs.time("parallel scan"):
            rows = sum(b.num_rows for b in self.store.scan_batches(workers=2))
        _require(rows == len(self.model.state()), "a parallel scan")

    # -- upkeep -----------------------------------------------------------------------------

    def checkpoint(self) -> None:
        target = self.directory / f"checkpoint-{self._next()}"
        with self.costs.time("checkpoint"):
            self.store.checkpoint(target)
        self._checkpoints.append(target)
        if len(self._checkpoints) > _CHECKPOINTS_KEPT:
            shutil.rmtree(self._checkpoints.popleft())

    def back_up(self) -> None:
        with self.costs.time("backup"):
            self.collection.backup(self.store)

    def expire(self) -> None:
        with self.costs.time("expiry of backups"):
            self.collection.expire(keep=timedelta(days=self.plan.backup_days))

    def collect(self) -> kvstore.GcReport:
        with self.costs.time("gc"):
            return self.store.gc(keep=timedelta(days=self.plan.keep_days))

    def reopen(self) -> None:
        self.store.close()
        with self.costs.time("opening"):
            self.store = self._open()

    def weigh(self) -> None:
        """Note the amounts: memory, files, bytes, records."""
        place = self.directory / "store"
        stats, costs = self.store.stats(), self.costs
        costs.note("memory", _resident_bytes())
        costs.note("files", sum(path.is_file() for path in place.rglob("*")))
        costs.note("disk", tree_bytes(place))
        costs.note("records in meta", _count(self.store, "meta"))
        costs.note("import records", stats["imports"])
        costs.note("fragments", stats["range_fragments"])
        costs.note("files of backups", sum(p.is_file() for p in self._backups.rglob("*")))
        costs.note("disk of backups", tree_bytes(self._backups))

    # -- inside -----------------------------------------------------------------------------

    @property
    def _backups(self) -> Path:
        return self.directory / "collection"

    @property
    def _rows(self) -> int:
        return self.plan.rows_per_user

    def _open(self) -> kvstore.Store:
        return kvstore.open(self.directory / "store", clock=self.clock)

    def _staged(self, rows: Mapping[bytes, bytes | None]) -> Path:
        staging = self.directory / f"staging-{self._next()}"
        load = bulk.Import.create(staging)
        with load.writer() as writer:
            for key, value in sorted(rows.items()):
                writer.delete(key) if value is None else writer.put(key, value)
        load.seal()
        return staging

    def _key(self, users: Sequence[bytes] = ()) -> bytes:
        return self._pick.choice(users or self._users) + b"%04d" % self._pick.randrange(self._rows)

    def _value(self) -> bytes:
        start = self._pick.randrange(_PAGE)
        return b"%08d" % self._next() + self._filler[start : start + self.plan.value_bytes]

    def _next(self) -> int:
        self._count += 1
        return self._count


def _behind(user: bytes) -> bytes:
    """The first key behind all keys that begin with `user`."""
    return user[:-1] + bytes([user[-1] + 1])


def _count(store: kvstore.Store, family: str) -> int:
    cursor, count = parts_of(store).engine.cursor(family), 0
    while keys := cursor.take(10_000)[0]:
        count += len(keys)
    return count


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * _PAGE


def _require(is_equal: bool, where: str) -> None:
    if not is_equal:
        raise WrongStateError(f"the store and the model differ: {where}")


class WrongStateError(Exception):
    """The store's answer is not the model's."""
