"""Reads of many keys, each at a time of its own.

Floors, from the top:

    join points       Arrow batches with their values; values and floors of keys in a list
    sources           labels as they arrive: columns of keys and of times
    labels            keys with their times, held against the history that is kept
"""

from kvstore.joins.join import VALUE_COLUMNS, OnGone, join
from kvstore.joins.points import floors, values

__all__ = ["VALUE_COLUMNS", "OnGone", "floors", "join", "values"]
