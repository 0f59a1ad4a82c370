"""Tables: typed rows over the keys and values of a store.

Floors, from the top:

    opening
    table                   the face
    building feeding sent tidying
                            indexes of tables that have rows; feeds of rows; rows and definitions of
                            clients; stale entries
    collected               the rows of a collection, with their history
    finding writing joining changing
                            rows by an index; changes of rows; times of labels
    side sources            keyed answers to labels; a store, a snapshot, a transaction or a batch
    answers                 the rows that labels ask for
    catalogue classes conform found
                            the definitions of a store; rows as they arrive, and as reads find them
    evolve                  how tables begin and change
    codec                   rows as keys and values, and back
    keys
    rows exact              the values of rows; what a column may hold
    definition
    kinds space             types of columns; where tables lie among the keys
    cells
"""

from kvstore.codec.tuples import desc
from kvstore.tables.catalogue import unique
from kvstore.tables.changes import TableFeed, TableFeedBatch
from kvstore.tables.codec import TableCodec
from kvstore.tables.table import FoundRows, Table

__all__ = [
    "FoundRows",
    "Table",
    "TableCodec",
    "TableFeed",
    "TableFeedBatch",
    "desc",
    "unique",
]
