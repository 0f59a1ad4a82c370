"""Versioned keys over an engine: no clock, no frontiers.

Reads at any time, writes at explicit times, range tombstones, passes over a window, small records.
Which time a read may have is decided in `kvstore.timeline`.
"""

from kvstore.mvcc.fragments import Cover, Fragments, RangeTombstone
from kvstore.mvcc.key_history import Lifetime, Stamps, Version, timeline
from kvstore.mvcc.passes import Difference
from kvstore.mvcc.versions import ReadView, Versions
from kvstore.mvcc.write_set import OpenWriteSet, WriteSet, stage

__all__ = [
    "Cover",
    "Difference",
    "Fragments",
    "Lifetime",
    "OpenWriteSet",
    "RangeTombstone",
    "Stamps",
    "Version",
    "Versions",
    "ReadView",
    "WriteSet",
    "stage",
    "timeline",
]
