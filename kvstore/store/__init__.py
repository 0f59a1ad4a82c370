"""The store, in floors: see `store.py`."""

from kvstore.store.keeping import TASKS_DIRECTORY
from kvstore.store.reading import Export
from kvstore.store.store import Store

__all__ = ["TASKS_DIRECTORY", "Export", "Store"]
