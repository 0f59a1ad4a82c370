"""A self-synchronising record log, for state that no other log protects."""

from kvstore.storage.journal.framing import Record
from kvstore.storage.journal.journal import Journal, SnapshotInfo, Sync
from kvstore.storage.journal.recovery import (
    Damage,
    Recovery,
    StateMachine,
    TornTail,
    read,
    replay,
)
from kvstore.storage.journal.repair import (
    CompactResult,
    Inspection,
    SalvageReport,
    compact,
    inspect,
    salvage,
)

__all__ = [
    "Journal",
    "Sync",
    "Record",
    "Recovery",
    "StateMachine",
    "read",
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
]
