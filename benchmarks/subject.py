"""One subject of the comparison in a process of its own, driven one operation at a time.

A process for each subject keeps native libraries apart and makes peak memory a fact about one
subject. The driver lets only one of the processes work at any moment.

An operation is a method that prepares the work and returns it as a callable. Only the callable is
timed. A callable that must do other things in between times itself and returns a `Timed`. Each
callable returns how many items it handled, so that the driver notices a subject that did less than
it was asked for. A subject that cannot do something lacks the method. An operation that takes a
`step` gets a new number for each call, and chooses other keys by it.
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
    """The times of a work that times itself, because not all of it counts."""

    items: int
    seconds: float
    cpu_seconds: float


Work = Callable[[], "int | Timed"]
"""Prepared work. A call does it and returns how many items it handled."""


class Stopwatch:
    """Times the blocks that run `with` it, one lap for each block."""

    def __init__(self) -> None:
        self._laps: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self._laps.append((time.perf_counter(), time.process_time()))

    def __exit__(self, *_: object) -> None:
        began, cpu_began = self._laps[-1]
        self._laps[-1] = time.perf_counter() - began, time.process_time() - cpu_began

    def total(self, items: int) -> Timed:
        """The time of all laps, which together handled `items` items."""
        seconds, cpu_seconds = map(sum, zip(*self._laps, strict=True))
        return Timed(items, seconds, cpu_seconds)

    def median(self, items: int) -> Timed:
        """The median lap, when each lap handled `items` items."""
        seconds, cpu_seconds = map(statistics.median, zip(*self._laps, strict=True))
        return Timed(items, seconds, cpu_seconds)


_CALL_SECONDS_MAX = 240.0
"""The longest that one operation may take, for up to a million rows."""


class Subject:
    """A subject: its directory, the data, and its marks (times or versions by name)."""

    name = "?"
    durability = "fsync"
    """The wait that ends a commit; `"none"` for a subject that never syncs."""
    slow: frozenset[str] = frozenset()
    """Operations that are so slow that fewer items are measured. Figures are per item."""

    def __init__(self, directory: Path, data: Data) -> None:
        self.directory = directory
        self.data = data
        self.marks: dict[str, Any] = {}

    def fresh(self, name: str) -> Path:
        """A path below the directory where nothing is: an earlier file or directory is removed."""
        target = self.directory / name
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()
        return target

    def cpu_seconds(self) -> float:
        """The processor time that the subject has taken so far, in its own process unless it has
        others."""
        return time.process_time()

    def rest(self) -> None:
        """Give memory back after an operation, before another subject works."""

    def now(self) -> Any:
        """The time or version by which a later read sees the present state."""
        raise NotImplementedError

    def mark(self, name: str) -> Work:
        """Remember the present state as `name`."""

        def work() -> int:
            self.marks[name] = self.now()
            return 1

        return work

    def close(self) -> None:
        """Close the subject's files."""


class BackedUp(Subject):
    """A subject that has incremental backups."""

    _has_backup = False

    def commit(self, rows: int, count: int, step: int) -> Work:
        """Make `count` durable commits of `rows` updates each."""
        raise NotImplementedError

    def increment(self, rows: int, is_single: bool) -> Work:
        """Back up the `rows` changes since the last call; the first call makes a full backup.
        `is_single`: by a freshly opened handle."""
        raise NotImplementedError

    def backup(self, rows: int, count: int, step: int, is_single: bool = False) -> Work:
        """Make `count` increments, each after a durable commit. Only the increments are timed:
        their sum, which includes work that is due now and then, or the median if `is_single`."""
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
    """The result of one operation. `problem` says why there is no figure."""

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
    with contextlib.suppress(EOFError):  # The driver is gone, so this process ends too.
        while (request := pipe.recv()) is not None:
            operation, arguments = request
            method = getattr(subject, operation, None)
            missing = Result(problem="not there")
            result = _timed(subject, method, arguments) if method else missing
            subject.rest()
            pipe.send(result)
    subject.close()


def _timed(subject: Subject, method: Callable[..., Work], arguments: dict[str, Any]) -> Result:
    try:
        taken = inspect.signature(method).parameters
        if "step" not in taken and "arguments" not in taken:
            arguments.pop("step", None)
        work = method(**arguments)
        # Full collections must not walk the millions of rows that the harness holds.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _reset_peak()
        resident = _peak_bytes()
        before, cpu_before = time.perf_counter(), subject.cpu_seconds()
        found = work()
        seconds, cpu_seconds = time.perf_counter() - before, subject.cpu_seconds() - cpu_before
        items, seconds, cpu_seconds = (
            found if isinstance(found, Timed) else (found, seconds, cpu_seconds)
        )
        peak = _peak_bytes()
        return Result(seconds, cpu_seconds, items, peak, peak - resident)
    except Exception as error:  # noqa: BLE001  # any error of a peer is its result
        lines = traceback.format_exception_only(error)
        return Result(problem=lines[-1].strip()[:300])


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Peak resident bytes since the reset, mapped files included."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def processes_cpu_seconds() -> float:
    """Processor time of this process and of all processes below it, ended ones included. Where
    there is no /proc: of this process alone."""
    times: dict[int, tuple[int, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            times[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    if not times:
        return time.process_time()
    mine, found = {os.getpid()}, 0.0
    while mine:
        found += sum(times[each][1] for each in mine)
        mine = {each for each, (parent, _) in times.items() if parent in mine}
    return found / os.sysconf("SC_CLK_TCK")


def tree_bytes(path: Path) -> int:
    """Bytes allocated to the files below `path`."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total
