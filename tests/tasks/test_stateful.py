"""Random histories of a durable queue against a small model, with crashes in between."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.base.clock import ManualClock
from kvstore.errors import DependencyError
from kvstore.storage.journal import Journal, Sync
from kvstore.tasks import CONTENT, NewTask, Task, Tasks, TaskState
from tests.harness.bounds import bounds
from tests.harness.disk import MemoryDisk
from tests.harness.tiny_limits import tiny_limits

SECOND = 1_000_000_000
QUEUES = st.sampled_from(["a", "b", "c"])


class QueueMachine(RuleBasedStateMachine):
    """The model is a plain dict of tasks. It keeps every task ever seen, for calls with stale
    tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = ExitStack()
        self.disk = MemoryDisk()
        self.clock = ManualClock(1000 * SECOND)
        self.model: dict[str, Task] = {}
        self.seen: list[Task] = []

    @initialize(limits=tiny_limits)
    def begin(self, limits: dict[str, int]) -> None:
        self.limits.enter_context(bounds(limits))
        self.open()

    def teardown(self) -> None:
        self.limits.close()

    def open(self) -> None:
        state = TaskState()
        journal = Journal.open(
            "/tasks",
            apply=state.apply,
            restore=state.restore,
            snapshot=state.records,
            content=CONTENT,
            sync=Sync.always(),
            file_records=5,
            compact_bytes=1000,
            files=self.disk,
        )
        self.state = state
        self.tasks = Tasks(state, journal, self.clock)

    def learn(self, *tasks: Task) -> None:
        for task in tasks:
            self.model[task.id] = task
            self.seen.append(task)

    def pick(self, data: st.DataObject, size: int) -> list[Task]:
        picked = data.draw(st.lists(st.sampled_from(self.seen), max_size=size)) if self.seen else []
        return list({task.id: task for task in picked}.values())

    def stale(self, tasks: list[Task]) -> list[tuple[str, int | None, int | None]]:
        return [
            (task.id, task.version, self.model[task.id].version if task.id in self.model else None)
            for task in tasks
            if self.model.get(task.id) != task
        ]

    @rule(queue=QUEUES, value=st.binary(max_size=5), delay=st.integers(0, 5))
    def insert(self, queue: str, value: bytes, delay: int) -> None:
        at = self.clock.wall_ns() + delay * SECOND
        task = self.tasks.insert(queue, value, available_at=at)
        assert (task.queue, task.value, task.available_at, task.version) == (queue, value, at, 1)
        assert task.id not in {other.id for other in self.seen}
        self.learn(task)

    @rule(queues=st.sets(QUEUES, min_size=1), hold=st.integers(1, 5))
    def claim(self, queues: set[str], hold: int) -> None:
        now = self.clock.wall_ns()
        waiting = [
            (task.available_at, task.id)
            for task in self.model.values()
            if task.queue in queues and task.available_at <= now
        ]
        task = self.tasks.claim(sorted(queues), hold=hold)
        assert (task is None) == (not waiting)
        if task is not None:
            before = self.model[task.id]
            assert (before.available_at, before.id) == min(waiting)
            assert (task.version, task.attempt) == (before.version + 1, before.attempt + 1)
            assert task.available_at == now + hold * SECOND
            self.learn(task)

    @rule(data=st.data(), queue=QUEUES, value=st.binary(max_size=5))
    def modify(self, data: st.DataObject, queue: str, value: bytes) -> None:
        touched = self.pick(data, 4)
        cut = data.draw(st.integers(0, len(touched)))
        changes = [replace(task, queue=queue, value=value) for task in touched[:cut]]
        deletes = touched[cut:]
        depends = self.pick(data, 2)
        expected = self.stale(touched) + self.stale(depends)
        try:
            done = self.tasks.modify(
                inserts=[NewTask(queue, value)], changes=changes, deletes=deletes, depends=depends
            )
        except DependencyError as error:
            assert list(error.failures) == expected  # noqa: PT017
            return
        assert not expected
        for task in deletes:
            del self.model[task.id]
        self.learn(*done.inserted, *done.changed)

    @rule(data=st.data(), hold=st.integers(1, 5), progress=st.binary(max_size=3))
    def renew(self, data: st.DataObject, hold: int, progress: bytes) -> None:
        for task in self.pick(data, 1):
            current = self.model.get(task.id) == task
            try:
                renewed = self.tasks.renew(task, hold=hold, progress=progress)
            except DependencyError:
                assert not current
            else:
                assert current
                self.learn(renewed)

    @rule(seconds=st.integers(-3, 6))
    def move_clock(self, seconds: int) -> None:
        self.clock.advance(seconds * SECOND)

    @rule()
    def compact(self) -> None:
        self.tasks.compact()

    @rule()
    def restart(self) -> None:
        self.tasks.close()
        self.open()

    @rule()
    def be_killed(self) -> None:
        self.disk = self.disk.killed()
        self.open()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if hasattr(self, "state"):
            self.state.assert_invariants()
            assert self.state.tasks == self.model


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
