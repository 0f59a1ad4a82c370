"""A self-synchronising record log, for state that no other log protects.

Floors, from the top:

    salvage
    journal           the log of one writer
    compaction live reader
    inspection recovery
    scan snapshot
    names raw tail
    options records
    files stuffing sync
"""

from kvstore.journal.compaction import CompactResult, compact
from kvstore.journal.files import OS_FILES, Files
from kvstore.journal.inspection import Inspection, inspect
from kvstore.journal.journal import Journal
from kvstore.journal.reader import read, read_part
from kvstore.journal.records import Record
from kvstore.journal.recovery import Recovery, StateMachine, replay
from kvstore.journal.salvage import SalvageReport, salvage
from kvstore.journal.scan import Damage, TornTail
from kvstore.journal.snapshot import SnapshotInfo
from kvstore.journal.sync import Sync

__all__ = [
    "Journal",
    "Sync",
    "Record",
    "Recovery",
    "StateMachine",
    "read",
    "read_part",
    "replay",
    "compact",
    "CompactResult",
    "salvage",
    "SalvageReport",
    "inspect",
    "Inspection",
    "SnapshotInfo",
    "TornTail",
    "Damage",
    "Files",
    "OS_FILES",
]
