"""A signal in the middle of a call: Ctrl-C at a random moment, as Python delivers it.

    duration_s = measured(call)
    outcome = interrupted(call, after_s=pick.random() * duration_s)

A timer of the system sends a signal whose handler raises `KeyboardInterrupt`. Python runs handlers
between certain bytecodes of the main thread, so the moments are the same as for a real Ctrl-C. (A
trace function that raises would reach more places, and some that no signal reaches, such as the
place between the last bytecode of a `with` block and the release of its lock.)

Invariants
1. The signal comes once per call; the call's handling of the signal is not interrupted again.
2. No signal is left behind: code after `interrupted` is undisturbed.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import FrameType

_SHORTEST_S = 1e-6


class Outcome(Enum):
    """How an interrupted call ended."""

    ENDED = "the call ended before the signal"
    RAISED = "KeyboardInterrupt came out of the call"
    SWALLOWED = "the signal came, and the call returned all the same"
    OTHER = "another exception came out of the call"


def measured(call: Callable[[], object]) -> float:
    """How long a call takes, in seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def interrupted(
    call: Callable[[], object], *, after_s: float
) -> tuple[Outcome, BaseException | None]:
    """Make the call, and send the signal after `after_s` seconds. Returns how the call ended, and
    the exception that came out of it. In the main thread only."""
    assert threading.current_thread() is threading.main_thread()
    came = False
    is_inside = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if is_inside:
            came = True
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, on_signal)
    unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None  # from a finalizer
    error: BaseException | None = None
    try:
        signal.setitimer(signal.ITIMER_REAL, max(after_s, _SHORTEST_S))
        call()
    except BaseException as raised:  # noqa: BLE001  # the caller asked for it
        error = raised
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGALRM, former)
    if error is None:
        return (Outcome.SWALLOWED if came else Outcome.ENDED), None
    return (Outcome.RAISED if isinstance(error, KeyboardInterrupt) else Outcome.OTHER), error
