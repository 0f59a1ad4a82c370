"""Workloads that read: keys, rows, changes."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.plan import (
    FOLLOWED,
    IMPORTED,
    SHARED,
    SIDES,
    Call,
    Contender,
    Size,
    Workload,
    ours,
    raw,
)


def reading(size: Size) -> list[Workload]:
    """Reads with everything in the caches."""
    return [*_lookups(size), *_scans(size), *_of_imported_rows(size)]


def followed(size: Size) -> list[Workload]:
    """Live readers, and the writer beside them."""

    def by(label: str, operation: str, **arguments: Any) -> Contender:
        return Contender(FOLLOWED, Call(operation, arguments), label)

    gets, puts = {"count": size.lookups}, {"count": 60_000}
    return [
        Workload(
            "get-live",
            by("writer", "get", **gets),
            by("kvstore", "get_live", **gets),
            items=size.lookups,
            reach=0.9,
        ),
        Workload(
            "puts-followed",
            by("nobody follows", "puts", **puts, followers=0),
            by("kvstore", "puts", **puts, followers=1),
            items=60_000,
            reach=0.95,
        ),
        Workload(
            "stale-live",
            by("50 ms each", "staleness", count=100, promised=True),
            by("kvstore", "staleness", count=100, promised=False),
            items=100,
            reach=1.0,
            has_cpu=False,
        ),
        *(
            Workload(
                f"beside-batch{name}",
                by("20 ms", "gets_beside", count=300_000, reader=reader, promised=True),
                by("kvstore", "gets_beside", count=300_000, reader=reader, promised=False),
                items=1,
                has_cpu=False,
            )
            for name, reader in (("", "here"), ("-live", "live"), ("-http", "http"))
        ),
        Workload(
            "open-live",
            by("open_read_only", "open_reader", count=5, live=False),
            by("kvstore", "open_reader", count=5, live=True),
            items=5,
        ),
    ]


def shared(size: Size) -> list[Workload]:
    """The owner of a shared store and its guests, each in a process of its own."""

    def row(name: str, operation: str, base: str, *ways: dict[str, Any], **how: Any) -> Workload:
        sides = zip((base, "kvstore"), ways, strict=True)
        contenders = [Contender(SHARED, Call(operation, way), label) for label, way in sides]
        return Workload(name, *contenders, **{"has_cpu": False, **how})

    def by(count: int) -> list[dict[str, Any]]:
        return [{"count": count, "by": role} for role in ("owner", "guest")]

    def beside(count: int) -> list[dict[str, Any]]:
        return [{"count": count, "guests": number} for number in (0, 4)]

    def late(way: str) -> list[dict[str, Any]]:
        return [{"way": way, "promised": is_promise} for is_promise in (True, False)]

    gets, puts, fast = 5 * size.lookups, 200, 100_000
    once = {"items": 1, "reach": 1.0}
    return [
        row("shared-get", "gets", "owner", *by(gets), items=gets, reach=0.9, repeats=3),
        row("shared-put", "puts", "owner", *by(puts), items=puts, reach=0.5),
        row(
            "shared-beside",
            *("puts_beside", "no guest"),
            *beside(fast),
            items=fast,
            reach=0.95,
            has_cpu=True,
        ),
        row("shared-closed", "take_over", "100 ms", *late("close"), **once),
        row("shared-killed", "take_over", "1 s", *late("kill"), **once),
    ]


def _lookups(size: Size) -> list[Workload]:
    get, gets, found = _of_gets(size)
    many = ours("get_many", **gets, as_of="loaded")
    return [
        *_at_two_times("get", get, "get", gets, reach=(0.95, 0.9), **found),
        Workload("get-many", get, many, reach=2.2, **found),
    ]


def _scans(size: Size) -> list[Workload]:
    scan, rows = raw("scan"), _of_scans(size)
    by_two: dict[str, Any] = {"ours": ours("scan_arrow", workers=2), "has_cpu": False}
    return [
        *_at_two_times("scan", scan, "scan", {}, reach=(0.7, 0.65), grows=True, **rows),
        *_at_two_times("scan-arrow", scan, "scan_arrow", {}, reach=(0.6, 0.55), grows=True, **rows),
        Workload("scan-arrow-2", scan, reach=1.0, grows=True, **by_two, **rows),
    ]


def _of_imported_rows(size: Size) -> list[Workload]:
    get, gets, found = _of_gets(size)
    scan, rows = raw("scan"), _of_scans(size)

    def imported(operation: str, **arguments: Any) -> Contender:
        return Contender(IMPORTED, Call(operation, arguments))

    return [
        Workload("get-imported", get, imported("get", **gets), reach=0.95, **found),
        Workload("scan-imported", scan, imported("scan"), reach=0.7, **rows),
        Workload("arrow-imported", scan, imported("scan_arrow"), reach=0.6, **rows),
    ]


def _of_gets(size: Size) -> tuple[Contender, dict[str, Any], dict[str, Any]]:
    """The baseline of look-ups, their arguments, and the fields of their workloads."""
    gets = {"count": size.lookups}
    # A look-up takes duckdb milliseconds: 30 of them took 15 s of a quick run of 240 s.
    slow = {"count": 10 if size.is_small else 30}
    found = {"items": size.lookups, "slow_arguments": slow, "repeats": 2 if size.is_small else 1}
    return raw("get", **gets), gets, found


def _of_scans(size: Size) -> dict[str, Any]:
    """The fields of workloads that read all rows."""
    return {"items": size.rows, "repeats": 2 if size.is_small else 1}


def _at_two_times(
    name: str,
    baseline: Contender,
    operation: str,
    arguments: dict[str, Any],
    *,
    reach: tuple[float, float],
    grows: bool = False,
    **fields: Any,
) -> list[Workload]:
    """A read of the newest values, and the same read at a time before all updates."""
    return [
        Workload(
            f"{name}{suffix}",
            baseline,
            ours(operation, **arguments, **at),
            Call(operation, {**arguments, **at}),
            reach=target,
            grows=grows and not at,
            **fields,
        )
        for suffix, at, target in (
            ("", {}, reach[0]),
            ("-as-of", {"as_of": "loaded"}, reach[1]),
        )
    ]


def beside_ranges(size: Size) -> list[Workload]:
    gets = {"count": size.lookups}
    calls = {
        "get": (Call("get", gets), size.lookups),
        "get-many": (Call("get_many", gets), size.lookups),
        "scan": (Call("scan"), size.rows),
        "arrow": (Call("scan_arrow"), size.rows),
    }

    def on(side: str, call: Call) -> Contender:
        return Contender(SIDES, Call(call.operation, {**call.arguments, "side": side}), side)

    def against(name: str, baseline: str, ours: str, reach: float) -> Workload:
        call, items = calls[name.rsplit("-", 2)[0]]
        sides = on(baseline, call), on(ours, call)
        return Workload(name, *sides, items=items, reach=reach, repeats=3)

    return [against(f"{name}-100-ranges", "none", "100", 0.85) for name in calls]


def changes_loaded(size: Size) -> list[Workload]:
    scan, ours = (
        Contender(IMPORTED, Call(operation), operation)
        for operation in ("scan_arrow", "changes_loaded")
    )
    return [Workload("changes-loaded", scan, ours, items=size.rows, repeats=3)]


def changes(size: Size) -> list[Workload]:
    """Windows that follow each other: one alone takes less than a process needs to wake up."""
    rows, windows = size.update_rows, size.windows
    last = {"since": f"window-{windows - 1}"}
    return [
        Workload(
            f"changes{name}",
            raw("scan_rows", count=rows, windows=windows),
            ours(f"changes{operation}", windows=windows),
            Call(f"changes{operation}", last, items=rows) if for_peers else None,
            items=rows * windows,
            reach=reach,
            grows=True,
            repeats=3,
        )
        for name, operation, for_peers, reach in (
            ("", "", True, 5.0),
            ("-arrow", "_arrow", True, 5.0),
            ("-by-key", "_by_key", False, 5.0),
            ("-events", "_events", False, None),
            ("-feed", "_feed", False, None),
        )
    ]
