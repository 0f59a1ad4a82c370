"""`on_conflict="error"` refuses an import that has a row, a put or a delete, for a live key.

The keys are looked up before the files enter the store, without the commit lock: one look-up a row.
Later commits are checked under the lock, just before the import is added (`kvstore.arrivals`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from kvstore.codec.keys import TAIL_BYTES
from kvstore.codec.ordered import unframe
from kvstore.engine.loose import LooseFiles
from kvstore.errors import KEYS_NAMED_MAX, KeyConflictError
from kvstore.store import Store


def require_no_live_keys(store: Store, files: Sequence[Path]) -> None:
    """Raise `KeyConflictError` if a key of the staged files is alive."""
    with LooseFiles(files) as loose:
        _require_dead(
            store,
            (unframe(entry[:-TAIL_BYTES]) for entries, _ in loose.rows() for entry in entries),
        )


def _require_dead(store: Store, keys: Iterable[bytes]) -> None:
    alive = list(islice((key for key in keys if store.get(key) is not None), KEYS_NAMED_MAX))
    if alive:
        raise KeyConflictError(alive)
