"""Bulk loads: built anywhere as SST files, visible as a whole at the time they are added."""

from bulk.ingest import ingest
from bulk.manifest import Manifest
from bulk.part import Part, PartWriter
from bulk.pushes import Puller, Push, Pushes, PushStatus, StoreStatus, pull, shard_of
from bulk.seed import seed
from bulk.staged import Import
from bulk.stages import StageTimes
from bulk.staging import read_manifest
from bulk.stagings import ExpiredStaging, expire_stagings

__kvstore__ = True
"""Tells this package from others of its name: see `kvstore.neighbours`."""

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
