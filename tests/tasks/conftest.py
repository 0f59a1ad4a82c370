"""Tasks in memory, on a clock that the test moves."""

from __future__ import annotations

import pytest

from kvstore.base.clock import ManualClock
from kvstore.tasks import Tasks

SECOND = 1_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000 * SECOND)


@pytest.fixture
def tasks(clock: ManualClock) -> Tasks:
    return Tasks.open(None, clock=clock)
