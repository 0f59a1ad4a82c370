"""Workloads of the suite YCSB."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.plan import YCSB, Call, Contender, Size, Stage, Workload

_REACHED = {
    "a": (1.0, None),
    "b": (1.0, 1.0),
    "c": (3.0, 1.5),
    "d": (1.0, 1.0),
    "e": (None, 1.0),
    "f": (1.0, None),
}
"""The ratios to reach beside raw rocksdict, and beside lmdb."""


def ycsb(size: Size) -> list[Stage]:
    """Each workload beside raw rocksdict and beside each peer, behind the same settled files."""
    found = []
    for mix, (raw, lmdb) in _REACHED.items():
        count = size.lookups // (20 if mix == "e" else 1)
        call = Call("ycsb", {"mix": mix, "count": count})
        rows = []
        for base, reach in (("raw", raw), ("lmdb", lmdb), ("sqlite3", None)):
            sides = Contender(YCSB[base], call, base), Contender(YCSB["store"], call, "kvstore")
            name = f"ycsb-{mix}" if base == "raw" else f"ycsb-{mix}-{base}"
            more: Any = {"reach": reach, "warm": True, "group": f"ycsb-{mix}"}
            rows.append(Workload(name, *sides, items=count, **more))
        found.append(Stage((Call("ycsb_settle"),) if found else (Call("ycsb_fill"),), rows))
    return found
