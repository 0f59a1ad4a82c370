"""The parts inside an open store, for tests that watch them, break them or call them directly.

    engine = parts_of(store).engine
    monkeypatch.setattr(engine, "sync", fail)

The parts are no interface for applications: they change from release to release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.changes.index import ChangeIndex
from kvstore.engine import DATA, Engine
from kvstore.engine.rocks import RocksEngine
from kvstore.mvcc import Versions
from kvstore.remote.shared import SharedStore
from kvstore.retention.gc import Collector
from kvstore.store import Store
from kvstore.timeline.changesets import Changesets
from kvstore.timeline.committer import Committer
from kvstore.timeline.holds import Holds
from kvstore.timeline.imports import Imports
from kvstore.timeline.read_times import Clears
from kvstore.transaction import Transactions


@dataclass(frozen=True, slots=True)
class StoreParts:
    """The parts of one store."""

    engine: Engine
    versions: Versions
    index: ChangeIndex
    committer: Committer
    holds: Holds
    imports: Imports
    clears: Clears
    changesets: Changesets
    collector: Collector
    transactions: Transactions


def parts_of(store: Store) -> StoreParts:
    """The parts of `store`, the same objects on each call."""
    shared = store._parts
    return StoreParts(
        store._engine,
        store._versions,
        shared.index,
        store._committer,
        shared.holds,
        shared.imports,
        shared.clears,
        store._changesets,
        store._collector,
        store._transactions,
    )


def data_family(store: Store) -> Any:
    """RocksDB's family of the versions of `store`, to set its options and to flush it."""
    engine = store._engine
    assert isinstance(engine, RocksEngine)
    return engine._family[DATA]


def is_resting(shared: SharedStore) -> bool:
    """Whether a guest of a shared store looks seldom, because nobody reads it."""
    state: Any = shared._state
    return bool(state._is_resting)
