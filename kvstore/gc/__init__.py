"""Garbage collection: history below `since` is given up, and its space taken back.

Floors, from the top:

    policy            GC in the background
    collect           which steps, in which order
    removing settle   removals in batches; small imports that become plain versions
    search clear leftovers
    rules             which versions are garbage
"""

from kvstore.gc.clear import Clearing
from kvstore.gc.collect import Collector, GcReport
from kvstore.gc.policy import GcPolicy, GcWorker

__all__ = ["Clearing", "Collector", "GcPolicy", "GcReport", "GcWorker"]
