"""Backups: collections of a store's history, restored as of any instant, and replicas."""

from backup.collection import Collection, CollectionInfo
from backup.replication import replicate
from backup.source import Stop
from backup.verify import VerifyReport
from backup.window import BackupInfo

__all__ = ["BackupInfo", "Collection", "CollectionInfo", "Stop", "VerifyReport", "replicate"]
