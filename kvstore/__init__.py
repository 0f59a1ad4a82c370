"""An embedded, RocksDB-backed, multi-version key-value store.

Example:

    store = kvstore.open("flights.db")
    stamp = store.put(b"AA1", b"on time")
    store.put(b"AA1", b"late")
    assert store.get(b"AA1", as_of=stamp) == b"on time"
    store.close()
"""

from typing import TYPE_CHECKING

from kvstore.late import __dir__ as __dir__
from kvstore.late import __getattr__ as __getattr__
from kvstore.version import __version__

if TYPE_CHECKING:
    from kvstore import codec, errors
    from kvstore.base.clock import Clock, ManualClock
    from kvstore.base.span import Span
    from kvstore.base.timestamp import Timestamp
    from kvstore.batch import Batch
    from kvstore.changes import Change
    from kvstore.changes.epochs import Changeset, ChangesetId, Epoch
    from kvstore.changes.events import Event, Operation
    from kvstore.changes.streams import Generation
    from kvstore.engine.rocks import Options
    from kvstore.feeds import Feed, FeedBatch, Position, Share
    from kvstore.mapping import MappingCodec, StoreMapping
    from kvstore.mvcc import Version
    from kvstore.opening import open_read_only
    from kvstore.remote.client import AsyncClient as AsyncClient
    from kvstore.remote.client import Client as Client
    from kvstore.remote.client import connect as connect
    from kvstore.remote.client import connect_async as connect_async
    from kvstore.remote.control import open  # noqa: A004  # kvstore.open is the public name
    from kvstore.remote.live import LiveReader, follow
    from kvstore.remote.shared import SharedStore
    from kvstore.retention.gc import GcPolicy, GcReport
    from kvstore.snapshot import Snapshot
    from kvstore.store import Store
    from kvstore.tables import Table, desc, unique
    from kvstore.tables.joins import Join, join
    from kvstore.timeline.durability import Durability
    from kvstore.timeline.holds import Hold, HoldRecord
    from kvstore.timeline.import_records import ImportRecord
    from kvstore.transaction import Transaction

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
    "SharedStore",
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
