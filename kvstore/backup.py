"""Backups under a name that no other distribution has: `from kvstore import backup`.

The same objects as `import backup`. Raises `ForeignPackageError` where another `backup` hides ours.
"""

from kvstore.neighbours import require_own

require_own("backup")

from backup import (  # noqa: E402
    BackupInfo,
    Collection,
    CollectionInfo,
    DrillReport,
    Follower,
    FollowStatus,
    Stop,
    VerifyReport,
    replicate,
)

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
