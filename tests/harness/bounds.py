"""Bounds: limits of `kvstore.limits` set for a while, so that small data crosses every border.

    with bounds(ARROW_ROWS_MAX=3, PART_BYTES_MAX=300):
        collection.backup(store)

A module of ours that says `from kvstore.limits import X` has `X` among its globals, and its
functions look it up at each call. So a limit is set by replacing that global in each such module,
at no cost to production. A value that a store or a journal takes from a limit at opening stays with
it: set the limits first.

Invariants
1. Limits are read when a function is called, never when it is defined: no default argument, class
   body or constant of a module is made of one. `tests/test_bounds.py` looks at every module.
2. Compiled loops compare with copies of their own. They have a function `take_bounds`, which is
   called after each change.
3. Each limit has its old value when the block ends, also in modules that were imported inside it.

Limits hold for all threads of this process, and for no other process.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Final

from kvstore import limits
from tests.harness.seeds import seed_of

PACKAGES: Final = ("kvstore", "bulk", "backup", "spark_connector", "pyspark_kvstore")

FIXED: Final[Mapping[str, str]] = {
    "SEALED_CHUNK_BYTES": "bytes of the format: a sealed blob does not say how long its chunks are",
}
"""Limits that cannot be set, each with its reason."""

TINY: Final[Mapping[str, int]] = {
    # a commit and its change entries
    "CHANGE_CHUNK_BYTES": 50,
    "COMMIT_PIECE_BYTES": 1,
    "COMMIT_PIECE_ROWS": 2,
    "INLINE_VALUE_BYTES": 2,
    "THIN_FROM_BYTES": 1,
    "COMPRESS_FROM_BYTES": 1,
    "INDEX_ENTRIES_PER_TAKE": 1,
    "WHOLE_ROWS_MIN": 1,
    "REBUILD_FRAGMENTS_FROM": 1,
    "STRETCHES_MAX": 2,
    "EPOCHS_PENDING_MAX": 2,
    "EPOCH_EVENTS_PENDING_MAX": 3,
    # reads
    "FOLLOW_TOLD_MAX": 1,
    "ARROW_ROWS_MAX": 3,
    "ARROW_BYTES_MAX": 100,
    "VERSIONS_PASSED_MAX": 1,
    "FEW_ROWS_MAX": 2,
    "STEPS_BEFORE_SEEK": 1,
    "DUE_ROWS_MAX": 2,
    "JOIN_PASS_LABELS_MIN": 1,
    "JOIN_PASS_BYTES_MAX": 50,
    "JOIN_ROWS_FIRST": 2,
    "JOIN_ROWS_MAX": 3,
    "JOIN_COLUMNS_ROWS_MAX": 2,
    "JOIN_LABEL_BYTES_MAX": 40,
    "JOIN_VALUE_BYTES_MAX": 4,
    "SCAN_CHUNK": 2,
    "SCAN_CHUNK_BYTES": 20,
    "SCAN_PIECE_BYTES": 1,
    "SCAN_AHEAD_BYTES_MAX": 10,
    "COLUMNS_ENTRIES_MIN": 1,
    "STEP_ENTRIES": 1,
    "COLUMNS_FLUSH_BYTES_MIN": 0,
    "HELD_FILES_MAX": 9,
    "LOOSE_FILES_MAX": 1,
    "IDLE_READERS_MAX": 1,
    "READERS_BEHIND_BYTES_MAX": 3,
    "SMALL_FILES_MAX": 2,
    "PACKED_STRETCH_BYTES": 100,
    "PACKING_THREADS_MAX": 2,
    "SORTED_CHANGES_MAX": 2,
    "SORTED_CHANGES_BYTES_MAX": 3,
    "BROWSE_ENTRIES_MAX": 2,
    "BROWSE_CHUNK": 1,
    "BROWSE_ROWS_CHUNK": 1,
    "BROWSE_BYTES_MAX": 3,
    "BROWSE_PARTS": 2,
    "BROWSE_HEADERS_MAX": 1,
    "FEED_BATCH_ROWS": 2,
    "FEED_BATCH_BYTES": 50,
    # journal, memory engine, tasks
    "JOURNAL_FILE_BYTES": 2000,
    "JOURNAL_FILE_RECORDS": 11,
    "JOURNAL_READ_BYTES": 16,
    "JOURNAL_COMPACT_BYTES": 1,
    "CHUNK_ENTRIES_MAX": 4,
    "MEMORY_BATCH_IN_PLACE_MAX": 1,
    "MEMORY_RECORD_BYTES": 50,
    "SNAPSHOT_TASKS_MAX": 2,
    "TASK_COMPACT_FACTOR": 1,
    "COMPACT_PIECES": 2,
    # imports
    "INGEST_FLUSH_BYTES": 1,
    "SETTLE_ROWS_MAX": 2,
    "SETTLE_STEP_ROWS": 1,
    "IMPORT_KEYS_BYTES_MAX": 3,
    "PAST_IMPORTS_MAX": 2,
    "SORT_BYTES_MAX": 200,
    "LOAD_SORT_BYTES_MAX": 200,
    "RUN_BYTES_MAX": 100,
    "RUN_BLOCK_BYTES": 50,
    # transactions and garbage
    "COMMIT_YIELDS_MAX": 0,
    "RECENT_KEYS_MAX": 2,
    "TXN_KEYS_MAX": 2,
    "TXN_SPANS_MAX": 2,
    "EXPIRY_STEP_KEYS": 1,
    "EXPIRY_READ_BYTES": 1,
    "GC_KEYS_PER_STEP": 2,
    "GC_SORTED_KEYS_MAX": 3,
    "GC_SORTED_KEYS_BYTES_MAX": 3,
    "GC_SPANS_PER_STEP": 1,
    "GC_SHORT_SPAN_ENTRIES": 1,
    "GC_LEAVES_PER_STEP": 1,
    # collections and replicas
    "FEW_CHANGES_BYTES": 0,
    "PART_BYTES_MAX": 300,
    "PART_WHOLE_BYTES_MAX": 0,
    "ROW_GROUP_ROWS_MAX": 3,
    "ROW_GROUP_BYTES_MAX": 100,
    "MERGE_ROWS_MAX": 8,
    "MERGE_BYTES_MAX": 400,
    "MERGE_SOURCE_ROWS_MIN": 1,
    "MERGE_SOURCE_BYTES_MIN": 1,
    "MERGE_FAN_IN": 2,
    "RESTORE_FILE_BYTES": 1,
    "RESTORE_PIECE_BYTES": 1000,
    "FETCH_CHUNK_BYTES": 100,
    "STATE_SCAN_VERSIONS": 2,
    "BOUND_BYTES_MAX": 1,
    "ROLLUP_EVERY": 2,
    "REPLICA_WINDOW_ROWS": 2,
    "REPLICA_WINDOW_BYTES": 50,
    "REPLICA_BATCH_ROWS": 1,
}
"""For each limit that cuts, gathers, spills or defers, a value that a handful of rows exceeds."""

SEED: Final = "KVSTORE_BOUNDS_SEED"
"""Name in the environment: the seed that `some_tiny` is to repeat."""


@contextmanager
def bounds(values: Mapping[str, float] | None = None, /, **named: float) -> Iterator[None]:
    """Set limits for the block. Raises `ValueError` for a name that is no limit, or a fixed one."""
    wanted = {**(values or {}), **named}
    for name in wanted:
        if name in FIXED:
            raise ValueError(f"{name} is fixed: {FIXED[name]}")
        if not name.isupper() or not hasattr(limits, name):
            raise ValueError(f"kvstore.limits has no {name}")
    before = {name: getattr(limits, name) for name in wanted}
    try:
        _replace(before, wanted)
        yield
    finally:
        _replace(wanted, before)


def some_tiny(seed: int | None = None) -> dict[str, int]:
    """Tiny limits drawn at random: none at all in half of the cases, else about half of them.

    Prints the seed, which `KVSTORE_BOUNDS_SEED` in the environment repeats.
    """
    pick = random.Random(seed_of(SEED, seed))
    drawn = {name: tiny for name, tiny in TINY.items() if pick.random() < 0.5}
    drawn = drawn if pick.random() < 0.5 else {}
    sys.stderr.write(f"{drawn or 'limits as they are'}\n")
    return drawn


def _replace(present: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    """Put the wanted limits where the present ones are. A global that has the name of a limit and
    is not the same object was not imported from `kvstore.limits`: it stays."""
    modules = _modules() if wanted else []
    for module in modules:
        names = vars(module)
        for name, value in wanted.items():
            if name in names and names[name] is present[name]:
                setattr(module, name, value)
    for module in modules:
        take_bounds = vars(module).get("take_bounds")
        if take_bounds is not None:
            take_bounds()


def _modules() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in PACKAGES]
