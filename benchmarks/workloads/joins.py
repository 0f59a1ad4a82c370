"""Workloads of point-in-time joins."""

from __future__ import annotations

from benchmarks.workloads.plan import JOINS, Call, Contender, Size, Workload

REACHES = {
    "store": (50.0, 6.0, 1.0, 0.6),
    "collection": (10.0, 4.0, 1.0, 1.0),
    "polars": (50.0, 6.0, 1.0, 0.6),
    "pandas": (50.0, 6.0, 1.0, 0.6),
}
SHARES = (0.001, 0.01, 0.1, 1.0)
PEERS = {"store": "duckdb", "collection": "duckdb", "polars": "polars", "pandas": "pandas"}


def joins(size: Size) -> list[Workload]:
    """The store and a collection against DuckDB, and the store against Polars and pandas."""
    found = []
    for name, reaches in REACHES.items():
        ours = JOINS["collection" if name == "collection" else "store"]
        for share, reach in zip(SHARES, reaches, strict=True):
            call = Call("join", {"share": share})
            found.append(
                Workload(
                    f"join-{name}-{share * 100:g}",
                    Contender(JOINS[PEERS[name]], call),
                    Contender(ours, call),
                    reach=reach,
                    grows=name in ("store", "collection"),
                    warm=True,
                )
            )
    for peer in ("duckdb", "polars", "pandas"):
        call = Call("right")
        name = f"join-late-{peer}"
        found.append(Workload(name, Contender(JOINS[peer], call), Contender(JOINS["store"], call)))
    return found
