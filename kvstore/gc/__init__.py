"""Garbage collection: giving up history below `since`, and taking back its space."""

from kvstore.gc.clear import Clearing
from kvstore.gc.collect import Collector, GcReport
from kvstore.gc.policy import GcPolicy, GcWorker

__all__ = ["Clearing", "Collector", "GcPolicy", "GcReport", "GcWorker"]
