"""Bulk loads under a name that no other distribution has: `from kvstore import bulk`.

The same objects as `import bulk`. Raises `ForeignPackageError` where another `bulk` hides ours.
"""

from kvstore.neighbours import require_own

require_own("bulk")

from bulk import (  # noqa: E402
    ExpiredStaging,
    Import,
    Manifest,
    Part,
    PartWriter,
    Puller,
    Push,
    Pushes,
    PushStatus,
    StageTimes,
    StoreStatus,
    expire_stagings,
    ingest,
    pull,
    read_manifest,
    seed,
    shard_of,
)

__all__ = [
    "ExpiredStaging",
    "Import",
    "Manifest",
    "Part",
    "PartWriter",
    "Push",
    "PushStatus",
    "Puller",
    "Pushes",
    "StageTimes",
    "StoreStatus",
    "expire_stagings",
    "ingest",
    "pull",
    "read_manifest",
    "seed",
    "shard_of",
]
