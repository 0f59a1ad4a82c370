"""Workloads of a store that has worked for a while: disk, backups, deletes, growth."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.plan import (
    COMMITTED,
    COMMITTED_FEW,
    COPIED,
    FLUSHED,
    LARGE,
    LARGE_TENTH,
    OURS,
    PEERS,
    SERVED,
    SERVERS,
    SERVICE,
    TENTH,
    UNINDEXED,
    Call,
    Contender,
    Size,
    Workload,
    ours,
    raw,
)
from benchmarks.workloads.writing import imports, transactions, updates


def ending(size: Size) -> list[Workload]:
    """The workloads that run last: each deletes rows, or writes more than its baseline did."""
    hundred = {"rows": 100, "count": size.commits_100}
    many = {"rows": size.update_rows}
    twenty: dict[str, Any] = {"count": 20}
    tenth: dict[str, Any] = {"rows": size.rows // 10}
    ends: dict[str, Any] = {"baseline": raw("put_synced", **twenty), "grows": True}
    eight = {**hundred, "count": 160, "threads": 8}
    return [
        Workload("disk", raw("disk"), ours("disk"), Call("disk"), per="bytes"),
        Workload("disk-trimmed", raw("disk"), ours("disk_trimmed"), reach=0.87, per="bytes"),
        *transactions(),
        *updates(),
        Workload(
            "feed-latency",
            raw("deliver", count=200),
            ours("deliver", count=200),
            items=200,
        ),
        Workload(
            "commit-100-8", raw("commit", **hundred), ours("commit_threads", **eight), reach=4.0
        ),
        Workload("gc", raw("look_up_and_delete", **many), ours("gc", **many), repeats=3),
        *_backups(size),
        Workload("restore", raw("restore"), ours("restore"), items=size.rows),
        Workload(
            "restore-compacted",
            raw("restore"),
            ours("restore", is_compacted=True),
            items=size.rows,
            reach=0.6,
        ),
        *imports(size),
        Workload(
            "delete-range",
            ours=ours("delete_range", **tenth, **twenty),
            peers_call=Call("delete_range", tenth),
            reach=1.0,
            **ends,
        ),
        Workload(
            "delete-range-all",
            ours=ours("delete_range", rows=size.rows, **twenty),
            reach=0.67,
            **ends,
        ),
    ]


def beside() -> list[Workload]:
    """A service alone, against the same service with a script that backs it up."""

    def waits(operation: str, count: str, backups: bool, label: str) -> Contender:
        return Contender(SERVICE, Call(operation, {count: 500, "backups": backups}), label)

    return [
        Workload(
            name,
            waits(*how, False, "service alone"),
            waits(*how, True, "kvstore"),
            items=1,
            reach=0.67,
            has_cpu=False,
        )
        for name, how in (
            ("backup-beside", ("wait", "commits")),
            ("backup-beside-calls", ("ask", "calls")),
        )
    ]


def served() -> list[Workload]:
    """A client of the store's own server, against clients of other servers."""
    return [
        Workload(
            f"serve-{operation}-{name}",
            Contender(server, Call(f"{operation}s", {"count": count})),
            Contender(SERVED, Call(f"{operation}s", {"count": count})),
            items=count,
            repeats=3,
            group=f"serve-{operation}",
        )
        for operation, count in (("get", 500), ("put", 100))
        for name, server in SERVERS.items()
    ]


def _backups(size: Size) -> list[Workload]:
    """Increments: all of a turn, as a checkpoint's new files come in bursts, and a single one."""
    rows, count = size.update_rows, 6 if size.is_small else 20
    each = {"rows": rows, "count": count}
    single = {**each, "is_single": True}
    return [
        Workload(
            "backup",
            raw("backup", **each),
            ours("backup", **each),
            items=rows * count,
            reach=4.5,
            grows=True,
        ),
        Workload("backup-single", raw("backup", **single), ours("backup", **single), items=rows),
    ]


def flat(size: Size) -> list[Workload]:
    """The same work in a store of all rows, against one of a tenth; and the share of the log."""
    rows = size.update_rows

    def flat(name: str, operation: str, reach: float, **arguments: Any) -> Workload:
        repeats = arguments.pop("repeats", 1)
        sides = (Contender(where, Call(operation, arguments)) for where in (TENTH, OURS))
        return Workload(name, *sides, reach=reach, repeats=repeats)

    commits = Call("commit", {"rows": rows, "count": 4})
    increments = {"rows": rows, "count": 6 if size.is_small else 20}
    return [
        flat("changes-flat", "changes_arrow", 0.8, windows=size.windows, repeats=3),
        flat("gc-flat", "gc", 0.33, rows=size.rows // 100, repeats=3),
        flat("backup-flat", "backup", 0.8, rows=size.rows // 100, count=5, is_single=True),
        Workload(
            "backup-copied",
            Contender(COPIED, Call("backup", increments)),
            Contender(OURS, Call("backup", increments)),
            items=rows * increments["count"],
            reach=4.5,
        ),
        Workload(
            "commit-index",
            Contender(UNINDEXED, commits),
            Contender(OURS, commits),
            reach=0.88,
            repeats=3,
        ),
    ]


def large_loaded() -> list[Workload]:
    """A bulk load of all rows, against one of a tenth."""
    return [_large("load", Call("load"))]


def large(size: Size) -> list[Workload]:
    """The same work in a store that came as one bulk load, against a store of a tenth."""
    increments = Call("backup", {"rows": size.update_rows, "count": 5})
    return [
        _large("open", Call("reopen")),
        _large("get", Call("get_near", {"count": 100_000})),
        _large("scan", Call("scan_arrow")),
        _large("changes", Call("changes_arrow", {"windows": size.windows}), repeats=3),
        _large("backup", increments),
    ]


def _large(name: str, call: Call, repeats: int = 1) -> Workload:
    sides = Contender(LARGE_TENTH, call), Contender(LARGE, call)
    return Workload(f"large-{name}", *sides, reach=0.67, repeats=repeats)


def flushed(size: Size) -> list[Workload]:
    """The same work in a store of many checkpoints, against one of a tenth."""
    count = 300 if size.is_small else 1_000

    def flat(name: str, operation: str) -> Workload:
        few, many = (
            Contender(FLUSHED, Call(operation, {"checkpoints": n}), label=f"{n} checkpoints")
            for n in (count // 10, count)
        )
        return Workload(name, few, many, reach=0.67)

    return [flat("open-flat", "reopen"), flat("checkpoint-flat", "checkpoint")]


def committed(size: Size) -> list[Workload]:
    """The same work in a store of as many commits as rows, against one of a thousand commits."""
    few, many = 1_000, min(size.rows, 1_000_000)
    names = {
        "commits-open": "reopen",
        "commits-commit": "commit",
        "commits-get": "get_as_of",
        "commits-history": "history",
        "commits-backup": "backup",
        "commits-gc": "gc",
    }
    return [
        Workload(
            name,
            Contender(COMMITTED_FEW, Call(operation, {"commits": few})),
            Contender(COMMITTED, Call(operation, {"commits": many})),
            reach=0.83,
            grows=size.rows <= many,
            repeats=3,
        )
        for name, operation in names.items()
    ]


def collections(size: Size) -> list[Workload]:
    old, count = {"as_of": "loaded"}, 400
    delta = Contender(PEERS["deltalake"], Call("scan_arrow", old))
    found = [
        Workload("backup-full", raw("backup_full"), ours("backup_full"), items=size.rows),
        Workload("backup-scan", delta, ours("scan_collection", **old), items=size.rows, reach=1.0),
    ]
    for name in ("list", "verify", "restore"):
        few, many = (
            ours("increments", action=name, count=n)._replace(label=f"{n} increments")
            for n in (count // 4, count)
        )
        found.append(Workload(f"increments-{name}", few, many, reach=0.8))
    return found
