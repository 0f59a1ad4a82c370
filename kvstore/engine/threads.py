"""RocksDB's background threads at a fork.

RocksDB has pools of threads in each process, and keeps them when a database is closed. A forked
child gets the pools without the threads. Its flushes would wait for ever, and the C++ destructors
that run at exit would join threads that do not exist, which crashes or hangs.

Invariants
1. While no database is open, a fork ends the threads first, and the parent starts them again. The
   child gets empty pools, which work.
2. While a database is open, its flushes and compactions continue during the fork. The child may
   then open databases read-only, which needs no thread. Opening one for writing is refused.
3. A child that got pools without threads ends right after Python's own finalization: streams are
   flushed, and the C++ destructors do not run.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstore.errors import ForkedError
from kvstore.forks import undivided
from kvstore.limits import FORK_WAIT_S_MAX

_TASKS: Final = Path("/proc/self/task")
_LOW, _HIGH = "rocksdb:low", "rocksdb:high"
_PAUSE_S: Final = 0.0001

SetThreads = Callable[[int, int], None]
"""Sets how many threads of low and of high priority the pools have."""


class Threads:
    """The state of RocksDB's threads in this process: one object, in `engine.rocks_opening`."""

    def __init__(self, set_threads: SetThreads) -> None:
        self._set_threads = set_threads
        self._open: weakref.WeakSet[object] = weakref.WeakSet()
        self._was_used = False
        self._ended: Counter[str] = Counter()
        self._is_known = False
        self._stay = False
        self._owner = 0
        self._process = os.getpid()
        os.register_at_fork(
            before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
        )

    def require_own(self, where: str) -> None:
        """Raise `ForkedError` where this process got the pools without their threads."""
        if self._owner:
            raise ForkedError(
                f"RocksDB in memory, needed for {where},",
                owner=self._owner,
                remedy="fork before a store is opened, or when all are closed, or start a fresh "
                "process (spawn, forkserver, subprocess); open_read_only works here",
            )

    def open(self, database: object) -> None:
        """Note that `database` is about to be opened."""
        self._was_used = True
        self._open.add(database)

    def close(self, database: object) -> None:
        """Note that `database` was closed."""
        self._open.discard(database)

    def has_open(self, database: object) -> bool:
        """Whether `database` is open in this process."""
        return database is not None and database in self._open

    def _before(self) -> None:
        undivided().acquire()  # one fork at a time
        self._ended = Counter()
        self._is_known = True
        found = _running() if self._was_used and not self._owner else Counter()
        self._stay = bool(found)
        if not found or self._open:
            return
        self._ended = found
        self._set_threads(0, 0)
        deadline = time.monotonic() + FORK_WAIT_S_MAX
        while (stay := bool(_running())) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        self._stay = stay

    def _in_parent(self) -> None:
        self._is_known = False
        if self._ended:
            self._set_threads(self._ended[_LOW], self._ended[_HIGH])
        undivided().release()

    def _in_child(self) -> None:
        # Another thread may have opened a database since `_before`. A program that forks without
        # Python and tells it afterwards has skipped `_before`.
        stays = self._stay or bool(self._open) if self._is_known else self._was_used
        if stays and not self._owner:
            self._owner = self._process
            _end_behind_python()
        self._open = weakref.WeakSet()
        self._is_known = False
        self._process = os.getpid()


def _running() -> Counter[str]:
    """The numbers of RocksDB's threads by name. Where the system does not list threads, one is
    assumed."""
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        return Counter([_LOW])
    found: Counter[str] = Counter()
    for task in tasks:
        try:
            name = (task / "comm").read_text().strip()
        except OSError:  # the thread has ended
            continue
        if name.startswith("rocksdb:"):
            found[name] += 1
    return found


def _end_behind_python() -> None:
    """Make the C library's `exit`, which Python calls last, flush its streams and end the process
    at once, with its status. Handlers run from the newest to the oldest."""
    library = ctypes.CDLL(None)
    try:
        on_exit, at_exit = library.on_exit, library["__cxa_atexit"]
    except AttributeError:  # another C library than GNU's: the destructors run
        return
    on_exit(ctypes.cast(library._exit, ctypes.c_void_p), None)
    at_exit(ctypes.cast(library.fflush, ctypes.c_void_p), None, None)
