"""Random histories with keys that expire, against the model: rules for `StoreMachine`.

The clock is set forward and back as in all histories, and keys are due between its steps. After
each rule a read writes the deletes that are due by then, so that store and model agree before the
next one. One rule has another call find the due deletes: whichever call comes first writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvstore.base.timestamp import TIMESTAMP_MAX, Timestamp
from kvstore.testing.histories import StoreMachine
from kvstore.testing.strategies import KEYS, keys, values
from kvstore.transaction import Transaction
from tests.harness.bounds import bounds
from tests.harness.tiny_limits import tiny_limits

NEAR_NS = 256
"""No rule commits so often that its last commit would lie further above its first one."""

lives = st.integers(1, 3).map(lambda us: timedelta(microseconds=us))
"""How long keys live: the clock moves by up to a microsecond in a step."""


class ExpiringMachine(StoreMachine):
    """Adds puts that expire, and every operation on them. Each history runs with limits of its own,
    many of them tiny."""

    @initialize(limits=tiny_limits)
    def begin(self, limits: dict[str, int]) -> None:  # type: ignore[override]  # hypothesis calls it
        self.limits = limits
        self.opened.enter_context(bounds(limits))
        super().begin()

    @rule(
        data=st.data(),
        asked=st.lists(keys, max_size=8),
        age_max=st.none() | st.integers(0, 3),
        steps=st.sampled_from([0, 1, 1 << 62]),
    )
    def join(  # type: ignore[override]  # hypothesis calls it
        self, data: st.DataObject, asked: list[bytes], age_max: int | None, steps: int
    ) -> None:
        before = {} if "STEPS_BEFORE_SEEK" in self.limits else {"STEPS_BEFORE_SEEK": steps}
        with bounds(before):
            super().join(data, asked, age_max)

    def settle(self) -> None:
        """Write the due deletes. A key that is due within the next rule is due now instead."""
        self.store.get(b"")
        dues = [due for due, _ in self.model.expiring.values()]
        if near := [due for due in dues if self.store.upper <= due < self.near()]:
            self.clock.set(max(near))
            self.store.get(b"")
        self.model.settle(max(self.store.upper - 1, self.clock.wall_ns()))

    def near(self) -> int:
        """The time above all commits of the next rule."""
        return max(self.store.upper, self.clock.wall_ns()) + NEAR_NS

    def due(self, life: timedelta) -> int:
        """The time at which a key is due that is put now. A commit under way may be in between."""
        return int(self.store.now()) + life // timedelta(microseconds=1) * 1000

    @rule(key=keys, value=values, life=lives, is_checked=st.booleans())
    def put_expiring(self, key: bytes, value: bytes, life: timedelta, is_checked: bool) -> None:
        due = self.due(life)
        if is_checked:
            expected = self.model.get(key, TIMESTAMP_MAX)
            at = self.store.put_if(key, value, expected=expected, expires=Timestamp(due))
        else:
            at = self.store.put(key, value, expires=life)
        self.model.batch(at, [("put", key, value)])
        self.model.expire(key, at, due)

    @rule(
        puts=st.lists(st.tuples(keys, values, st.none() | lives), min_size=1, max_size=6),
        is_read=st.booleans(),
    )
    def write_expiring(self, puts: list[Any], is_read: bool) -> None:
        """The last put of a key decides whether it expires."""
        now = self.due(timedelta())
        with self.store.transaction() if is_read else self.store.batch() as writer:
            for key, value, life in puts:
                writer.put(key, value, expires=life)
                if isinstance(writer, Transaction):
                    assert writer.get(key) == value
        at = writer.timestamp
        assert at is not None
        self.model.batch(at, [("put", key, value) for key, value, _ in puts])
        for key, _, life in puts:
            self.model.expiring.pop((key, at), None)
            if life is not None:
                self.model.expire(key, at, now + life // timedelta(microseconds=1) * 1000)

    @rule(content=st.dictionaries(keys, values, min_size=1, max_size=3), life=lives)
    def put_many_expiring(self, content: dict[bytes, bytes], life: timedelta) -> None:
        due = self.due(life)
        rows = pa.table({"key": list(content), "value": list(content.values())})
        at = self.store.put_many(rows, expires=life)
        assert at is not None
        self.model.batch(at, [("put", key, value) for key, value in content.items()])
        for key in content:
            self.model.expire(key, at, due)

    @rule(key=keys, value=values, life=st.none() | lives, is_read=st.booleans())
    def update(self, key: bytes, value: bytes, life: timedelta | None, is_read: bool) -> None:
        """An update decides anew whether its key expires."""
        due = None if life is None else self.due(life)
        old = self.model.get(key, TIMESTAMP_MAX)

        def change(found: bytes | None) -> bytes:
            assert found == old
            return value

        if is_read:
            self.store.transact(lambda txn: txn.update(key, change, expires=life))
        else:
            assert self.store.update(key, change, expires=life) == value
        at = self.store.upper - 1
        self.model.batch(at, [("put", key, value)])
        if due is not None:
            self.model.expire(key, at, due)

    @rule(key=keys)
    def persist(self, key: bytes) -> None:
        due = self.model.due(key, TIMESTAMP_MAX)
        at = self.store.persist(key)
        assert (at is None) == (due is None)
        if at is not None:
            self.model.persist(key, at)

    @rule()
    def ttl(self) -> None:
        now = self.store.now()
        for key in KEYS:
            due = self.model.due(key, TIMESTAMP_MAX)
            left = None if due is None else timedelta(microseconds=(due - now) // 1000)
            assert self.store.ttl(key) == left

    @rule(data=st.data(), ns=st.sampled_from([1, 999, 1000, 4000]))
    def find_what_is_due(self, data: st.DataObject, ns: int) -> None:
        """Whichever call comes first writes the deletes that are due."""
        calls: list[Callable[[], Any]] = [
            lambda: self.store.put(b"ab", b""),
            lambda: self.store.batch().__exit__(None, None, None),
            lambda: list(self.store.scan()),
            lambda: self.store.get_many(KEYS),
            lambda: self.store.get(b"", self.store.now()),
            lambda: self.store.sync(),
            lambda: self.store.reshard(1),
            lambda: self.store.transaction().rollback(),
            lambda: self.store.snapshot().close(),
            lambda: self.store.delete(b"ab"),
            lambda: self.reopen(),
        ]
        self.clock.advance(ns)
        number = data.draw(st.integers(0, len(calls) - 1), "call")
        at = calls[number]()
        self.model.settle(self.store.upper - 1)
        if number in (0, 9):
            self.model.batch(at, [("put", b"ab", b"") if number == 0 else ("delete", b"ab", None)])
