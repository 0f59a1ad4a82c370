"""Loops that run once per entry: compiled, or where that was not built, plain.

Both have the same names, arguments and results; `tests/loops` holds them to it. `plain.py` says
what each does, and is what to read. `compiled.pyx` is the same in Cython: it spends 50 ns on a
row of a scan, and 20 on one that goes to Arrow, where `plain` spends 650 and more, beside RocksDB's
own 200. An installation that had no C compiler has everything but that speed; with
`KVSTORE_LOOPS=plain` in the environment any has.
"""

from kvstore.loops.chosen import (
    COMPILED,
    LiveColumns,
    LiveRows,
    Lookup,
    PointRead,
    Puts,
    Readers,
    arrange,
    collect,
    cut,
    find_among,
    find_many,
    gather,
    join,
    join_puts,
    lz4_size,
    put_all,
    survey,
    tuples,
)
from kvstore.loops.plain import (
    ABSENT,
    RULE_ANY,
    RULE_ID,
    RULE_NO_VALUE,
    RULE_SPAN,
    Buffers,
    Found,
    Live,
)

__all__ = [
    "ABSENT",
    "COMPILED",
    "RULE_ANY",
    "RULE_ID",
    "RULE_NO_VALUE",
    "RULE_SPAN",
    "Buffers",
    "Found",
    "Live",
    "LiveColumns",
    "LiveRows",
    "Lookup",
    "PointRead",
    "Puts",
    "Readers",
    "arrange",
    "collect",
    "cut",
    "find_among",
    "find_many",
    "gather",
    "join",
    "join_puts",
    "lz4_size",
    "put_all",
    "survey",
    "tuples",
]
