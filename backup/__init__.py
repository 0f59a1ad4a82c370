"""Backups: collections of a store's history, restored as of any instant."""

from backup.collection import BackupInfo, Collection, CollectionInfo
from backup.verify import VerifyReport

__all__ = ["BackupInfo", "Collection", "CollectionInfo", "VerifyReport"]
