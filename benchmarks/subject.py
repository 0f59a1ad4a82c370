"""One subject of the comparison in a process of its own, driven one operation at a time.

A process each keeps native libraries apart, makes peak memory a fact about one subject, and lets
the driver interleave: only one of them runs at any moment.

An operation is a method that prepares the work and returns it as a callable; only the callable is
timed, or, where it must do other things in between, what it says of itself (`Timed`). It returns
how many items it handled, so that a subject that did less than it was asked for is found out. A
subject that cannot do something has no such method. An operation that takes a `step` gets another
number each time, and takes other keys.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import multiprocessing
import os
import shutil
import statistics
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.data import Data


class Timed(NamedTuple):
    """What a work took that is not to be charged for all it did."""

    items: int
    seconds: float
    cpu_seconds: float


Work = Callable[[], "int | Timed"]
"""Prepared work: does it, returns how many items it handled."""


class Stopwatch:
    """Takes the time of what is done `with` it, lap by lap."""

    def __init__(self) -> None:
        self._laps: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self._laps.append((time.perf_counter(), time.process_time()))

    def __exit__(self, *_: object) -> None:
        began, cpu_began = self._laps[-1]
        self._laps[-1] = time.perf_counter() - began, time.process_time() - cpu_began

    def total(self, items: int) -> Timed:
        """All laps together handled so many items."""
        seconds, cpu_seconds = map(sum, zip(*self._laps, strict=True))
        return Timed(items, seconds, cpu_seconds)

    def median(self, items: int) -> Timed:
        """The middle lap, which handled so many."""
        seconds, cpu_seconds = map(statistics.median, zip(*self._laps, strict=True))
        return Timed(items, seconds, cpu_seconds)


_CALL_SECONDS_MAX = 240.0
"""For a million rows, or fewer."""


class Subject:
    """What every subject has: its directory, the data, and marks: its times or versions by name."""

    name = "?"
    durability = "fsync"
    """What a commit of this subject waits for; `"none"` marks one that never syncs."""
    slow: frozenset[str] = frozenset()
    """Operations that take so long that fewer are made: figures are per item."""

    def __init__(self, directory: Path, data: Data) -> None:
        self.directory = directory
        self.data = data
        self.marks: dict[str, Any] = {}

    def fresh(self, name: str) -> Path:
        """An empty place below the directory; what was there is removed."""
        target = self.directory / name
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()
        return target

    def now(self) -> Any:
        """What a later as-of read names to see the present state."""
        raise NotImplementedError

    def mark(self, name: str) -> Work:
        """Remember the present under `name`."""

        def work() -> int:
            self.marks[name] = self.now()
            return 1

        return work

    def close(self) -> None:
        """Let go of everything."""


class BackedUp(Subject):
    """A subject that can be backed up increment by increment."""

    _has_backup = False

    def commit(self, rows: int, count: int, step: int) -> Work:
        """Durable commits of so many updates each."""
        raise NotImplementedError

    def increment(self, rows: int, is_single: bool) -> Work:
        """What came since the last call, in which so many rows changed; the first is a full one.
        `is_single`: by who comes once."""
        raise NotImplementedError

    def backup(self, rows: int, count: int, step: int, is_single: bool = False) -> Work:
        """So many increments, each after a durable commit of its own. Only they are timed: their
        sum, in which what is due now and then has its share, or else the median."""
        if not self._has_backup:
            self.increment(rows, is_single)()
            self._has_backup = True

        def work() -> Timed:
            watch = Stopwatch()
            for number in range(count):
                self.commit(rows, 1, step * 100 + number)()
                increment = self.increment(rows, is_single)
                with watch:
                    found = increment()
                assert found == rows, f"an increment of {found} rows"
            return watch.median(rows) if is_single else watch.total(rows * count)

        return work


class Result(NamedTuple):
    """What came of one operation. `problem` says why there is no figure."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    items: int = 0
    peak_bytes: int = 0
    grown_bytes: int = 0
    problem: str = ""


class Process:
    """A subject's process, as the driver holds it."""

    def __init__(self, where: str, directory: Path, rows: int) -> None:
        self.where = where
        self._seconds_max = _CALL_SECONDS_MAX * max(1.0, rows / 1_000_000)
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(where, directory, rows, far))
        self._process.start()
        far.close()
        self.broken = ""
        hello = self._receive()
        if isinstance(hello, str):
            self.broken = hello
            self.facts: dict[str, Any] = {}
        else:
            self.facts = hello

    def call(self, operation: str, **arguments: Any) -> Result:
        """Run one operation and wait for it."""
        if self.broken:
            return Result(problem=self.broken)
        self._pipe.send((operation, arguments))
        answer = self._receive()
        return answer if isinstance(answer, Result) else Result(problem=str(answer))

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            if not self.broken:
                self._pipe.send(None)
            self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            if self._pipe.poll(self._seconds_max):
                return self._pipe.recv()
            self.broken = f"took longer than {self._seconds_max:g} s"
            self._process.kill()
        except (EOFError, OSError):
            self.broken = "its process died"
        return self.broken


def _serve(where: str, directory: Path, rows: int, pipe: Connection) -> None:
    module, name = where.split(":")
    try:
        kind = getattr(importlib.import_module(module), name)
        directory.mkdir(parents=True, exist_ok=True)
        subject = kind(directory, Data(rows))
    except ImportError as error:
        pipe.send(f"missing: {error}")
        return
    facts = {"durability": kind.durability, "slow": kind.slow}
    pipe.send({**facts, "version": getattr(kind, "version", "")})
    with contextlib.suppress(EOFError):  # The driver is gone: so is this process then.
        while (request := pipe.recv()) is not None:
            operation, arguments = request
            method = getattr(subject, operation, None)
            pipe.send(_timed(method, arguments) if method else Result(problem="not there"))
    subject.close()


def _timed(method: Callable[..., Work], arguments: dict[str, Any]) -> Result:
    try:
        taken = inspect.signature(method).parameters
        if "step" not in taken and "arguments" not in taken:
            arguments.pop("step", None)
        work = method(**arguments)
        # What the harness holds, millions of rows, is not walked again by each full collection.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _reset_peak()
        resident = _peak_bytes()
        before, cpu_before = time.perf_counter(), time.process_time()
        found = work()
        seconds, cpu_seconds = time.perf_counter() - before, time.process_time() - cpu_before
        items, seconds, cpu_seconds = (
            found if isinstance(found, Timed) else (found, seconds, cpu_seconds)
        )
        peak = _peak_bytes()
        return Result(seconds, cpu_seconds, items, peak, peak - resident)
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is its result
        lines = traceback.format_exception_only(error)
        return Result(problem=lines[-1].strip()[:300])


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Peak resident bytes since the reset, files in the page cache that are mapped included."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def tree_bytes(path: Path) -> int:
    """Bytes allocated to the files below `path`."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total
