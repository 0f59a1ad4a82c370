"""Where the time of a load went, and how far it is.

compute sort write upload    the stages of building an import
fetch check compare add      of adding it to a store; only pushes with a mode compare
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from kvstore.base.meters import WorkCount

# --------------------------------------------------------------------------------------------------
# The seconds that each stage of a load takes: where did the time go?
#
#     compute sort write upload    building an import
#     fetch check compare add      adding it to a store; only pushes with a mode compare

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

    def add_rest(self, name: str, whole: float) -> None:
        """Add the seconds of a whole that no stage has, such as those of Spark itself. Stages of
        tasks that ran at once may have more than the whole: then nothing is added."""
        self.add(name, max(whole - sum(self._seconds.values()), 0.0))

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


# --------------------------------------------------------------------------------------------------
# How far the reading of files is, by their bytes.


class Counted(Protocol):
    """Anything that has rows."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        ...


Rows = TypeVar("Rows", bound=Counted)


class Reading:
    """The share of some files that has been read. It is an estimate: text is read ahead, and rows
    of a Parquet file are taken to have the same length."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._sizes = {path: path.stat().st_size for path in paths if path.is_file()}
        self._shares: dict[Path, Callable[[], float]] = {}

    def follow(self, path: Path, share: Callable[[], float]) -> None:
        """Have `share` tell how much of a file has been read, from now on."""
        self._shares[path] = share

    def share_of(self, path: Path) -> float:
        """How much of the bytes of one file has been read, from 0 to 1."""
        return min(self._shares[path](), 1.0) if path in self._shares else 0.0

    @property
    def share(self) -> float:
        """How much of the bytes of all files has been read, from 0 to 1."""
        whole = sum(self._sizes.values())
        read = sum(size * self.share_of(path) for path, size in self._sizes.items())
        return read / whole if whole else 0.0

    def over(self, batches: Iterable[Rows], show: Callable[[int], None]) -> Iterator[Rows]:
        """Yield batches of rows of the files. `show` is called with the rows so far, and an
        estimate of all: first with none, so that a rate counts the reading of the first batch."""
        rows = 0
        show(WorkCount.at(0, 0.0))
        for batch in batches:
            yield batch
            rows += batch.num_rows
            show(WorkCount.at(rows, self.share))
