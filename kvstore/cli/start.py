"""The console script. It imports little, so that an interrupt finds it ready: see `interrupts`."""

from __future__ import annotations

import os
import sys

from kvstore.cli.interrupts import INTERRUPTED, watch


def main() -> None:
    """Run the command that the arguments name, and end the process with its exit code."""
    try:
        watch()
        # The caller closed stdout (`>&-`). Otherwise a file of the store would get its number.
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        from kvstore.cli.app import app  # this takes most of the time of a short command

        app(prog_name="kvstore")
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
