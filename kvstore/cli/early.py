"""The first handler of Ctrl-C in a process that runs one command.

Invariants
1. Nothing that takes long is imported before the handler is set: neither here, nor by `kvstore`,
   `kvstore.cli` and `kvstore.cli.start`. The interpreter takes 20 ms to start before that, and
   these modules a few more. An interrupt in this time shows a traceback.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


def end_early() -> None:
    """Have an interrupt end the process at once from now on, unless the process ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def end_at_once(*_: object) -> None:
    """End the process without a message. Nothing is open yet."""
    os._exit(INTERRUPTED)
