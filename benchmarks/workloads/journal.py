"""Workloads of the journal and of tasks."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.plan import (
    JOURNAL,
    PLAIN,
    Call,
    Contender,
    Size,
    Workload,
)

_RECORDS = (("100b", 100, 4_000), ("10kb", 10_000, 300), ("1mb", 1_000_000, 4))
"""Name, payload bytes, records: small commits, pages, blobs."""


def journal(size: Size) -> list[Workload]:
    def against_plain(name: str, operation: str, **arguments: Any) -> Workload:
        call = Call(operation, arguments)
        return Workload(
            f"journal-{name}",
            Contender(PLAIN, call),
            Contender(JOURNAL, call),
            reach=0.6,
            repeats=3,
        )

    claims = [
        Contender(JOURNAL, Call("claim", {"waiting": waiting}), f"{waiting:,} waiting")
        for waiting in (1_000, 10_000 if size.is_small else 100_000)
    ]
    return [
        *(
            against_plain(f"{operation}-{name}", operation, record_bytes=length, count=count)
            for name, length, count in _RECORDS
            for operation in ("append", "replay")
        ),
        against_plain("synced", "append", record_bytes=1_000, count=25, synced=True),
        Workload("tasks-claim", *claims, reach=0.8),
    ]
