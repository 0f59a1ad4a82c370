"""The steps after damage in a collection, which cannot be restored from a backup: it is one."""

from __future__ import annotations

from typing import Final

PUT_BACK: Final = (
    "put it back from a copy of the collection; `kvstore backup verify` names all damage, "
    "and `kvstore backup run --full`, or full=True, begins another chain"
)
PART: Final = (
    "instants that need no row of it can be restored; put it back from a copy of the collection, "
    "or begin another chain with `kvstore backup run --full` (full=True)"
)
