"""The first handler of Ctrl-C in a process that runs one command.

Invariants
1. Nothing that takes time is imported before the handler is set: neither here, nor by `kvstore`,
   `kvstore.cli` and `kvstore.cli.start`. The interpreter takes 20 ms to start before that, and
   these modules take 1 ms. An interrupt in this time shows a traceback.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` adds enumerations, which take 3 ms
import os

INTERRUPTED = 130


def end_early() -> None:
    """Have an interrupt end the process at once from now on, unless the process ignores it."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, end_at_once)


def end_at_once(*_: object) -> None:
    """End the process without a message. Nothing is open yet."""
    os._exit(INTERRUPTED)
