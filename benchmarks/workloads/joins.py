"""Workloads of point-in-time joins."""

from __future__ import annotations

from benchmarks.workloads.plan import JOINS, SPARK_JOINS, Call, Contender, Size, Workload

REACHES = {
    "store": (50.0, 6.0, 1.0, 0.6),
    "collection": (10.0, 4.0, 1.0, 1.0),
    "polars": (50.0, 6.0, 1.0, 0.6),
    "pandas": (50.0, 6.0, 1.0, 0.6),
}
SHARES = (0.001, 0.01, 0.1, 1.0)
PEERS = {"store": "duckdb", "collection": "duckdb", "polars": "polars", "pandas": "pandas"}
ROWS_MAX = 10_000_000
"""A history of more rows, and as many labels, would not fit into the memory of its peers."""

SPARK_REACHES = (10.0, 5.0, 2.0, 1.0)
SPARK_WAYS = (
    ("checkpoint", "checkpoint", "asof"),
    ("collection", "collection", "asof"),
    ("window", "checkpoint", "window"),
)
"""The names of rows, our ways, and Spark's ways that they are compared with."""


def joins(size: Size) -> list[Workload]:
    """The store and a collection against DuckDB, and the store against Polars and pandas."""
    found = []
    for place, share in enumerate(SHARES):
        for name, reaches in REACHES.items():
            ours = JOINS["collection" if name == "collection" else "store"]
            call = Call("join", {"share": share})
            found.append(
                Workload(
                    f"join-{name}-{share * 100:g}",
                    Contender(JOINS[PEERS[name]], call),
                    Contender(ours, call),
                    reach=reaches[place],
                    grows=size.rows <= ROWS_MAX,
                    warm=True,
                    group=f"join-{share * 100:g}",
                )
            )
    return found


def spark_joins() -> list[Workload]:
    """The join from a checkpoint and from a collection against Spark's own joins."""

    def by(way: str, share: float) -> Contender:
        return Contender(SPARK_JOINS, Call("join_by", {"way": way, "share": share}), way)

    return [
        Workload(
            f"spark-join-{name}-{share * 100:g}",
            by(theirs, share),
            by(ours, share),
            reach=reach,
            warm=True,
            group=f"spark-join-{share * 100:g}",
        )
        for share, reach in zip(SHARES, SPARK_REACHES, strict=True)
        for name, ours, theirs in SPARK_WAYS
    ]
