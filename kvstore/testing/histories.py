"""Random histories of a whole store, against the model: a hypothesis state machine to inherit.

All verbs of a store run in random order, with a clock that is set forward and back, and with
restarts in between. Every answer must be the model's. At the end of each history the
ruling property is checked: the state at s plus the changes in (s, e] is the state at e.

    class MyMachine(StoreMachine):
        def open_store(self) -> Store:
            return kvstore.open(None, MyEngine(self.place / "store"), clock=self.clock)

    TestMyStore = MyMachine.TestCase

A subclass adds rules of its own. Each rule makes its writes on `store` and on `model`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvstore
from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.errors import (
    ConflictError,
    HistoryGoneError,
    HistoryHeldError,
    PreconditionError,
)
from kvstore.store import Store
from kvstore.testing.model import Model, Row, order, state_after
from kvstore.testing.strategies import KEYS, bounds, keys, ops, spans, values

START_NS = 1_700_000_000 * 10**9  # a writer of parts refuses due times before 1979


class StoreMachine(RuleBasedStateMachine):
    """One random history. `store` is open at `place`, `clock` is its clock, `model` its model."""

    limits: Mapping[str, int] = MappingProxyType({})
    """The limits of `kvstore.limits` that a subclass has set for this history."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="kvstore-"))
        self.clock = kvstore.ManualClock(START_NS)
        self.model = Model()
        self.names = iter(range(1 << 30))
        self.opened = ExitStack()
        self.opened.callback(shutil.rmtree, self.place)

    @initialize()
    def begin(self) -> None:
        self.store = self.open_store()
        self.opened.callback(lambda: self.store.close())
        self.opened.callback(self.check)
        assert list(self.store.scan()) == []

    def open_store(self) -> Store:
        """Open the store of this history: at first, and after each restart."""
        return kvstore.open(self.place / "store", durability="async", clock=self.clock)

    @invariant()
    def newest(self) -> None:
        """Compare the newest state with the model after each rule: as it is stored, and as `get`
        keeps it in memory from the second read of a key on."""
        self.settle()
        state = self.model.state(TIMESTAMP_MAX)
        expected = [state.get(key) for key in KEYS]
        assert [self.store.get(key) for key in KEYS] == expected
        assert self.store.get_many(KEYS) == expected

    def settle(self) -> None:
        """Write what is due by now, in the store and in the model."""

    def check(self) -> None:
        """Compare all of the store with the model, at the end of the history."""
        check_whole(self.store, self.model)

    def teardown(self) -> None:
        """Check the history, and remove its files."""
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

    @rule(reads=st.sets(keys), bound=bounds, writes=ops, between=keys)
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

    @rule(ns=st.sampled_from([-4000, -500, -1, 1, 2, 100, 1000]))
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
        self.store = self.open_store()
        assert self.store.upper >= upper

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

    @rule(data=st.data(), bound=bounds)
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
    )
    def join(self, data: st.DataObject, asked: list[bytes], age_max: int | None) -> None:
        times = [self.time(data) for _ in asked]
        labels = pa.table({"id": pa.array(asked, pa.binary()), "ts": pa.array(times, pa.int64())})
        max_age = None if age_max is None else timedelta(microseconds=age_max)
        joined = self.store.join(labels, max_age=max_age).read_all()
        self.check_join(joined, asked, times, None if age_max is None else age_max * 1000)

    def check_join(
        self, joined: pa.Table, asked: list[bytes], times: list[int], age_max: int | None = None
    ) -> None:
        """A join gives each key the value and the time of its newest event, also after GC."""
        expected: list[tuple[bytes | None, int | None]] = []
        for key, time in zip(asked, times, strict=True):
            at, value, _ = self.model.newest(key, time)
            is_known = value is not None and (age_max is None or time - at <= age_max)
            expected.append((value, at) if is_known else (None, None))
        found = joined["value_timestamp"].cast(pa.int64()).to_pylist()
        assert list(zip(joined["value"].to_pylist(), found, strict=True)) == expected

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
        bound=bounds,
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
        bound=bounds,
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

    @rule(data=st.data(), limit=st.integers(1, 3), delimiter=st.none() | keys)
    def browse(self, data: st.DataObject, limit: int, delimiter: bytes | None) -> None:
        as_of = self.time(data)
        found, start = [], b""
        while True:
            page = self.store.browsing.keys(
                Span(start), as_of, limit=limit, delimiter=delimiter or None
            )
            found += [row.key for row in page.rows]
            if page.next is None:
                break
            assert page.next > start
            start = page.next
        cut = [key.partition(delimiter) if delimiter else (key,) for key in self.model.state(as_of)]
        assert found == sorted({b"".join(parts[:2]) for parts in cut})

    @rule(key=keys, limit=st.integers(1, 3))
    def browse_versions(self, key: bytes, limit: int) -> None:
        found: list[tuple[int, bytes | None]] = []
        page = self.store.browsing.versions(key, limit=limit)
        while not page.is_cut:
            assert len(page.rows) <= limit
            found += [(row.timestamp, row.value and row.value.head) for row in page.rows]
            if page.next is None:
                kept = [(version.timestamp, version.value) for version in self.store.history(key)]
                assert found == kept
                return
            page = self.store.browsing.versions(key, page.next, limit=limit)

    @rule(data=st.data(), bound=bounds, latest=st.booleans())
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
        """Compare a scan at one time with the model."""
        assert dict(self.store.scan(as_of=as_of)) == self.model.state(as_of)


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
    assert store.verify().problems == ()
    store.get(b"")  # writes the deletes that are due
    model.settle(store.upper - 1)
    for key in KEYS:
        check_history(store, model, key)
    moments = [commit.timestamp for commit in model.commits]
    moments += [commit.reverted for commit in model.commits if commit.reverted]
    oldest = store.whole_since
    moments = sorted(moment for moment in moments if moment > oldest)
    marks: list[int] = [oldest, *moments][:: max(1, len(moments) // 6)]
    states = {mark: dict(store.scan(as_of=mark)) for mark in marks}
    for mark in marks:
        assert states[mark] == model.state(mark)
    for since in marks:
        for upto in marks:
            if since < upto:
                changes = store.changes(since, upto)
                assert state_after(states[since], changes) == states[upto]
                latest = store.changes(since, upto, revisions="latest")
                assert state_after(states[since], latest) == states[upto]
