"""Backups: collections of a store's history, restored as of any instant, and replicas."""

import kvstore.bulk  # noqa: F401  # refuses a stranger before it is imported from
from backup.collection import Collection
from backup.overview import CollectionInfo
from backup.replication import replicate
from backup.source import Stop
from backup.verify import VerifyReport
from backup.window import BackupInfo

__kvstore__ = True
"""Tells this package from others of its name: see `kvstore.neighbours`."""

__all__ = ["BackupInfo", "Collection", "CollectionInfo", "Stop", "VerifyReport", "replicate"]
