"""A process that is killed in the middle of its writes, and checks of the store that it left.

    child      sends (begun, number, step) before each call and (done, number, ...) after it
    parent     kills it with SIGKILL after some steps, opens the store, compares it with a model

    Rounds(context, Workload(), place).run(hits=20)     # prints the seed

`tests.harness.workload` has the steps and their model. A kill loses no bytes that the system has
taken. A commit may be lost if no durable commit followed it. So the store must be in the state
after some whole step, from the last durable acknowledgement to the step under way.

Invariants
1. A seed repeats the steps of a kill test, and not the moment of the kill.
2. A kill counts as a hit only if a step had begun and was not acknowledged; enough must hit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.errors import KVStoreError
from kvstore.opening import engine_at, open_read_only
from kvstore.opening import open as open_store
from kvstore.store import Store
from tests.harness.seeds import seeded
from tests.harness.workload import FEED, Session, State, Step, Workload

SEED: Final = "KVSTORE_KILLS_SEED"
"""Name in the environment: the seed that a kill test is to repeat."""

STEPS_MAX: Final = 60
"""Steps of a child before it is killed, at most."""

DELAY_S_MAX: Final = 0.003
"""How long after the beginning of a step the kill comes: about as long as a step takes."""

Context = Any
"""A context of `multiprocessing`, which starts processes."""


def run_until_killed(
    context: Context,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    is_time: Callable[[list[Any]], bool],
    delay_s: float,
) -> list[Any]:
    """Run `target(*arguments, pipe)` in a process, and kill it `delay_s` after `is_time` is first
    true of the messages that it sent. Returns all its messages, also where it ended by itself."""
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


class Begun(NamedTuple):
    """The child is about to do a step."""

    number: int
    step: Step


class Done(NamedTuple):
    """A step has returned. `is_durable`: this step and all earlier ones survive any crash."""

    number: int
    timestamp: int | None
    is_durable: bool


class Refused(NamedTuple):
    """A step has raised, having done nothing."""

    number: int
    error: str


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
        """The store is at `place / "store"`; the first child makes it if there is none."""
        self._context = context
        self._workload = workload
        self._place = place
        self._pick = pick or seeded(SEED)
        self._state = State({})
        self.kills = 0
        self.hits = 0
        """Kills that found a step begun and not acknowledged."""
        self.steps: dict[str, int] = {}
        """How often each op was acknowledged."""

    def run(self, hits: int) -> None:
        """Rounds until `hits` kills came in the middle of a write, with at most four times as many
        kills.

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
            holds = {r.name for r in store.holds.all()} - {f"feed/{FEED}"}
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
                (position,) = (r for r in store.holds.all() if r.name == f"feed/{FEED}")
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
    """Times of the steps that were done, by number."""
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
