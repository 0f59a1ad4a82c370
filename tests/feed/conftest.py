"""A store whose clock the tests of feeds move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock, Store


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10**15)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "s", durability="async", clock=clock) as opened:
        yield opened
