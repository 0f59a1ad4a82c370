"""Workloads that write: loads, commits, transactions, imports."""

from __future__ import annotations

from benchmarks.workloads.plan import (
    EXPIRING,
    Call,
    Contender,
    Size,
    Workload,
    ours,
    raw,
)


def loading(size: Size) -> list[Workload]:
    load, by_two = Call("bulk_load"), ours("bulk_load_parts", workers=2)
    return [
        Workload("bulk-load", raw("bulk_load"), ours("bulk_load"), load, size.rows, 0.95),
        Workload(
            "bulk-load-2", raw("bulk_load"), by_two, items=size.rows, reach=1.2, has_cpu=False
        ),
    ]


def committing(size: Size) -> list[Workload]:
    hundred = {"rows": 100, "count": size.commits_100}
    many = {"rows": size.update_rows, "count": size.commits_10k}
    return [
        Workload(
            f"commit-{name}",
            raw("commit", **each),
            ours("commit", **each),
            Call("commit", each),
            reach=reach,
            slow_arguments={"count": slow},
        )
        for name, each, reach, slow in (("100", hundred, 0.95, 2), ("10k", many, 0.88, 1))
    ]


def transactions() -> list[Workload]:
    return [
        Workload(
            f"transact{'-synced' * synced}{'-8' * (threads == 8)}",
            raw("read_and_put", count=count, threads=threads, synced=synced),
            ours("transact", count=count, threads=threads, synced=synced),
            items=count,
        )
        for count, threads, synced in (
            (2_000, 1, False),
            (2_000, 8, False),
            (400, 1, True),
            (1_600, 8, True),
        )
    ]


def updates() -> list[Workload]:
    each = {"count": 10_000}
    return [
        Workload("put", raw("put_each", **each), ours("put_each", **each), items=10_000, reach=0.6),
        Workload(
            "update",
            ours("put_each", **each),
            ours("update_each", **each),
            items=10_000,
            reach=0.5,
        ),
    ]


def expiring(size: Size) -> list[Workload]:
    """Puts with an expiry, and calls beside keys that wait for their expiry."""

    def call(operation: str, side: str, count: int) -> Contender:
        arguments = {"side": side, "count": count}
        return Contender(EXPIRING, Call(operation, arguments), f"{operation} {side}")

    puts, gets = 10_000, size.lookups
    return [
        Workload(
            name, call(base, "none", count), call(ours_, "waiting", count), items=count, reach=reach
        )
        for name, base, ours_, count, reach in (
            ("put-expiring", "put_each", "put_expiring", puts, 0.5),
            ("put-waiting", "put_each", "put_each", puts, 0.95),
            ("get-waiting", "get", "get", gets, 0.6),
        )
    ]


def imports(size: Size) -> list[Workload]:
    return [
        Workload(
            "import-commit",
            raw("ingest_rows"),
            ours("ingest_rows"),
            items=1,
            reach=0.5,
            grows=True,
        ),
        *(
            Workload(
                f"import-{name}",
                raw("ingest", megabytes=megabytes),
                ours("ingest", megabytes=megabytes),
                items=1,
                reach=0.5,
            )
            for name, megabytes in (("1mb", 1), ("1gb", 1024))
            if megabytes == 1 or not size.is_small
        ),
    ]
