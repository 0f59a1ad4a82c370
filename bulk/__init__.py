"""Bulk loads: built anywhere as SST files, visible as a whole at the time they are added."""

from kvstore.bulk.building import Import
from kvstore.bulk.gate import Force, Gate
from kvstore.bulk.ingest import ingest
from kvstore.bulk.loading import import_table
from kvstore.bulk.manifest import Manifest
from kvstore.bulk.part import Part, PartWriter
from kvstore.bulk.progress import StageTimes
from kvstore.bulk.pushes import Puller, Push, Pushes, PushStatus, StoreStatus, pull, shard_of
from kvstore.bulk.seed import seed
from kvstore.bulk.staging import ExpiredStaging, expire_stagings, read_manifest

__all__ = [
    "ExpiredStaging",
    "Force",
    "Gate",
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
    "import_table",
    "ingest",
    "pull",
    "read_manifest",
    "seed",
    "shard_of",
]
