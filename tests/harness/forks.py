"""Attacks by forking: children that use, or merely drop, handles of their parent.

`run` is called by a program that has things open. It forks child after child; each calls everything
it is given, which must raise `ForkedError`, and ends in one of the ways in which processes end. A
child that hangs is killed and reported. A child that ends with a wrong status is reported too.

    def main() -> None:
        with kvstore.open(path) as store:
            run({"get": lambda: store.get(b"k")}, count=20, seed=1)

A child leaves by returning from `run` or by an exception, through all `with` blocks of its caller.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from kvstore.errors import ForkedError

HUNG_S: Final = 120.0
"""After so long a child hangs: an exit takes milliseconds, and some seconds on a busy machine."""

STATUS: Final = 7
"""The status of children that exit with a status of their own."""

WAYS: Final[Mapping[str, int]] = {
    "_exit": STATUS,
    "exit": STATUS,
    "collect": STATUS,
    "error": 1,
    "return": 0,
}
"""How a child ends, with the status that its parent must see."""

_PAUSE_S: Final = 0.005


class Misbehaved(AssertionError):  # noqa: N818  # an assertion, by its kind
    """A child did not refuse a call, hung, or ended with a wrong status."""


def run(calls: Mapping[str, Callable[[], object]], *, count: int, seed: int) -> bool:
    """Fork `count` children, one after the other. Returns False in a child that must return.

    Raises `Misbehaved` in the parent. The `seed` decides in which order calls are made and which
    ways are taken; it stands in the error.
    """
    rng = random.Random(seed)
    ways = list(WAYS)
    for number in range(count):
        way = ways[number % len(ways)] if number < len(ways) else rng.choice(ways)
        order = rng.sample(list(calls), len(calls))
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            wrong = [problem for name in order if (problem := _problem(name, calls[name]))]
            if wrong:
                os.write(2, "\n".join(["", *wrong, ""]).encode())
                os._exit(99)
            _leave(way)
            return False
        _reap(child, way, f"seed {seed}, child {number}, way {way!r}")
    return True


def reap(child: int) -> int | None:
    """The status of a child that ends within `HUNG_S`; None of one that was killed for hanging."""
    deadline = time.monotonic() + HUNG_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_PAUSE_S)  # the system has no wait with a time
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _reap(child: int, way: str, which: str) -> None:
    status = reap(child)
    if status is None:
        raise Misbehaved(f"{which}: it hung")
    if status != WAYS[way]:
        raise Misbehaved(f"{which}: it ended with {status}, not {WAYS[way]}")


def _problem(name: str, call: Callable[[], object]) -> str | None:
    """The fault of a call in a child, None where it raised the right error."""
    try:
        found = call()
    except ForkedError as error:
        return None if error.owner == os.getppid() else f"{name}: owner {error.owner}"
    except BaseException as error:  # noqa: BLE001  # told to the parent
        return f"{name}: {type(error).__name__}: {error}"
    return f"{name} gave {repr(found)[:100]}"


def _leave(way: str) -> None:
    """End, or return, so that the child leaves the caller's blocks."""
    if way == "_exit":
        os._exit(STATUS)
    if way == "collect":
        gc.collect()
        gc.collect()
        sys.exit(STATUS)
    if way == "exit":
        sys.exit(STATUS)
    if way == "error":
        raise RuntimeError("a child that ends by an error")
