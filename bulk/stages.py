"""The seconds that each stage of a load takes: where did the time go?

compute sort write upload    building an import
fetch check compare add      adding it to a store; only pushes with a mode compare
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Generic, TypeVar

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class StageTimes:
    """Seconds by stage. A stage that is entered again adds to its seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds of the block for the stage `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were counted elsewhere, such as in a task."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """The seconds of each stage so far."""
        return MappingProxyType(self._seconds)


def timed(work: Callable[[], _Result]) -> tuple[_Result, float]:
    """The result of `work`, and its seconds."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


class TimedItems(Generic[_Item]):
    """The items of an iterable. `seconds` counts how long they were waited for."""

    def __init__(self, items: Iterable[_Item]) -> None:
        self._items = items
        self.seconds = 0.0

    def __iter__(self) -> Iterator[_Item]:
        began = time.perf_counter()
        for item in self._items:
            self.seconds += time.perf_counter() - began
            yield item
            began = time.perf_counter()
        self.seconds += time.perf_counter() - began
