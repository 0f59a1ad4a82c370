"""Feast over one history: what is served and what is trained on come from the same store.

In `feature_store.yaml`:

    online_store:
      type: kvstore.feast.OnlineStore
      path: features.db                  # or the URL of a server
    offline_store:
      type: kvstore.feast.OfflineStore
      path: features.db                  # or the URL of a server, or of a collection of backups
    batch_engine:
      type: kvstore.feast.ComputeEngine  # a materialisation is one import

`online` keeps the newest row of each entity, `offline` answers point-in-time joins from typed
tables, of which a `TableSource` names one. `compute` materialises the one from the other by
columns. Feast itself is imported here alone.
"""

from kvstore.feast.compute import ComputeEngine, ComputeEngineConfig
from kvstore.feast.handles import close_all
from kvstore.feast.offline import (
    LoggedTable,
    OfflineStore,
    OfflineStoreConfig,
    SavedTable,
    TableSource,
)
from kvstore.feast.online import OnlineStore, OnlineStoreConfig

__all__ = [
    "ComputeEngine",
    "ComputeEngineConfig",
    "LoggedTable",
    "OfflineStore",
    "OfflineStoreConfig",
    "OnlineStore",
    "OnlineStoreConfig",
    "SavedTable",
    "TableSource",
    "close_all",
]
