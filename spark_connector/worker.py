"""What a Python worker of Spark does once, before its first task.

Spark's worker collects garbage after each task, and each step of planning, and the next one waits
for it: 60 ms over the 90,000 objects of all the modules a task imports. Frozen, they are not looked
at again.
"""

from __future__ import annotations

import gc
from functools import cache


@cache
def spare_the_collector() -> None:
    """Keep what is there now out of garbage collection. To be called in Spark's workers only, after
    imports; later calls do nothing."""
    gc.collect()
    gc.freeze()
