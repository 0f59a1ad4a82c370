"""The scenes of a run, in the order in which they are measured."""

from __future__ import annotations

from benchmarks.workloads.joins import joins, spark_joins
from benchmarks.workloads.journal import journal
from benchmarks.workloads.plan import Call, Scene, Size, Stage, Workload
from benchmarks.workloads.pushes import pushed
from benchmarks.workloads.reading import (
    beside_ranges,
    changes,
    changes_loaded,
    followed,
    reading,
    shared,
)
from benchmarks.workloads.rows import rows_loaded, rows_read
from benchmarks.workloads.spark import spark
from benchmarks.workloads.table import line_of, lines
from benchmarks.workloads.upkeep import (
    beside,
    collections,
    committed,
    ending,
    flat,
    flushed,
    large,
    large_loaded,
    served,
)
from benchmarks.workloads.writing import committing, expiring, loading
from benchmarks.workloads.ycsb import ycsb


def scenes(size: Size) -> list[Scene]:
    """All scenes, in the order in which they are measured."""
    warm_up = Call("commit", {"rows": 100, "count": 1, "step": 9_000})
    change = Call("commit", {"rows": size.update_rows, "count": 1, "step": 10_000})
    windows = _windows(size)
    fill, settle, loaded = Call("fill"), Call("settle"), Call("mark", {"name": "loaded"})
    # Reads are measured with everything in the caches, as a service at work has it.
    warm_caches = (Call("scan"), Call("scan_arrow"))
    return [
        Scene(
            [
                Stage((), loading(size)),
                # The first commits of a process pay for its imports and its first memtable.
                Stage((fill, loaded, warm_up), committing(size)),
                Stage((change, settle, *warm_caches), reading(size)),
                Stage((*windows, settle, Call("scan")), changes(size)),
                Stage((), ending(size)),
            ],
            has_peers=True,
        ),
        Scene([Stage((fill, settle, Call("scan")), beside_ranges(size))]),
        Scene([Stage((fill, settle, Call("load_more"), Call("scan_arrow")), changes_loaded(size))]),
        Scene([Stage((fill, settle, Call("scan")), expiring(size))]),
        Scene(ycsb(size)),
        Scene([Stage((fill, settle, *windows), flat(size))]),
        Scene([Stage((), large_loaded()), Stage(windows, large(size))], is_quick=False),
        Scene([Stage((), flushed(size))]),
        Scene([Stage((), committed(size))], is_quick=False),
        Scene([Stage((fill, loaded, warm_up, change), collections(size))], is_quick=False),
        Scene([Stage((Call("histories"), Call("agree")), joins(size))], is_quick=False),
        Scene(
            [
                Stage((Call("written"),), rows_loaded(size)),
                Stage((Call("rows_load"),), rows_read(size)),
            ]
        ),
        Scene([Stage((fill,), beside())]),
        Scene([Stage((fill, settle, Call("scan")), followed(size))]),
        Scene([Stage((fill,), shared(size))]),
        pushed(size, (fill, settle)),
        Scene([Stage((Call("serve"),), served())], is_quick=False),
        Scene([Stage((), journal(size))]),
        Scene([Stage((), spark())], is_quick=False),
        Scene([Stage((Call("histories"), Call("agree")), spark_joins())], is_quick=False),
    ]


def _windows(size: Size) -> list[Call]:
    """Windows of updates, each behind a mark."""
    updates = {"rows": size.update_rows, "count": 1}
    return [
        call
        for number in range(size.windows)
        for call in (
            Call("mark", {"name": f"window-{number}"}),
            Call("commit", {**updates, "step": 10_001 + number}),
        )
    ]


def workloads(size: Size) -> list[Workload]:
    """All workloads, in the order of the table above."""
    named = [name.removesuffix("...") for name in lines()]
    found = [w for scene in scenes(size) for stage in scene.stages for w in stage.workloads]
    return sorted(found, key=lambda w: named.index(line_of(w.name).removesuffix("...")))
