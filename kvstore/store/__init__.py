"""The store: see `store.py`.

Floors, from the top:

    store
    rows
    layout replication requests tasks upkeep
"""

from kvstore.store.layout import Layout
from kvstore.store.replication import Replication, SmallExport
from kvstore.store.requests import Requests, RequestToken
from kvstore.store.store import Store
from kvstore.store.tasks import TASKS_DIRECTORY
from kvstore.store.upkeep import Upkeep

__all__ = [
    "TASKS_DIRECTORY",
    "Layout",
    "Replication",
    "RequestToken",
    "Requests",
    "SmallExport",
    "Store",
    "Upkeep",
]
