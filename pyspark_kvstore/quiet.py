"""Planners of Spark that end silently when Spark has closed their sockets.

Spark plans a query in workers of PySpark's own daemon, which no setting replaces. It closes the
socket of a planner as soon as it has the answer. The planner then fails to write, and the daemon
shows a `BrokenPipeError`. The planner that looks for formats imports this package and calls
nothing of it, so the import sets the silence up.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, Final

_OF_WORKERS: Final = ("PYTHON_UNIX_DOMAIN_ENABLED", "PYTHON_WORKER_FACTORY_SECRET")
"""Variables that Spark sets in the environment of its Python workers alone."""

_print_error: Final = traceback.print_exc


def end_silently() -> None:
    """In a worker of Spark, leave the errors of closed sockets out of the log. Costs nothing."""
    if any(name in os.environ for name in _OF_WORKERS):
        traceback.print_exc = _print_other


def _print_other(*args: Any, **named: Any) -> None:
    """Print the error that ends a worker, in the place of `traceback.print_exc`."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError):
        _print_error(*args, **named)
