"""Tables: typed rows over the keys and values of a store."""

from kvstore.codec.tuples import desc
from kvstore.tables.catalogue import unique
from kvstore.tables.row_changes import TableFeed, TableFeedBatch, UnreadableRow
from kvstore.tables.row_codec import TableCodec
from kvstore.tables.table import FoundRows, Table

__all__ = [
    "FoundRows",
    "Table",
    "TableCodec",
    "TableFeed",
    "TableFeedBatch",
    "UnreadableRow",
    "desc",
    "unique",
]
