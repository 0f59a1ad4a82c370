"""Bounded looks at a store, for people: a page of keys, of versions, of changes per interval.

A look costs a bounded number of entries and of bytes, whatever the store holds: long runs of
deleted keys, a key with a million versions, values of a gigabyte. A look that met its bound says
so, and tells where the next look begins.

Floors, from the top:

    browsing            one store, with the times of its reads checked
    keys versions activity
    excerpt
"""

from kvstore.browsing.activity import Activity, Interval, Mark
from kvstore.browsing.browsing import Browsing
from kvstore.browsing.excerpt import Excerpt
from kvstore.browsing.keys import KeyPage, KeyRow
from kvstore.browsing.versions import VersionPage, VersionRow

__all__ = [
    "Browsing",
    "KeyPage",
    "KeyRow",
    "VersionPage",
    "VersionRow",
    "Activity",
    "Interval",
    "Mark",
    "Excerpt",
]
