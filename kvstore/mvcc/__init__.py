"""Versioned keys over an engine: no clock, no frontiers.

Floors, from the top:

    dues              the times at which versions expire
    versions          the face of the package
    export
    diff imported lookup scan write
    columns expiry fragments version
    stretches
"""

from kvstore.mvcc.fragments import Cover, Fragments, RangeTombstone
from kvstore.mvcc.version import Lifetime, Stamps, Version, timeline
from kvstore.mvcc.versions import ReadView, Versions
from kvstore.mvcc.windows import Difference
from kvstore.mvcc.write import OpenWriteSet, WriteSet, stage

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
