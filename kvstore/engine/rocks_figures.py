"""The figures that RocksDB tells of its files, memory and work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import rocksdict as rocks

from kvstore.engine.rocks_merges import count_files

_OF_A_FAMILY = {
    "bytes": "rocksdb.live-sst-files-size",
    "memtable_bytes": "rocksdb.cur-size-all-mem-tables",
    "entries": "rocksdb.estimate-num-keys",
}

_WHOLE: Mapping[str, tuple[str, Callable[[Iterable[int]], int]]] = {
    "cache_bytes": ("rocksdb.block-cache-usage", max),  # the families share one cache
    "pending_compaction_bytes": ("rocksdb.estimate-pending-compaction-bytes", sum),
    "compactions_running": ("rocksdb.num-running-compactions", max),  # counted by database
    "flushes_running": ("rocksdb.num-running-flushes", max),
    "writes_stopped": ("rocksdb.is-write-stopped", max),
}
"""The figures of the whole engine: the property, and how the values of the families become one."""

_STOPS = re.compile(r"\btotal-stops: (\d+)")


def figures(families: Mapping[str, rocks.Rdict]) -> dict[str, int]:
    """See `Engine.stats`."""
    found = {}
    for name, family in families.items():
        for figure, prop in _OF_A_FAMILY.items():
            found[f"{name}_{figure}"] = _value(family, prop)
        found[f"{name}_files"] = count_files(family)
    for figure, (prop, merge) in _WHOLE.items():
        found[figure] = merge(_value(family, prop) for family in families.values())
    found["write_stops"] = sum(map(_write_stops, families.values()))
    return found


def active_bytes(family: rocks.Rdict) -> int:
    """The bytes of the writes that no file has, and that no flush has begun to write."""
    return _value(family, "rocksdb.cur-size-active-mem-table")


def _write_stops(family: rocks.Rdict) -> int:
    """How often RocksDB has stopped the writes of a family since the database was opened."""
    told = _STOPS.search(family.property_value("rocksdb.cf-write-stall-stats") or "")
    return int(told[1]) if told else 0


def _value(family: rocks.Rdict, prop: str) -> int:
    return family.property_int_value(prop) or 0
