"""Random histories of a store with imports and backups, against the model, on both engines."""

from __future__ import annotations

import shutil
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, multiple, rule

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.bulk.ingest import record_of
from kvstore.errors import (
    HistoryGoneError,
    KeyConflictError,
    UsageError,
)
from kvstore.store import Store
from kvstore.testing.histories import check_changes, check_whole
from kvstore.testing.strategies import keys, ops, rows
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of
from tests.mvcc.invariants import check_fragments
from tests.stateful.expiring import ExpiringMachine, lives


class WholeMachine(ExpiringMachine):
    """Adds imports and backups to the verbs of a store and to keys that expire."""

    staged = Bundle("staged")
    added = Bundle("added")
    engine = "rocksdb"

    def open_store(self) -> Store:
        how: Any = {"durability": "async", "clock": self.clock}
        if self.limits and self.engine == "rocksdb":
            how["options"] = kvstore.Options(value_cache_bytes=6000)  # of newest values
        return kvstore.open(self.place / "store", self.engine, **how)

    def check(self) -> None:
        check_fragments(parts_of(self.store).versions.view.fragments)
        super().check()

    # -- imports ----------------------------------------------------------------------------

    @rule(target=staged, content=rows, cut=keys, ends=st.dictionaries(keys, lives, max_size=3))
    def stage_import(
        self, content: dict[bytes, bytes | None], cut: bytes, ends: dict[bytes, timedelta]
    ) -> Any:
        """A key that is put and has a time in `ends` expires then, or when it is added later."""
        dues = {key: self.due(life) for key, life in ends.items() if content.get(key) is not None}
        staging = self.place / f"staged-{next(self.names)}"
        made = bulk.Import.create(staging)
        for part in ([k for k in content if k < cut], [k for k in content if k >= cut]):
            with made.writer() as writer:
                for key in sorted(part):
                    value, due = content[key], dues.get(key)
                    expires = None if due is None else Timestamp(due)
                    if value is None:
                        writer.delete(key)
                    else:
                        writer.put(key, value, expires=expires)
        made.seal()
        return made, content, dues

    @rule(
        target=added,
        source=consumes(staged),
        move=st.booleans(),
        on_conflict=st.sampled_from(["overwrite", "error"]),
    )
    def ingest(self, source: Any, move: bool, on_conflict: Any) -> Any:
        made, content, dues = source
        alive = self.model.state(TIMESTAMP_MAX)
        # a row that deletes counts as a write of its key too
        in_the_way = content.keys() & alive.keys()
        if on_conflict == "error" and in_the_way:
            with pytest.raises(KeyConflictError) as refused:
                bulk.ingest(self.store, made.staging, on_conflict=on_conflict, move=move)
            assert set(refused.value.keys) <= in_the_way
            return multiple()
        at = bulk.ingest(self.store, made.staging, on_conflict=on_conflict, move=move)
        self.model.add(at, made.import_id, content)
        self.store.get(b"")  # deletes each key that was due by then, in one or more commits
        for key, due in dues.items():
            late = [v.timestamp for v in self.store.history(key) if v.timestamp > max(at, due)]
            assert not late or late[0] <= at + 1 + len(dues)
            self.model.expire(key, at, late[0] if late else due)
        assert bulk.ingest(self.store, made.staging) == at
        return made.import_id

    @rule(source=consumes(staged))
    def abort(self, source: Any) -> None:
        """An abort of an import that was linked and not added leaves no trace."""
        made, *_ = source
        record = record_of(bulk.read_manifest(made.staging))
        self.store.imports.prepare(record)
        self.store.imports.link(sorted(made.staging.glob("part-*.sst")))
        assert self.store.imports.is_linked(record)
        assert self.store.imports.abort(made.import_id)
        assert not self.store.imports.is_linked(record)

    @rule(import_id=consumes(added))
    def revert(self, import_id: int) -> None:
        (commit,) = (c for c in self.model.commits if c.import_id == import_id)
        if commit.timestamp <= self.store.since:
            with pytest.raises((HistoryGoneError, UsageError)):
                self.store.revert_import(import_id)
            return
        at = self.store.revert_import(import_id)
        self.model.revert(at, import_id)
        assert self.store.revert_import(import_id) == at

    @rule(data=st.data(), content=rows, writes=ops, steps=st.integers(1, 4))
    def settle_in_part(
        self, data: st.DataObject, content: dict[bytes, bytes | None], writes: Any, steps: int
    ) -> None:
        """GC that ends at a step of settling. At each step readers see both forms of rows alike."""
        self.ingest(self.stage_import(content, b"m", {}), move=True, on_conflict="overwrite")
        collector, since = parts_of(self.store).collector, self.store.upper - 1
        self.batch(writes)
        left = [steps]

        def look(step: str) -> None:
            if step == "settled":
                left[0] -= 1
                times = sorted((self.time(data), self.time(data)))
                for time in times:
                    self.check_state(time)
                check_changes(self.store, self.model, *times, (b"", None), latest=False)
                if not left[0]:
                    raise InterruptedError

        with suppress(InterruptedError), bounds({"SETTLE_STEP_ROWS": 1}):
            collector.at_step = look
            self.store.gc(before=since)
        collector.at_step = lambda step: None

    # -- backups ----------------------------------------------------------------------------

    @cached_property
    def collection(self) -> Collection:
        return Collection(self.place / "backups")

    @rule()
    def backup(self) -> None:
        lower = self.collection.upper
        info = self.collection.backup(self.store)
        assert (info.lower, info.upper) == (lower, self.store.upper)

    @rule(data=st.data(), asked=st.lists(keys, max_size=8))
    def join_backups(self, data: st.DataObject, asked: list[bytes]) -> None:
        if not self.collection.upper:
            return
        low, high = self.collection.since, self.collection.upper - 1
        times = [max(low, min(self.time(data), high)) for _ in asked]
        labels = pa.table({"id": pa.array(asked, pa.binary()), "ts": pa.array(times, pa.int64())})
        self.check_join(self.collection.join(labels).read_all(), asked, times)

    @rule()
    def compact_backups(self) -> None:
        self.collection.compact()

    @rule(data=st.data(), history=st.booleans())
    def restore(self, data: st.DataObject, history: bool) -> None:
        if not self.collection.upper:
            return
        newest = self.collection.upper - 1
        as_of = max(self.collection.since, min(self.time(data), newest))
        path = self.place / f"restored-{next(self.names)}"
        found: int | None = None
        with suppress(HistoryGoneError):  # where no row is that old
            found = self.collection.restore(path, as_of=as_of, history=history)
        if found is None:
            assert not self.model.state(as_of)
            assert not path.exists()
            return
        assert found == as_of
        with kvstore.open(path, durability="async", clock=self.clock) as restored:
            assert dict(restored.scan(as_of=as_of)) == self.model.state(as_of)
            if history:
                check_fragments(parts_of(restored).versions.view.fragments)
                check_whole(restored, self.model.upto(as_of))
        shutil.rmtree(path)


TestStore = WholeMachine.TestCase
TestStore.settings = settings(max_examples=settings().max_examples // 3)  # each has ~30 steps


class MemoryMachine(WholeMachine):
    engine = "memory"


TestMemoryStore = MemoryMachine.TestCase
TestMemoryStore.settings = TestStore.settings
