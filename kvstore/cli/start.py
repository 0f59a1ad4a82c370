"""The console script. It imports little, so that an interrupt finds it ready: see `early`.

The interpreter takes 25 ms to shut down. So the process ends at once when the command has ended and
its output is written. Nothing is open then.
"""

from __future__ import annotations

import gc
import os
import sys

from kvstore.cli.early import INTERRUPTED, end_early


def main() -> None:
    """Run the command that the arguments name, and end the process with its exit code."""
    try:
        run()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        from contextlib import suppress

        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the reader is gone, or the command closed it
                stream.flush()
        os._exit(end.code or 0)


def run() -> None:
    """Run the command that the arguments name. Raises `SystemExit` at its end."""
    try:
        end_early()
        from kvstore.cli.process import defer_imports, watch

        watch()
        defer_imports()
        # The caller closed stdout (`>&-`). Otherwise a file of the store would get its number.
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        gc.disable()  # importing makes objects that stay: looking for garbage takes 8 ms
        from kvstore.cli.main import app  # this takes most of the time of a short command

        app(prog_name="kvstore")
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
