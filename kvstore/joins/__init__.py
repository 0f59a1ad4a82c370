"""Reads of many keys, each at a time of its own.

Floors, from the top:

    join points       Arrow batches with their values; values and floors of keys in a list
    stored            the answers of a store
    order             labels in the order of versions
    side              the seam between labels and the sources that answer them
    sources           labels as they arrive
    labels            keys with their times, held against the history that is kept
"""

from kvstore.joins.join import OnGone, join
from kvstore.joins.points import floors, values
from kvstore.joins.side import Join
from kvstore.joins.stored import StoredSide

__all__ = ["Join", "OnGone", "StoredSide", "floors", "join", "values"]
