"""A committer over an engine in memory, without a store around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.base.clock import ManualClock, Timeline
from kvstore.changes import ChangeIndex
from kvstore.changes.epochs import open_domain
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.mvcc import Versions, WriteSet
from kvstore.timeline.committer import Committer
from kvstore.timeline.frontiers import OPEN, Policy

START = 10**9


class Bench:
    """The parts of a committer that tests read and change."""

    def __init__(self) -> None:
        self.clock = ManualClock(START)
        self.engine = MemoryEngine(None)
        self.versions = Versions(self.engine)
        self.index = ChangeIndex(self.engine)

    def committer(self, policy: Policy = OPEN, *, upper: int = 1) -> Committer:
        return Committer(
            self.versions,
            self.index,
            Timeline(self.clock, last=upper - 1),
            open_domain(self.engine, self.index, since=0, upper=upper),
            upper=upper,
            since=0,
            durability="async",
            where="the bench",
            policy=policy,
        )


def writes_of(**points: bytes) -> WriteSet:
    """A write set that puts `points`."""
    writes = WriteSet()
    for key, value in points.items():
        writes.put(key.encode(), value)
    return writes


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.engine.close()
