"""Backups: collections of a store's history, restored as of any instant, and replicas.

Example:

    collection = backup.Collection("backups")
    stamp = store.put(b"k", b"old")
    collection.backup(store)
    store.put(b"k", b"new")
    assert collection.backup(store).rows == 1  # an increment costs what changed
    collection.restore("restored.db", as_of=stamp)
    with kvstore.open("restored.db") as restored:
        assert restored.get(b"k") == b"old"
"""

from kvstore.backup.collection import Collection
from kvstore.backup.drill import DrillReport
from kvstore.backup.following import Follower, FollowStatus
from kvstore.backup.overview import CollectionInfo
from kvstore.backup.replica import Stop, replicate
from kvstore.backup.verify import VerifyReport
from kvstore.backup.window import BackupInfo

__all__ = [
    "BackupInfo",
    "Collection",
    "CollectionInfo",
    "DrillReport",
    "FollowStatus",
    "Follower",
    "Stop",
    "VerifyReport",
    "replicate",
]
