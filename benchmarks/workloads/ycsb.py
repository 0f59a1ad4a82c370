"""Workloads of the suite YCSB."""

from __future__ import annotations

from benchmarks.workloads.plan import YCSB, Call, Contender, Size, Workload

_REACHED = {
    "a": (1.0, None),
    "b": (1.0, 1.0),
    "c": (3.0, 1.5),
    "d": (1.0, 1.0),
    "e": (None, 1.0),
    "f": (1.0, None),
}
"""The ratios to reach beside raw rocksdict, and beside lmdb."""


def ycsb(size: Size) -> list[Workload]:
    """Each workload beside raw rocksdict and beside each peer."""
    found = []
    for mix, (raw, lmdb) in _REACHED.items():
        count = size.lookups // (20 if mix == "e" else 1)
        call = Call("ycsb", {"mix": mix, "count": count})
        for base, reach in (("raw", raw), ("lmdb", lmdb), ("plyvel", None), ("sqlite3", None)):
            sides = Contender(YCSB[base], call, base), Contender(YCSB["store"], call, "kvstore")
            name = f"ycsb-{mix}" if base == "raw" else f"ycsb-{mix}-{base}"
            found.append(Workload(name, *sides, items=count, reach=reach, warm=True))
    return found
