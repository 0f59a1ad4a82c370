"""Loops that run once per entry, in two halves with the same names, arguments and results.

    plain/     the loops in Python: read these
    compiled/  the same loops in Cython

    blocks     blocks of sorted files and packed columns: their keys and sizes
    columns    Arrow columns and change entries: join, cut, check, order
    elements   columns as keys that sort as their rows do
    floors     the greatest live key at or below a place
    live       the entries of a pass over `data` that a read sees
    lookup     the value of one key, or of many; the newest values, kept
    matches    the rows of columns that answer labels
    records    where records of CSV end
    rows       columns as the values of a table's rows
    single     keys of single rows, and rows as dicts
    timed      the value of many keys, each at a time of its own
    writes     puts that a commit collects, and their entries in key order; rows that go to a file

The compiled loops spend 50 ns on a row of a scan, and 20 ns on a row that goes to Arrow; the plain
loops spend 650 ns and more. RocksDB itself spends 200 ns. An installation without a C compiler runs
the plain loops, and so does every installation with `KVSTORE_LOOPS=plain` in its environment.
`tests/loops` runs every test on both halves.

Floors, from the top:

    chosen
    plain compiled    the two halves
    contract          shapes and constants of both halves
"""

from kvstore.loops.chosen import (
    COMPILED,
    Entries,
    KeyMaker,
    Live,
    LiveColumns,
    LiveRows,
    Lookup,
    NewestValues,
    PointRead,
    Puts,
    Readers,
    RowDicts,
    are_keys,
    arrange,
    block_handles,
    block_keys,
    collect,
    cut,
    decode_keys,
    decode_rows,
    encode_keys,
    encode_rows,
    find_among,
    find_floors,
    find_many,
    find_ordered,
    find_timed,
    gather,
    join,
    join_writes,
    lz4_size,
    match,
    put_all,
    referring_keys,
    row_keys,
    scan_records,
    set_rows,
    survey,
    tuples,
)
from kvstore.loops.contract import (
    ABSENT,
    BLOCK_KEYS_BYTES_MAX,
    ENTRY_HEAD,
    RULE_ANY,
    RULE_ID,
    RULE_NO_VALUE,
    RULE_SPAN,
    Buffers,
    Found,
)

__all__ = [
    "ABSENT",
    "BLOCK_KEYS_BYTES_MAX",
    "COMPILED",
    "ENTRY_HEAD",
    "RULE_ANY",
    "RULE_ID",
    "RULE_NO_VALUE",
    "RULE_SPAN",
    "Buffers",
    "Entries",
    "Found",
    "KeyMaker",
    "Live",
    "LiveColumns",
    "LiveRows",
    "Lookup",
    "NewestValues",
    "PointRead",
    "Puts",
    "Readers",
    "RowDicts",
    "are_keys",
    "arrange",
    "block_handles",
    "block_keys",
    "collect",
    "cut",
    "decode_keys",
    "decode_rows",
    "encode_keys",
    "encode_rows",
    "find_among",
    "find_floors",
    "find_many",
    "find_ordered",
    "find_timed",
    "gather",
    "join",
    "join_writes",
    "lz4_size",
    "match",
    "put_all",
    "referring_keys",
    "row_keys",
    "scan_records",
    "set_rows",
    "survey",
    "tuples",
]
