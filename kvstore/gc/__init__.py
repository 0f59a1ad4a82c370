"""Garbage collection: history below `since` is given up, and its space taken back.

Floors, from the top:

    policy            GC in the background
    collect           which steps, in which order
    search settle     garbage; small imports that become plain versions
    clear leftovers
    rules             which versions are garbage
"""

from kvstore.gc.clear import Clearing
from kvstore.gc.collect import Collector, GcReport
from kvstore.gc.policy import GcPolicy, GcWorker

__all__ = ["Clearing", "Collector", "GcPolicy", "GcReport", "GcWorker"]
