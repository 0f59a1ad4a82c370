"""A process that is killed in the middle of its writes, and a look at what it left.

    child      sends (begun, number, step) before each call and (done, number, ...) after it
    parent     kills it with SIGKILL after some steps, opens the store, compares it with a model

    Rounds(context, Workload(), place).run(hits=20)     # prints the seed

A step is one call that writes, made up from a seed. The model of a store is what each step leaves:
rows, and names of holds. A kill takes nothing that the system was given, and a commit that no later
durable one follows may be lost; so what is found must be the state after some step between the last
durable acknowledgement and the step under way, whole.

Invariants
1. What a kill test found is repeated by its seed, as far as a kill can be: the steps are the same,
   the moment is not.
2. A kill counts as a hit only if a step had begun and was not acknowledged; enough must hit.

Packages above this one add steps of their own: subclass `Workload`.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.errors import KVStoreError
from kvstore.feeds import Feed
from kvstore.holds import Hold
from kvstore.opening import engine_at, open_read_only
from kvstore.opening import open as open_store
from kvstore.store import Store

SEED: Final = "KVSTORE_KILLS_SEED"
"""Name in the environment: the seed that a kill test is to repeat."""

STEPS_MAX: Final = 60
"""Steps of a child before it is killed, at most."""

DELAY_S_MAX: Final = 0.003
"""How long after the beginning of a step the kill comes: about as long as a step takes."""

KEYS: Final = 24
FEED: Final = "consumer"

Rows = dict[bytes, bytes]
Context = Any
"""A context of `multiprocessing`, which starts processes."""


def seeded(name: str = SEED) -> random.Random:
    """A source of random numbers whose seed is printed; `name` in the environment repeats it."""
    seed = int(os.environ.get(name) or random.SystemRandom().getrandbits(32))
    sys.stdout.write(f"{name}={seed}\n")
    return random.Random(seed)


def run_until_killed(
    context: Context,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    is_time: Callable[[list[Any]], bool],
    delay_s: float,
) -> list[Any]:
    """Run `target(*arguments, pipe)` in a process and kill it `delay_s` after `is_time` first says
    so of what it sent, or where it ended by itself; returns all that it sent."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender))
    process.start()
    sender.close()
    said: list[Any] = []
    try:
        while not said or not is_time(said):
            said.append(receiver.recv())
        # The moment of the kill is the subject here, not a condition that is waited for.
        until = time.monotonic() + delay_s
        while (left := until - time.monotonic()) > 0:
            if receiver.poll(left):
                said.append(receiver.recv())
        process.kill()
        while True:
            said.append(receiver.recv())
    except (EOFError, OSError):
        return said
    finally:
        process.kill()
        process.join()
        receiver.close()


# -- steps ------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One call, with all that the model needs to know of it."""

    op: str
    arguments: tuple[Any, ...] = ()


class Begun(NamedTuple):
    """The child is about to do a step."""

    number: int
    step: Step


class Done(NamedTuple):
    """A step has returned. `is_durable`: it and all before it survive whatever comes."""

    number: int
    timestamp: int | None
    is_durable: bool


class Refused(NamedTuple):
    """A step has raised, having done nothing."""

    number: int
    error: str


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
        """A consumer, which begins or goes on when it is first asked for."""
        if self._feed is None:
            known = [record.name for record in self.store.holds()]
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
    """The steps on a store, what each does, and what it leaves. For each op there is a method
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
        """Whether all up to a step that was done must be found."""
        if step.op in self.unsynced:
            return False
        if step.op in _WITH_DURABILITY:
            how: str = step.arguments[-1]
            return how != "async"
        return timestamp is not None or step.op != "revert_range"

    def check(self, store: Store, place: Path, state: State) -> None:
        """More of what must be so of a store that was opened after a kill."""

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
        elif any(record.name == name for record in s.store.holds()):
            s.store.drop_hold(name)

    def after_release(self, state: State, _: Any, name: str) -> State:
        return State(state.rows, state.holds - {name}, state.extra)

    def make_sync(self, _: Session) -> tuple[Any, ...]:
        return ()

    def do_sync(self, s: Session) -> None:
        s.store.sync()

    make_compact = make_sync

    def do_compact(self, s: Session) -> None:
        s.store.compact()


_WITH_DURABILITY: Final = {"put", "put_if", "delete", "delete_range", "batch", "transact"}


def durability(session: Session) -> str:
    return session.pick.choice(["sync", "group", "async"])


def appended(value: bytes | None) -> bytes:
    return ((value or b"") + b"+")[-8:]


def outside(rows: Rows, start: bytes, end: bytes) -> Rows:
    return {key: value for key, value in rows.items() if not start <= key < end}


def with_rows(state: State, rows: Rows) -> State:
    return State(rows, state.holds, state.extra)


def work(workload: Workload, place: Path, seed: int, said: Connection) -> None:
    """The child: does steps until it is killed."""
    path = place / "store"
    with open_store(path, engine_at(path) or "rocksdb") as store:
        session = Session(store, place, random.Random(seed))
        number = 0
        while True:
            step = workload.choose(session)
            said.send(Begun(number, step))
            try:
                timestamp = workload.perform(session, step)
            except KVStoreError as error:
                said.send(Refused(number, str(error)))
            else:
                said.send(Done(number, timestamp, workload.is_durable(step, timestamp)))
            session.times.append(int(store.upper) - 1)
            number += 1


# -- rounds -----------------------------------------------------------------------------------


class Rounds:
    """Runs a workload on one store, kills it, and compares, again and again."""

    def __init__(
        self,
        context: Context,
        workload: Workload,
        place: Path,
        *,
        pick: random.Random | None = None,
    ) -> None:
        """`place / "store"` is where the store is, or will be made by the first child."""
        self._context = context
        self._workload = workload
        self._place = place
        self._pick = pick or seeded()
        self._state = State({})
        self.kills = 0
        self.hits = 0
        """Kills that found a step begun and not acknowledged."""
        self.steps: dict[str, int] = {}
        """How often each op was acknowledged."""

    def run(self, hits: int) -> None:
        """Rounds until so many kills came in the middle of a write, at most four times as many.

        Raises `AssertionError` at the first round that finds something wrong, and where the kills
        miss.
        """
        for _ in range(4 * hits):
            if self.hits == hits:
                return
            self._round()
        assert self.hits == hits, f"{self.hits} of {self.kills} kills hit a write"

    def _round(self) -> None:
        steps, seed = self._pick.randint(1, STEPS_MAX), self._pick.getrandbits(32)
        delay_s = self._pick.random() * DELAY_S_MAX

        def is_time(said: list[Any]) -> bool:
            return isinstance(said[-1], Begun) and said[-1].number >= steps

        said = run_until_killed(
            self._context, work, (self._workload, self._place, seed), is_time, delay_s
        )
        self.kills += 1
        self.hits += bool(said) and isinstance(said[-1], Begun)
        self._check(_Told.of(said, self._workload, self._state))

    def _check(self, told: _Told) -> None:
        path = self._place / "store"
        with open_store(path, engine_at(path) or "rocksdb") as store:
            store.verify().require_ok()
            found = dict(store.scan())
            holds = {r.name for r in store.holds()} - {f"feed/{FEED}"}
            matching = [
                state
                for state in told.states[told.durable + 1 :]
                if state.rows == found and state.holds == holds
            ]
            assert matching, (
                f"{len(found)} rows and holds {sorted(holds)} are the state after no step from "
                f"{told.durable} to {len(told.states) - 2}: {told.steps[told.durable :]}"
            )
            self._state = matching[-1]
            self._check_times(store, told)
            self._workload.check(store, self._place, self._state)
        for op in told.acknowledged:
            self.steps[op] = self.steps.get(op, 0) + 1

    def _check_times(self, store: Store, told: _Told) -> None:
        """Frontiers, positions and copies that were acknowledged are there."""
        assert store.upper > max(told.times.values(), default=0)
        cleared = max((n for n, step in enumerate(told.steps) if step.op == "clear"), default=-1)
        for number, time_ns in told.times.items():
            op, after = told.steps[number].op, told.states[number + 1]
            if op == "gc":
                assert store.since >= time_ns
            elif op == "ack":
                (position,) = (r for r in store.holds() if r.name == f"feed/{FEED}")
                assert position.timestamp >= time_ns
            elif op == "checkpoint":
                with open_read_only(self._place / told.steps[number].arguments[0]) as copy:
                    assert dict(copy.scan()) == after.rows
            elif number <= told.durable and number > cleared and time_ns >= store.since:
                assert dict(store.scan(as_of=time_ns)) == after.rows


@dataclass(frozen=True, slots=True)
class _Told:
    """The messages of a child, sorted, and the states that its steps make: the one before all
    steps first."""

    steps: list[Step]
    states: list[State]
    times: dict[int, int]
    """Of the steps that were done, by number."""
    durable: int
    """The last step that must be found, with all before it; -1 is the state before all steps."""
    acknowledged: list[str]

    @classmethod
    def of(cls, said: list[Any], workload: Workload, before: State) -> _Told:
        steps: list[Step] = []
        states = [before]
        times: dict[int, int] = {}
        durable, acknowledged = -1, []
        for message in said:
            if isinstance(message, Begun):
                steps.append(message.step)
                states.append(workload.after(states[-1], message.step, states))
            elif isinstance(message, Refused):
                states[-1] = states[-2]
            else:
                acknowledged.append(steps[message.number].op)
                durable = message.number if message.is_durable else durable
                if message.timestamp is not None:
                    times[message.number] = message.timestamp
        return cls(steps, states, times, durable, acknowledged)
