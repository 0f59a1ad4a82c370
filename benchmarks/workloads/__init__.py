"""The named workloads: `table` says what each of them measures."""

from benchmarks.workloads.plan import PEERS, Call, Contender, Size, Stage, Workload
from benchmarks.workloads.scenes import scenes, workloads
from benchmarks.workloads.table import section

__all__ = [
    "PEERS",
    "Call",
    "Contender",
    "Size",
    "Stage",
    "Workload",
    "scenes",
    "section",
    "workloads",
]
