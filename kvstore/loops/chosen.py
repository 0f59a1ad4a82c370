"""Chooses between the two halves when `kvstore.loops` is imported.

Invariants
1. All modules are of one half.
2. The compiled half is taken unless `KVSTORE_LOOPS=plain` is in the environment, a module of it is
   missing, or a module of it was compiled from sources of another revision.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvstore.loops.plain import (
    blocks,
    columns,
    elements,
    floors,
    live,
    lookup,
    matches,
    records,
    rows,
    single,
    timed,
    writes,
)

REVISION: Final = 30
"""Add one with each change of a name, an argument or a meaning in the loops. `compiled/shared.pxi`
holds the same number. A checkout that was updated and not compiled again then runs plain loops."""

VARIABLE: Final = "KVSTORE_LOOPS"
TWINS: Final = (
    "blocks",
    "columns",
    "elements",
    "floors",
    "live",
    "lookup",
    "matches",
    "records",
    "rows",
    "single",
    "timed",
    "writes",
)

COMPILED = False

if not TYPE_CHECKING and os.environ.get(VARIABLE) != "plain":
    try:
        _compiled = [import_module(f"kvstore.loops.compiled.{name}") for name in TWINS]
    except ImportError:
        pass
    else:
        if all(module.REVISION == REVISION for module in _compiled):
            (
                blocks,
                columns,
                elements,
                floors,
                live,
                lookup,
                matches,
                records,
                rows,
                single,
                timed,
                writes,
            ) = _compiled
            COMPILED = True

block_handles = blocks.block_handles
block_keys = blocks.block_keys
lz4_size = blocks.lz4_size
referring_keys = blocks.referring_keys

arrange = columns.arrange
cut = columns.cut
gather = columns.gather
join = columns.join
join_writes = columns.join_writes
survey = columns.survey
tuples = columns.tuples

decode_keys = elements.decode_keys
encode_keys = elements.encode_keys

find_floors = floors.find_floors

Entries = live.Entries
Live = live.Live
LiveColumns = live.LiveColumns
LiveRows = live.LiveRows
collect = live.collect

Lookup = lookup.Lookup
NewestValues = lookup.NewestValues
PointRead = lookup.PointRead
Readers = lookup.Readers
are_keys = lookup.are_keys
find_among = lookup.find_among
find_many = lookup.find_many

match = matches.match

scan_records = records.scan_records

decode_rows = rows.decode_rows
encode_rows = rows.encode_rows

KeyMaker = single.KeyMaker
RowDicts = single.RowDicts
row_keys = single.row_keys

find_ordered = timed.find_ordered
find_timed = timed.find_timed

Puts = writes.Puts
put_all = writes.put_all
set_rows = writes.set_rows
