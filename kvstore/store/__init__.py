"""The store, in floors: see `store.py`.

Floors, from the top:

    store
    keeping
    following
    capturing
    writing
    reading
    opened
"""

from kvstore.store.keeping import TASKS_DIRECTORY
from kvstore.store.reading import Export
from kvstore.store.store import Store

__all__ = ["TASKS_DIRECTORY", "Export", "Store"]
