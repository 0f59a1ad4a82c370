"""Versioned keys at explicit timestamps over an engine: no clock, no frontiers."""

from kvstore.mvcc.diff import Difference
from kvstore.mvcc.fragments import Cover, Fragments, RangeTombstone
from kvstore.mvcc.page import DiffPage, RowPage, diff_page, row_page
from kvstore.mvcc.version import Lifetime, Stamps, Version, timeline
from kvstore.mvcc.versions import Versions, View
from kvstore.mvcc.write import WriteSet, stage

__all__ = [
    "Cover",
    "DiffPage",
    "Difference",
    "Fragments",
    "Lifetime",
    "RangeTombstone",
    "RowPage",
    "Stamps",
    "Version",
    "Versions",
    "View",
    "WriteSet",
    "diff_page",
    "row_page",
    "stage",
    "timeline",
]
