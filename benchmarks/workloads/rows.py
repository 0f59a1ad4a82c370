"""Workloads of typed rows."""

from __future__ import annotations

from benchmarks.workloads.plan import ROWS, Call, Contender, Size, Workload


def rows_loaded(size: Size) -> list[Workload]:
    """Loads of all rows."""
    loads = Contender(ROWS["table"], Call("rows_load"))
    gated = Contender(ROWS["table"], Call("rows_load_gated"))
    return [
        Workload(
            *("rows-load-gated", loads, gated),
            items=size.rows,
            reach=0.87,
            warm=True,
            group="rows-load",
        ),
        *(
            _row(f"rows-load{label}", base, Call("rows_load"), items=size.rows, reach=reach)
            for label, base, reach in (("", "bytes", 0.33), ("-sqlite", "sqlite", None))
        ),
    ]


def rows_read(size: Size) -> list[Workload]:
    """Point gets, scans and look-ups by an index."""
    get = Call("rows_get", {"count": size.lookups // 4})
    find = Call("rows_find", {"count": max(size.lookups // 400, 10)})
    return [
        _row("rows-get", "bytes", get, items=size.lookups // 4, reach=0.5),
        _row("rows-get-sqlite", "sqlite", get, items=size.lookups // 4, reach=1.0),
        _row("rows-scan", "bytes", Call("rows_scan"), items=size.rows, reach=0.5),
        _row("rows-scan-duckdb", "duckdb", Call("rows_scan"), items=size.rows, reach=1.0),
        _row("rows-scan-sqlite", "sqlite", Call("rows_scan"), items=size.rows, reach=1.0),
        _row("rows-find-sqlite", "sqlite", find, reach=1.0),
    ]


def _row(
    name: str, base: str, call: Call, *, reach: float | None, items: int | None = None
) -> Workload:
    baseline, ours = Contender(ROWS[base], call), Contender(ROWS["table"], call)
    group = "-".join(name.split("-")[:2])
    return Workload(name, baseline, ours, items=items, reach=reach, warm=True, group=group)
