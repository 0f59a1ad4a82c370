"""The set-up of a Python worker of Spark before its first task, and its errors.

Spark's worker runs Python's garbage collector after each task and each step of planning, and the
next task waits for it: 60 ms for the 90,000 objects of the modules that a task imports. The
collector skips frozen objects.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from kvstore.errors import KVStoreError

_OF_WORKERS: Final = ("PYTHON_UNIX_DOMAIN_ENABLED", "PYTHON_WORKER_FACTORY_SECRET")
"""Variables that Spark sets in the environment of its Python workers alone."""

_print_error: Final = traceback.print_exc
_HIDES_STACK: Final = "SPARK_HIDE_TRACEBACK"


@cache
def freeze_objects() -> None:
    """Keep all present objects out of garbage collection. Only the first call does anything.

    Call it in Spark's workers only, after their imports. It runs no collection before: imports
    leave no garbage, and the first call of each worker would wait 22 ms.
    """
    gc.freeze()
    if _is_worker():
        traceback.print_exc = _print_other


@contextmanager
def plain_errors() -> Iterator[None]:
    """In a worker of Spark, errors of the library leave the block without the worker's stack.

    Spark sends the text of an error to the driver. The error says what to do, and a stack of thirty
    lines would hide it. The worker ends with the error, so no error of other code is cut short.
    """
    try:
        yield
    except KVStoreError:
        if _is_worker():
            os.environ[_HIDES_STACK] = "1"  # PySpark looks when it writes the error
        raise


def _is_worker() -> bool:
    return any(name in os.environ for name in _OF_WORKERS)


def _print_other(*args: Any, **named: Any) -> None:
    """Print the error that ends a worker, in the place of `traceback.print_exc`, which PySpark's
    daemon calls for it.

    Spark closes the socket of a planner, or of a task with a limit, as soon as it has its answer.
    The worker then fails to write, which is no error of anyone.
    """
    if not isinstance(sys.exc_info()[1], BrokenPipeError):
        _print_error(*args, **named)
