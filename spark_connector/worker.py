"""What a Python worker of Spark does once, before its first task.

Spark's worker runs Python's garbage collector after each task and each step of planning, and the
next one waits for it: 60 ms over the 90,000 objects of all the modules a task imports. Frozen
objects are not looked at again.
"""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_objects() -> None:
    """Keep all present objects out of garbage collection. For Spark's workers only, after their
    imports; later calls do nothing."""
    gc.collect()
    gc.freeze()
