"""Backups: collections of a store's history, restored as of any instant, and replicas."""

from backup.collection import BackupInfo, Collection, CollectionInfo
from backup.replication import replicate
from backup.source import Stop
from backup.verify import VerifyReport

__all__ = ["BackupInfo", "Collection", "CollectionInfo", "Stop", "VerifyReport", "replicate"]
