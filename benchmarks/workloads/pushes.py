"""Workloads of pushes: a store at work that takes them, and a peer that materialises rows."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.workloads.plan import FEAST, PULLED, Call, Contender, Scene, Size, Stage, Workload

FEAST_ROWS = 100_000
"""Rows that the peer materialises at most: a million take it minutes."""
PUTS = 1_000
"""Rows that a client puts, one after the other."""


def pushed(size: Size, prepare: Sequence[Call]) -> Scene:
    """Pushes into a store that `prepare` has filled, and rows from a file to a new store."""
    return Scene([Stage(prepare, pushes(size)), Stage((), materialised(size))], is_quick=False)


def pushes(size: Size) -> list[Workload]:
    """Pushes into a store at work."""

    def by(label: str, operation: str, **arguments: bool | int) -> Contender:
        return Contender(PULLED, Call(operation, dict(arguments)), label)

    return [
        Workload(
            "push-gets",
            by("no push", "wait_gets", count=500, pushes=False),
            by("kvstore", "wait_gets", count=500, pushes=True),
            items=1,
            reach=0.5,
            has_cpu=False,
        ),
        *(
            Workload(
                name,
                by("10 ms", operation, promised=True),
                by("kvstore", operation, promised=False),
                items=1,
                reach=1.0,
                has_cpu=False,
            )
            for name, operation in (("push-add", "add_push"), ("push-revert", "revert_push"))
        ),
    ]


def materialised(size: Size) -> list[Workload]:
    """The way of rows from a file to a store that serves them."""
    rows = min(size.rows, FEAST_ROWS)
    call = Call("materialise", {"rows": rows}, rows)
    puts = Call("put_over_server", {"count": PUTS}, PUTS)
    by_push = Contender(PULLED, call)
    return [
        Workload("push-puts", Contender(PULLED, puts, "puts"), by_push, reach=20.0, has_cpu=False),
        Workload("push-feast", Contender(FEAST, call), by_push, reach=20.0),
    ]
