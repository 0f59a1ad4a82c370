"""Which of the two are taken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvstore.loops import plain

_loops = plain
if not TYPE_CHECKING and os.environ.get("KVSTORE_LOOPS") != "plain":
    try:
        from kvstore.loops import compiled
    except ImportError:
        pass
    else:
        if getattr(compiled, "REVISION", None) == plain.REVISION:
            _loops = compiled

COMPILED: Final = _loops.__name__.endswith("compiled")

LiveColumns = _loops.LiveColumns
LiveRows = _loops.LiveRows
Lookup = _loops.Lookup
PointRead = _loops.PointRead
Puts = _loops.Puts
Readers = _loops.Readers
arrange = _loops.arrange
collect = _loops.collect
cut = _loops.cut
find_among = _loops.find_among
find_many = _loops.find_many
gather = _loops.gather
join = _loops.join
join_puts = _loops.join_puts
lz4_size = _loops.lz4_size
put_all = _loops.put_all
survey = _loops.survey
tuples = _loops.tuples
