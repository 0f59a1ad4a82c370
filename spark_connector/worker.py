"""The set-up of a Python worker of Spark before its first task.

Spark's worker runs Python's garbage collector after each task and each step of planning, and the
next task waits for it: 60 ms for the 90,000 objects of the modules that a task imports. The
collector skips frozen objects.
"""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_objects() -> None:
    """Keep all present objects out of garbage collection. Only the first call does anything.

    Call it in Spark's workers only, after their imports. It runs no collection before: imports
    leave no garbage, and the first call of each worker would wait 22 ms.
    """
    gc.freeze()
