"""Reads of many keys, each at a time of its own.

Floors, from the top:

    points            values and floors of keys in a list
    labels            keys with their times, held against the history that is kept
"""

from kvstore.joins.points import floors, values

__all__ = ["floors", "values"]
