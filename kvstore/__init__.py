"""An embedded, RocksDB-backed, multi-version key-value store.

Example:

    store = kvstore.open("flights.db")
    stamp = store.put(b"AA1", b"on time")
    store.put(b"AA1", b"late")
    assert store.get(b"AA1", as_of=stamp) == b"on time"
    store.close()
"""

from kvstore.late import TYPE_CHECKING
from kvstore.late import __dir__ as __dir__
from kvstore.late import __getattr__ as __getattr__
from kvstore.version import __version__

if TYPE_CHECKING:
    from kvstore import codec, errors
    from kvstore.batch import Batch
    from kvstore.changes import Change
    from kvstore.changes.changeset import Changeset, ChangesetId
    from kvstore.changes.epoch import Epoch
    from kvstore.changes.event import Event, Operation
    from kvstore.changes.generation import Generation
    from kvstore.claims import HoldRecord
    from kvstore.clock import Clock, ManualClock
    from kvstore.commit import Durability
    from kvstore.control import open  # noqa: A004  # kvstore.open is the public name
    from kvstore.engine.rocks_knobs import Options
    from kvstore.feeds import Feed, FeedBatch, Position, Share
    from kvstore.gc import GcPolicy, GcReport
    from kvstore.holds import Hold
    from kvstore.imports import ImportRecord
    from kvstore.joins import Join, join
    from kvstore.live import LiveReader, follow
    from kvstore.mapping import MappingCodec, StoreMapping
    from kvstore.mvcc import Version
    from kvstore.opening import open_read_only
    from kvstore.snapshot import Snapshot
    from kvstore.span import Span
    from kvstore.store import Store
    from kvstore.tables import Table, desc, unique
    from kvstore.timestamp import Timestamp
    from kvstore.txn import Transaction

__all__ = [
    "Batch",
    "Change",
    "Changeset",
    "ChangesetId",
    "Clock",
    "Durability",
    "Epoch",
    "Event",
    "Feed",
    "FeedBatch",
    "GcPolicy",
    "GcReport",
    "Generation",
    "Hold",
    "HoldRecord",
    "ImportRecord",
    "Join",
    "LiveReader",
    "ManualClock",
    "MappingCodec",
    "Operation",
    "Options",
    "Position",
    "Share",
    "Snapshot",
    "Span",
    "Store",
    "Table",
    "StoreMapping",
    "Timestamp",
    "Transaction",
    "Version",
    "__version__",
    "codec",
    "desc",
    "errors",
    "follow",
    "join",
    "open",
    "open_read_only",
    "unique",
]
