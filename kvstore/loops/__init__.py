"""Loops that run once per entry, in Cython. A C compiler makes extension modules of them.

    blocks     blocks of sorted files and packed columns: their keys and sizes
    columns    Arrow columns and change entries: join, cut, check, order
    elements   columns as keys that sort as their rows do
    files      sorted files read as columns
    live       the entries of a pass over `data` that a read sees
    lookup     the value of one key, or of many, at one time or each at its own; the newest values,
               kept; the greatest live key at or below a place
    matches    the rows of columns that answer labels
    nested     lists, structs and maps as values, and back
    packing    columns as the blocks of a sorted file
    records    where records of CSV end
    rows       columns as the values of a table's rows
    serials    the serial of a commit, and its epoch
    single     keys of single rows, and rows as dicts
    writes     puts that a commit collects, and their entries in key order

A loop spends 50 ns on a row of a scan, and 20 ns on a row that goes to Arrow; in Python it would
spend 650 ns and more. RocksDB itself spends 200 ns. Each `.pyx` has a `.pyi` beside it with the
types of its functions. `tests/loops` has the loops over blocks and over rows once more in Python:
the compiled ones must give the same answers to any bytes.
"""

from kvstore.loops import compiled as compiled
