"""The peak of the memory that Python has while a block runs."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_WAIT_S: Final = 1.0


class Traced:
    """What a block has taken; set when it ends."""

    peak = 0


@contextmanager
def traced() -> Iterator[Traced]:
    """Trace the block. A test that does so is marked `traces_memory`.

    `tracemalloc.stop` of Python 3.11 crashes while a thread begins or ends (cpython#128679, mended
    in 3.12.9 and 3.13.2). A thread that was joined has left Python's list, and still frees its
    state. So this waits until the system has no more threads than before; a library's own idle
    threads may stay, which do nothing.
    """
    threads, found = _threads(), Traced()
    tracemalloc.start()
    try:
        yield found
        found.peak = tracemalloc.get_traced_memory()[1]
    finally:
        until = time.monotonic() + _WAIT_S
        while _threads() > threads and time.monotonic() < until:
            time.sleep(0.001)
        tracemalloc.stop()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
