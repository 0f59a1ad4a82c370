"""Random histories of a whole store, against the model.

Everything a user can do goes on in random order, with a clock that is set forward and back, and
with restarts in between; every answer must be the model's. At the end of each history the property
that rules them all is checked: the state at s plus the changes in (s, e] is the state at e.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule

import bulk
import kvstore
from backup import Collection
from bulk.ingest import record_of
from kvstore.errors import (
    ConflictError,
    HistoryGoneError,
    HistoryHeldError,
    KeyConflictError,
    PreconditionError,
    UsageError,
)
from kvstore.store import Store
from kvstore.testing.bounds import bounds
from kvstore.testing.model import Model, Row, order, state_after
from kvstore.testing.parts import parts_of
from kvstore.testing.strategies import KEYS, keys, ops, rows, spans, tiny_limits, values
from kvstore.testing.strategies import bounds as span_bounds
from kvstore.timestamp import TIMESTAMP_MAX
from tests.mvcc.invariants import check_fragments

START_NS = 1_000_000


class StoreMachine(RuleBasedStateMachine):
    staged = Bundle("staged")
    added = Bundle("added")
    engine = "rocksdb"

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="kvstore-"))
        self.clock = kvstore.ManualClock(START_NS)
        self.model = Model()
        self.names = iter(range(1 << 30))
        self.opened = ExitStack()
        self.opened.callback(shutil.rmtree, self.place)

    @initialize(limits=tiny_limits)
    def begin(self, limits: dict[str, int]) -> None:
        self.limits = limits
        self.opened.enter_context(bounds(limits))
        self.open()
        self.opened.callback(lambda: self.store.close())
        self.opened.callback(lambda: check_whole(self.store, self.model))
        self.collection = Collection(self.place / "backups")
        assert list(self.store.scan()) == []

    def open(self) -> None:
        self.store = kvstore.open(
            self.place / "store", self.engine, durability="async", clock=self.clock
        )

    def teardown(self) -> None:
        self.opened.close()

    def time(self, data: st.DataObject) -> int:
        """A readable time near something that happened."""
        marks = [commit.timestamp for commit in self.model.commits]
        marks += [commit.reverted for commit in self.model.commits if commit.reverted]
        oldest, newest = self.store.whole_since, self.store.upper - 1
        near = {mark + step for mark in marks for step in (-1, 0)} | {oldest, newest}
        return data.draw(st.sampled_from(sorted(t for t in near if oldest <= t <= newest)), "time")

    # -- writing ----------------------------------------------------------------------------

    @rule(key=keys, value=values, durability=st.sampled_from(["sync", "group", "async"]))
    def put(self, key: bytes, value: bytes, durability: Any) -> None:
        before = self.store.upper
        at = self.store.put(key, value, durability=durability)
        assert before <= at < self.store.upper
        self.model.batch(at, [("put", key, value)])

    @rule(key=keys)
    def delete(self, key: bytes) -> None:
        self.model.batch(self.store.delete(key), [("delete", key, None)])

    @rule(span=spans, idempotent=st.booleans())
    def delete_range(self, span: list[bytes], idempotent: bool) -> None:
        start, end = span
        at = self.store.delete_range(start, end, idempotent=idempotent)
        alive = any(start <= key < end for key in self.model.state(TIMESTAMP_MAX))
        assert (at is not None) == (alive or not idempotent)
        if at is not None:
            self.model.batch(at, [("delete_range", start, end)])

    @rule(writes=ops)
    def batch(self, writes: list[Any]) -> None:
        with self.store.batch() as batch:
            for op, *args in writes:
                getattr(batch, op)(*(arg for arg in args if arg is not None))
        assert batch.timestamp is not None
        self.model.batch(batch.timestamp, writes)

    @rule(writes=ops)
    def dropped_batch(self, writes: list[Any]) -> None:
        try:
            with self.store.batch() as batch:
                for op, *args in writes:
                    getattr(batch, op)(*(arg for arg in args if arg is not None))
                raise InterruptedError
        except InterruptedError:
            assert batch.timestamp is None

    @rule(key=keys, value=values, expected=values | st.none())
    def put_if(self, key: bytes, value: bytes, expected: bytes | None) -> None:
        if self.model.get(key, TIMESTAMP_MAX) == expected:
            at = self.store.put_if(key, value, expected=expected)
            self.model.batch(at, [("put", key, value)])
        else:
            with pytest.raises(PreconditionError):
                self.store.put_if(key, value, expected=expected)

    @rule(key=keys)
    def pop(self, key: bytes) -> None:
        there = self.model.get(key, TIMESTAMP_MAX)
        assert self.store.pop(key) == there
        if there is not None:
            self.model.batch(self.store.upper - 1, [("delete", key, None)])

    @rule(reads=st.sets(keys), bound=span_bounds, writes=ops, between=keys)
    def transaction(self, reads: set[bytes], bound: Any, writes: list[Any], between: bytes) -> None:
        """Another commit comes in between: it conflicts if, and only if, its key was read. Reads
        that are too many to remember are joined, and conflict with their neighbours too."""
        state, (start, end) = self.model.state(TIMESTAMP_MAX), bound
        scanned = {key for key in KEYS if start <= key and (end is None or key < end)}
        txn = self.store.transaction()
        assert {key: txn.get(key) for key in reads} == {key: state.get(key) for key in reads}
        assert dict(txn.scan(*bound)) == {key: state[key] for key in scanned & state.keys()}
        for op, *args in writes:
            getattr(txn, op)(*(arg for arg in args if arg is not None))
        self.put(between, b"between", "async")
        try:
            at = txn.commit()
        except ConflictError:
            assert between in reads | scanned or self.limits.keys() & {
                "TXN_KEYS_MAX",
                "TXN_SPANS_MAX",
            }
        else:
            assert between not in reads | scanned
            self.model.batch(at or 0, writes)

    # -- time and restarts ------------------------------------------------------------------

    @rule(ns=st.sampled_from([-500, -1, 1, 2, 100, 1000]))
    def turn_clock(self, ns: int) -> None:
        self.clock.advance(ns)

    @rule()
    def read_the_present(self) -> None:
        """Reading at the clock's time completes it: no later commit may land at or below."""
        now = self.store.now()
        self.check_state(now)
        assert self.store.upper > now

    @rule()
    def reopen(self) -> None:
        upper = self.store.upper
        self.store.close()
        self.open()
        assert self.store.upper >= upper

    # -- imports ----------------------------------------------------------------------------

    @rule(target=staged, content=rows, cut=keys)
    def stage_import(self, content: dict[bytes, bytes | None], cut: bytes) -> Any:
        staging = self.place / f"staged-{next(self.names)}"
        made = bulk.Import.create(staging)
        for part in ([k for k in content if k < cut], [k for k in content if k >= cut]):
            with made.writer() as writer:
                for key in sorted(part):
                    value = content[key]
                    writer.delete(key) if value is None else writer.put(key, value)
        made.seal()
        return made, content

    @rule(
        target=added,
        source=consumes(staged),
        move=st.booleans(),
        on_conflict=st.sampled_from(["overwrite", "error"]),
    )
    def ingest(self, source: Any, move: bool, on_conflict: Any) -> Any:
        made, content = source
        alive = self.model.state(TIMESTAMP_MAX)
        in_the_way = content.keys() & alive.keys()  # a row that deletes covers its key as well
        if on_conflict == "error" and in_the_way:
            with pytest.raises(KeyConflictError) as refused:
                bulk.ingest(self.store, made.staging, on_conflict=on_conflict, move=move)
            assert set(refused.value.keys) <= in_the_way
            return multiple()
        at = bulk.ingest(self.store, made.staging, on_conflict=on_conflict, move=move)
        self.model.add(at, made.import_id, content)
        assert bulk.ingest(self.store, made.staging) == at
        return made.import_id

    @rule(source=consumes(staged))
    def abort(self, source: Any) -> None:
        """An import that was left linked but not added is gone without a trace."""
        made, _ = source
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

    # -- history that goes, and comes back --------------------------------------------------

    @rule(data=st.data())
    def collect(self, data: st.DataObject) -> None:
        before = self.time(data)
        report = self.store.gc(before=before)
        held = min((hold.timestamp for hold in self.store.holds.all()), default=before)
        assert self.store.since == max(report.previous, min(before, held))
        for too_old in {self.store.since - 1} - {-1}:
            with pytest.raises(HistoryGoneError):
                self.store.get(b"", too_old)

    @rule(data=st.data())
    def collect_under_a_snapshot(self, data: st.DataObject) -> None:
        as_of = self.time(data)
        with self.store.snapshot(as_of) as snapshot:
            self.store.gc(before=self.store.upper - 1)
            assert dict(snapshot.scan()) == self.model.state(as_of)

    @rule(span=spans)
    def clear(self, span: list[bytes]) -> None:
        if self.store.holds.all():
            with pytest.raises(HistoryHeldError):
                self.store.clear_range(*span)
        else:
            self.model.clear(*span)
            self.store.clear_range(*span, compact=False)

    @rule(data=st.data(), bound=span_bounds)
    def revert_range(self, data: st.DataObject, bound: Any) -> None:
        then, now = self.model.state(to := self.time(data)), self.model.state(TIMESTAMP_MAX)
        start, end = bound
        at = self.store.revert_range(start, end, to=to)
        undone: list[Any] = [
            ("delete", key, None) if key not in then else ("put", key, then[key])
            for key in sorted(then.keys() | now.keys())
            if start <= key and (end is None or key < end) and then.get(key) != now.get(key)
        ]
        assert (at is None) == (not undone)
        if at is not None:
            self.model.batch(at, undone)

    # -- reading ----------------------------------------------------------------------------

    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        as_of = self.time(data)
        expected = [self.model.get(key, as_of) for key in KEYS]
        assert self.store.get_many(KEYS, as_of) == expected
        assert [self.store.get(key, as_of) for key in KEYS] == expected
        newest = [self.model.get(key, TIMESTAMP_MAX) for key in KEYS]
        assert [self.store.get(key) for key in KEYS] == newest

    @rule(data=st.data(), asked=st.lists(st.sampled_from(KEYS), max_size=6))
    def get_each_at_its_time(self, data: st.DataObject, asked: list[bytes]) -> None:
        times = [self.time(data) for _ in asked]
        expected = [self.model.get(key, time) for key, time in zip(asked, times, strict=True)]
        assert self.store.get_many(asked, as_of=times) == expected

    @rule(
        data=st.data(),
        asked=st.lists(keys, max_size=8),
        age_max=st.none() | st.integers(0, 3),
        steps=st.sampled_from([0, 1, 1 << 62]),
    )
    def join(
        self, data: st.DataObject, asked: list[bytes], age_max: int | None, steps: int
    ) -> None:
        times = [self.time(data) for _ in asked]
        labels = pa.table({"id": pa.array(asked, pa.binary()), "ts": pa.array(times, pa.int64())})
        max_age = None if age_max is None else timedelta(microseconds=age_max)
        before = {} if "STEPS_BEFORE_SEEK" in self.limits else {"STEPS_BEFORE_SEEK": steps}
        with bounds(before):
            joined = self.store.join(labels, max_age=max_age).read_all()
        expected = []
        for key, time in zip(asked, times, strict=True):
            events = [event for event in self.model.events(key) if event[0] <= time]
            at, value = events[0][:2] if events else (time, None)
            if value is None or (age_max is not None and time - at > age_max * 1000):
                value = None
            expected.append((value, None if value is None else at))
        found = joined["value_timestamp"].cast(pa.int64()).to_pylist()
        values = joined["value"].to_pylist()
        if not self.store.since:  # GC forgets imports, and with them the times of their reverts
            assert list(zip(values, found, strict=True)) == expected
        elif age_max is None:
            assert values == [value for value, _ in expected]

    @rule(data=st.data(), asked=st.lists(keys, max_size=4), prefix=st.none() | keys)
    def floor(self, data: st.DataObject, asked: list[bytes], prefix: bytes | None) -> None:
        times = [self.time(data) for _ in asked]
        expected = [
            self.floor_in(self.model.state(time), key, prefix)
            for key, time in zip(asked, times, strict=True)
        ]
        assert self.store.floor_many(asked, times, prefix) == expected
        found = [self.store.floor(key, at, prefix) for key, at in zip(asked, times, strict=True)]
        assert found == expected
        newest = self.model.state(TIMESTAMP_MAX)
        assert self.store.floor_many(asked, prefix=prefix) == [
            self.floor_in(newest, key, prefix) for key in asked
        ]

    @staticmethod
    def floor_in(
        state: dict[bytes, bytes], key: bytes, prefix: bytes | None
    ) -> tuple[bytes, bytes] | None:
        below = [row for row in state.items() if row[0] <= key and row[0].startswith(prefix or b"")]
        return max(below, default=None)

    @rule(
        data=st.data(),
        bound=span_bounds,
        reverse=st.booleans(),
        limit=st.none() | st.integers(0, 4),
    )
    def scan(self, data: st.DataObject, bound: Any, reverse: bool, limit: int | None) -> None:
        as_of = self.time(data)
        start, end = bound
        found = self.store.scan(start, end, as_of=as_of, reverse=reverse, limit=limit)
        state = sorted(self.model.state(as_of).items(), reverse=reverse)
        inside = [row for row in state if start <= row[0] and (end is None or row[0] < end)]
        assert list(found) == inside[:limit]

    @rule(data=st.data(), prefix=keys, reverse=st.booleans())
    def scan_prefix(self, data: st.DataObject, prefix: bytes, reverse: bool) -> None:
        as_of = self.time(data)
        found = list(self.store.scan(prefix=prefix, as_of=as_of, reverse=reverse))
        state = sorted(self.model.state(as_of).items(), reverse=reverse)
        assert found == [row for row in state if row[0].startswith(prefix)]

    @rule(
        data=st.data(),
        bound=span_bounds,
        batch_rows=st.integers(1, 5),
        reverse=st.booleans(),
        limit=st.none() | st.integers(0, 4),
    )
    def scan_batches(
        self, data: st.DataObject, bound: Any, batch_rows: int, reverse: bool, limit: int | None
    ) -> None:
        arguments = (*bound, None, self.time(data), reverse, limit)  # of a scan, in its order
        batches = list(self.store.scan_batches(*arguments, batch_rows=batch_rows))
        assert all(0 < batch.num_rows <= batch_rows for batch in batches)
        found = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
        assert found == list(self.store.scan(*arguments))

    @rule(key=keys)
    def history(self, key: bytes) -> None:
        check_history(self.store, self.model, key)

    @rule(data=st.data(), bound=span_bounds, latest=st.booleans())
    def changes(self, data: st.DataObject, bound: Any, latest: bool) -> None:
        since, upto = sorted((self.time(data), self.time(data)))
        check_changes(self.store, self.model, since, upto, bound, latest=latest)

    @rule(data=st.data(), writes=ops)
    def snapshot_is_not_moved_by_writes(self, data: st.DataObject, writes: list[Any]) -> None:
        as_of = self.time(data)
        expected = self.model.state(as_of)
        with self.store.snapshot(as_of) as snapshot:
            running = snapshot.scan()
            self.batch(writes)
            assert dict(running) == expected
            assert dict(snapshot.scan()) == expected

    def check_state(self, as_of: int) -> None:
        assert dict(self.store.scan(as_of=as_of)) == self.model.state(as_of)

    # -- backups ----------------------------------------------------------------------------

    @rule()
    def backup(self) -> None:
        lower = self.collection.upper
        info = self.collection.backup(self.store)
        assert (info.lower, info.upper) == (lower, self.store.upper)

    @rule(data=st.data(), history=st.booleans())
    def restore(self, data: st.DataObject, history: bool) -> None:
        if not self.collection.upper:
            return
        newest = self.collection.upper - 1
        as_of = max(self.collection.since, min(self.time(data), newest))
        path = self.place / f"restored-{next(self.names)}"
        assert self.collection.restore(path, as_of=as_of, history=history) == as_of
        with kvstore.open(path, durability="async", clock=self.clock) as restored:
            assert dict(restored.scan(as_of=as_of)) == self.model.state(as_of)
            if history:
                check_whole(restored, self.model.upto(as_of))
        shutil.rmtree(path)


def check_changes(
    store: Store, model: Model, since: int, upto: int, bound: Any, *, latest: bool
) -> None:
    """Both orders of a window are the model's, whichever way they are read."""
    start, end = bound
    revisions: Any = "latest" if latest else "all"
    expected = model.changes(since, upto, start, end, latest=latest)
    by_time = list(store.changes(since, upto, start, end, revisions, "time"))
    by_key = list(store.changes(since, upto, start, end, revisions, "key"))
    assert sorted(by_time, key=order) == expected
    assert [order(row)[:2] for row in by_time] == [order(row)[:2] for row in expected]
    assert by_key == sorted(expected, key=_key_order)


def _key_order(row: Row) -> tuple[bytes, bool, int]:
    return row[2], row[1] != "delete_range", row[0]


def check_history(store: Store, model: Model, key: bytes) -> None:
    """The history of a key is the model's; below `since` some of it may be gone."""
    since = store.whole_since
    found = [(version.timestamp, version.value) for version in store.history(key)]
    kept = [event[:2] for event in model.events(key)]
    assert [event for event in found if event[0] > since] == [e for e in kept if e[0] > since]
    assert set(found) <= set(kept)


def check_whole(store: Store, model: Model) -> None:
    """Every key's history, and the property that rules them all over every window of marks."""
    check_fragments(parts_of(store).versions.view.fragments)
    assert store.verify().problems == ()
    for key in KEYS:
        check_history(store, model, key)
    moments = [commit.timestamp for commit in model.commits]
    moments += [commit.reverted for commit in model.commits if commit.reverted]
    since = store.whole_since
    moments = sorted(moment for moment in moments if moment > since)
    marks = [since, *moments][:: max(1, len(moments) // 6)]
    states = {mark: dict(store.scan(as_of=mark)) for mark in marks}
    for mark in marks:
        assert states[mark] == model.state(mark)
    for since in marks:
        for upto in marks:
            if since < upto:
                rows = [tuple(row) for row in store.changes(since, upto)]
                assert state_after(states[since], rows) == states[upto]
                latest = [tuple(row) for row in store.changes(since, upto, revisions="latest")]
                assert state_after(states[since], latest) == states[upto]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=settings().max_examples // 3)  # each has ~30 steps


class MemoryStoreMachine(StoreMachine):
    engine = "memory"


TestMemoryStore = MemoryStoreMachine.TestCase
TestMemoryStore.settings = TestStore.settings
