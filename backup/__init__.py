"""Backups: collections of a store's history, restored as of any instant."""

from backup.collection import BackupInfo, Collection, VerifyReport

__all__ = ["BackupInfo", "Collection", "VerifyReport"]
