"""Workloads of Spark jobs."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.plan import (
    SPARK,
    Call,
    Contender,
    Workload,
)


def spark() -> list[Workload]:
    def against(
        name: str, baseline: str, operation: str, reach: float | None, **more: Any
    ) -> Workload:
        return Workload(
            f"spark-{name}",
            Contender(SPARK, Call(baseline), baseline),
            Contender(SPARK, Call(operation), operation),
            reach=reach,
            warm=True,
            **{"group": f"spark-{name.partition('-')[0]}"} | more,
        )

    return [
        against("import", "sort", "bulk_import", 0.71),
        against("import-delta", "import_by_delta", "bulk_import", None),
        against("import-tiny", "import_hundred", "import_ten_thousand", 0.33, group="spark-tiny"),
        against("apply", "follow_parquet", "apply_changes", None, per="micro-batch"),
        against("read", "read_parquet", "read_collection", 0.8),
        against("read-increments", "read_parquet", "read_increments", None),
        against("read-source", "read_parquet", "read_source", None),
        against("read-checkpoint", "read_parquet", "read_checkpoint", 0.4),
        against("read-changes", "read_parquet", "read_changes", None),
        against("read-delta", "read_by_delta", "read_collection", None),
        against("backup", "backup_alone", "backup_by_tasks", 1.5),
        against("backup-delta", "copy_by_delta", "backup_by_tasks", None),
    ]
