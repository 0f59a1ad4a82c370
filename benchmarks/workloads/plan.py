"""The parts of a plan: calls of subjects, workloads that compare two, stages and scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

RAW = "benchmarks.raw:Raw"
OURS = "benchmarks.ours:Ours"
UNINDEXED = "benchmarks.states:Unindexed"
SIDES = "benchmarks.states:Sides"
EXPIRING = "benchmarks.expiring:Expiring"
IMPORTED = "benchmarks.states:Imported"
TENTH = "benchmarks.states:Tenth"
LARGE = "benchmarks.large:Large"
LARGE_TENTH = "benchmarks.large:LargeTenth"
COPIED = "benchmarks.states:Copied"
FLUSHED = "benchmarks.states:Flushed"
COMMITTED = "benchmarks.committed:Committed"
COMMITTED_FEW = "benchmarks.committed:CommittedFew"
JOURNAL = "benchmarks.journal:JournalLog"
PLAIN = "benchmarks.journal:PlainLog"
SPARK = "benchmarks.spark:Jobs"
SPARK_JOINS = "benchmarks.spark_joins:SparkJoins"
FOLLOWED = "benchmarks.followed:Followed"
SHARED = "benchmarks.shared:Shared"
SERVICE = "benchmarks.scripts:Service"
PULLED = "benchmarks.pushes:Pulled"
FEAST = "benchmarks.pushes:Feast"
SERVED = "benchmarks.server:Served"
SERVERS = {
    "redis": "benchmarks.server:ServedRedis",
    "sqlite3": "benchmarks.server:ServedSqlite",
}
"""Servers that the store's own is compared with."""
JOINS = {
    "store": "benchmarks.joins:JoinStore",
    "collection": "benchmarks.joins:JoinCollection",
    "duckdb": "benchmarks.joins:JoinDuckdb",
    "polars": "benchmarks.joins:JoinPolars",
    "pandas": "benchmarks.joins:JoinPandas",
}
YCSB = {
    "store": "benchmarks.ycsb:OursYcsb",
    "raw": "benchmarks.ycsb:RawYcsb",
    "lmdb": "benchmarks.ycsb:LmdbYcsb",
    "sqlite3": "benchmarks.ycsb:SqliteYcsb",
}
ROWS = {
    "table": "benchmarks.rows:TableRows",
    "bytes": "benchmarks.rows:ByteRows",
    "sqlite": "benchmarks.rows:SqliteRows",
    "duckdb": "benchmarks.rows:DuckdbRows",
}
PEERS = {
    "lmdb": "benchmarks.peers.lmdb:Lmdb",
    "plyvel": "benchmarks.peers.plyvel:Plyvel",
    "sqlite3": "benchmarks.peers.sqlite:Sqlite",
    "duckdb": "benchmarks.peers.duckdb:Duckdb",
    "deltalake": "benchmarks.peers.deltalake:Deltalake",
    "pylance": "benchmarks.peers.pylance:Pylance",
    "pyiceberg": "benchmarks.peers.pyiceberg:Pyiceberg",
    "arcticdb": "benchmarks.peers.arcticdb:Arcticdb",
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything one run does."""

    rows: int
    rounds: int
    lookups: int
    commits_100: int
    commits_10k: int
    update_rows: int
    windows: int

    @classmethod
    def of(cls, rows: int, *, rounds: int) -> Size:
        """Fit a run to `rows`."""
        return cls(
            rows=rows,
            rounds=rounds,
            lookups=min(rows // 5, 200_000),
            commits_100=max(20, min(40, rows // 25_000)),
            commits_10k=max(1, min(20 // rounds, rows // 150_000)),
            update_rows=min(10_000, rows // 10),
            windows=max(4, min(20, rows // 50_000)),
        )

    @property
    def is_small(self) -> bool:
        """Whether this is a quick run, in which work of a tenth of a second is repeated."""
        return self.rows <= 300_000


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of a subject, with its arguments; `items`, where it differs from others'."""

    operation: str
    arguments: dict[str, Any] = field(default_factory=dict)
    items: int | None = None


class Contender(NamedTuple):
    """A subject and its call; `label` tells two of one subject apart."""

    subject: str
    call: Call
    label: str = ""

    @property
    def name(self) -> str:
        """The name in the figures."""
        return self.label or self.subject.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the table. `items` is what each subject must report, None where that varies.

    `baseline` and `ours` are subjects beside the peers, which get `peers_call`. `reach` is the
    ratio that the project has set itself, `grows` whether the growth run has it. Of `repeats`
    runs in a turn the least time counts. `warm`: one round more comes first that does not count.
    `has_cpu`: the subject counts all processor time of its work. Neighbours with one `group` are
    measured together, and have the same `items`, `repeats` and `warm`.
    """

    name: str
    baseline: Contender
    ours: Contender
    peers_call: Call | None = None
    items: int | None = None
    reach: float | None = None
    per: str = "item"
    grows: bool = False
    repeats: int = 1
    warm: bool = False
    has_cpu: bool = True
    slow_arguments: dict[str, Any] = field(default_factory=dict)
    group: str = ""


class Stage(NamedTuple):
    """Workloads after the same preparation, which every subject of the scene makes."""

    prepare: Sequence[Call]
    workloads: Sequence[Workload]

    @property
    def groups(self) -> list[list[Workload]]:
        """The workloads, those together that share their rounds."""
        groups = groupby(self.workloads, key=lambda each: each.group or each.name)
        return [list(group) for _, group in groups]


class Scene(NamedTuple):
    """Stages, one after the other, on the same subjects: processes that live as long as it."""

    stages: Sequence[Stage]
    has_peers: bool = False
    is_quick: bool = True
    """Whether a quick run has it too."""


def raw(operation: str, **arguments: Any) -> Contender:
    return Contender(RAW, Call(operation, arguments))


def ours(operation: str, **arguments: Any) -> Contender:
    return Contender(OURS, Call(operation, arguments))
