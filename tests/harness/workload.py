"""Random steps on a store, and a model of the state that each of them makes.

A step is one call that writes, made up from a random source. The model of a store is its rows and
the names of its holds. Packages above this one add steps of their own: subclass `Workload`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.feeds import Feed
from kvstore.store import Store
from kvstore.timeline.holds import Hold

KEYS: Final = 24
FEED: Final = "consumer"

Rows = dict[bytes, bytes]


class Step(NamedTuple):
    """One call, with the facts that the model needs."""

    op: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """The model of a store after a step."""

    rows: Rows
    holds: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)
    """For steps of other packages: never changed in place."""


class Session:
    """The run of a child: its store, its random choices, the times of its steps."""

    def __init__(self, store: Store, place: Path, pick: random.Random) -> None:
        self.store = store
        self.place = place
        self.pick = pick
        self.times: list[int] = []
        """The time after each step that was done; the place is the step's number."""
        self.holds: dict[str, Hold] = {}
        self._feed: Feed | None = None

    @property
    def feed(self) -> Feed:
        """A consumer, which begins or continues when it is first asked for."""
        if self._feed is None:
            known = [record.name for record in self.store.holds.all()]
            self._feed = self.store.feed(FEED, None if f"feed/{FEED}" in known else "now")
        return self._feed

    def key(self) -> bytes:
        return b"k%02d" % self.pick.randrange(KEYS)

    def span(self) -> tuple[bytes, bytes]:
        low = self.pick.randrange(KEYS)
        return b"k%02d" % low, b"k%02d" % (low + self.pick.randint(1, 8))

    def value(self) -> bytes:
        return self.pick.randbytes(self.pick.choice([1, 30, 3_000]))


class Workload:
    """The steps on a store, with the call and the effect of each. For each op there is a method
    `make_<op>` (its arguments), `do_<op>` (the call), and `after_<op>` where it changes the model.
    """

    odds: Mapping[str, int] = {
        "put": 8, "delete": 3, "delete_range": 3, "batch": 8, "transact": 4, "put_if": 3,
        "gc": 2, "clear": 1, "revert_range": 3, "reshard": 1, "checkpoint": 1, "ack": 3,
        "hold": 2, "release": 1, "sync": 1, "compact": 1,
    }  # fmt: skip
    """How often each op comes."""

    unsynced: frozenset[str] = frozenset({"gc", "compact"})
    """Ops whose return says nothing of earlier asynchronous commits."""

    def choose(self, session: Session) -> Step:
        """The next step."""
        op = session.pick.choices(list(self.odds), list(self.odds.values()))[0]
        return Step(op, getattr(self, f"make_{op}")(session))

    def perform(self, session: Session, step: Step) -> Any:
        """Do a step; returns its timestamp, if it has one."""
        return getattr(self, f"do_{step.op}")(session, *step.arguments)

    def after(self, state: State, step: Step, states: list[State]) -> State:
        """The state that a step makes of `state`. `states` are all states so far, oldest first."""
        change = getattr(self, f"after_{step.op}", None)
        return state if change is None else change(state, states, *step.arguments)

    def is_durable(self, step: Step, timestamp: int | None) -> bool:
        """Whether the effects of all steps up to this one must be found after a kill."""
        if step.op in self.unsynced:
            return False
        if step.op in _WITH_DURABILITY:
            how: str = step.arguments[-1]
            return how != "async"
        return timestamp is not None or step.op != "revert_range"

    def check(self, store: Store, place: Path, state: State) -> None:
        """Further assertions about a store that was opened after a kill."""

    # -- ops --------------------------------------------------------------------------------

    def make_put(self, s: Session) -> tuple[Any, ...]:
        return s.key(), s.value(), durability(s)

    def do_put(self, s: Session, key: bytes, value: bytes, how: Any) -> int:
        return s.store.put(key, value, durability=how)

    def after_put(self, state: State, _: Any, key: bytes, value: bytes, *__: Any) -> State:
        return with_rows(state, {**state.rows, key: value})

    make_put_if = make_put

    def do_put_if(self, s: Session, key: bytes, value: bytes, how: Any) -> int:
        return s.store.put_if(key, value, s.store.get(key), durability=how)

    after_put_if = after_put

    def make_delete(self, s: Session) -> tuple[Any, ...]:
        return s.key(), durability(s)

    def do_delete(self, s: Session, key: bytes, how: Any) -> int:
        return s.store.delete(key, durability=how)

    def after_delete(self, state: State, _: Any, key: bytes, __: Any) -> State:
        return with_rows(state, outside(state.rows, key, key + b"\0"))

    def make_delete_range(self, s: Session) -> tuple[Any, ...]:
        return *s.span(), durability(s)

    def do_delete_range(self, s: Session, start: bytes, end: bytes, how: Any) -> int | None:
        return s.store.delete_range(start, end, durability=how)

    def after_delete_range(self, state: State, _: Any, start: bytes, end: bytes, *__: Any) -> State:
        return with_rows(state, outside(state.rows, start, end))

    def make_batch(self, s: Session) -> tuple[Any, ...]:
        span = s.span() if s.pick.random() < 0.4 else None
        return span, {s.key(): s.value() for _ in range(s.pick.randint(1, 9))}, durability(s)

    def do_batch(self, s: Session, span: Any, puts: Rows, how: Any) -> int | None:
        with s.store.batch(durability=how) as batch:
            if span is not None:
                batch.delete_range(*span)
            for key, value in puts.items():
                batch.put(key, value)
        return batch.timestamp

    def after_batch(self, state: State, _: Any, span: Any, puts: Rows, __: Any) -> State:
        rows = state.rows if span is None else outside(state.rows, *span)
        return with_rows(state, {**rows, **puts})

    def make_transact(self, s: Session) -> tuple[Any, ...]:
        return s.key(), s.key(), durability(s)

    def do_transact(self, s: Session, source: bytes, target: bytes, how: Any) -> int | None:
        with s.store.transaction(durability=how) as txn:
            txn.put(target, appended(txn.get(source)))
        return txn.timestamp

    def after_transact(self, state: State, _: Any, source: bytes, target: bytes, __: Any) -> State:
        return with_rows(state, {**state.rows, target: appended(state.rows.get(source))})

    def make_gc(self, s: Session) -> tuple[Any, ...]:
        return (s.pick.choice(s.times[-5:] or [0]),)

    def do_gc(self, s: Session, before: int) -> int:
        return s.store.gc(before=before).since

    def make_clear(self, s: Session) -> tuple[Any, ...]:
        return s.span()

    def do_clear(self, s: Session, start: bytes, end: bytes) -> int:
        return s.store.clear_range(start, end, compact=False)

    after_clear = after_delete_range

    def make_revert_range(self, s: Session) -> tuple[Any, ...]:
        number = s.pick.randrange(len(s.times)) if s.times else -1
        return *s.span(), number, s.times[number] if s.times else s.store.upper - 1

    def do_revert_range(self, s: Session, start: bytes, end: bytes, _: int, to: int) -> int | None:
        return s.store.revert_range(start, end, to=to)

    def after_revert_range(
        self, state: State, states: list[State], start: bytes, end: bytes, to: int, _: int
    ) -> State:
        then = states[to + 1].rows  # the first of them is the state before all steps
        restored = {key: value for key, value in then.items() if start <= key < end}
        return with_rows(state, {**outside(state.rows, start, end), **restored})

    def make_reshard(self, s: Session) -> tuple[Any, ...]:
        return (s.pick.randint(1, 3),)

    def do_reshard(self, s: Session, streams: int) -> None:
        s.store.reshard(streams)

    def make_checkpoint(self, s: Session) -> tuple[Any, ...]:
        return (f"checkpoint-{s.pick.getrandbits(60):x}",)

    def do_checkpoint(self, s: Session, name: str) -> int:
        return s.store.checkpoint(s.place / name)

    def make_ack(self, _: Session) -> tuple[Any, ...]:
        return ()

    def do_ack(self, s: Session) -> int:
        for batch in s.feed:
            s.feed.ack(batch)
        return s.feed.acked

    def make_hold(self, s: Session) -> tuple[Any, ...]:
        return (s.pick.choice("abc"),)

    def do_hold(self, s: Session, name: str) -> None:
        s.holds[name] = s.store.hold(name)

    def after_hold(self, state: State, _: Any, name: str) -> State:
        return State(state.rows, state.holds | {name}, state.extra)

    def make_release(self, s: Session) -> tuple[Any, ...]:
        return (s.pick.choice("abc"),)

    def do_release(self, s: Session, name: str) -> None:
        if name in s.holds:
            s.holds.pop(name).release()
        elif any(record.name == name for record in s.store.holds.all()):
            s.store.drop_hold(name)

    def after_release(self, state: State, _: Any, name: str) -> State:
        return State(state.rows, state.holds - {name}, state.extra)

    def make_sync(self, _: Session) -> tuple[Any, ...]:
        return ()

    def do_sync(self, s: Session) -> None:
        s.store.sync()

    make_compact = make_sync

    def do_compact(self, s: Session) -> None:
        s.store.upkeep.compact()


_WITH_DURABILITY: Final = {"put", "put_if", "delete", "delete_range", "batch", "transact"}


def durability(session: Session) -> str:
    """One of the three durabilities, at random."""
    return session.pick.choice(["sync", "group", "async"])


def appended(value: bytes | None) -> bytes:
    """The value that a transaction of the workload makes of `value`."""
    return ((value or b"") + b"+")[-8:]


def outside(rows: Rows, start: bytes, end: bytes) -> Rows:
    """The rows that a delete of `start <= key < end` leaves."""
    return {key: value for key, value in rows.items() if not start <= key < end}


def with_rows(state: State, rows: Rows) -> State:
    """`state` with other rows."""
    return State(rows, state.holds, state.extra)
