"""The metrics of a store, as of now, with their meaning."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from kvstore.limits import BROWSE_ROWS_MAX
from kvstore.metrics import Distribution, Metric
from kvstore.server.page.blocks import Cell, Grid, PageView, Text
from kvstore.server.page.call import PageRequest
from kvstore.server.page.notation import duration, moment, size
from kvstore.server.page.section import Section
from kvstore.timestamp import NS_PER_SECOND

_VALUES_MAX: Final = 20
"""The values of one metric that a page shows."""


def metrics(call: PageRequest) -> PageView:
    """Every metric of the process that shows this page."""
    found = call.store.metrics()
    rows = [row for metric in islice(found.values(), BROWSE_ROWS_MAX * 5) for row in _rows(metric)]
    columns = ("Metric", "Labels", "Value", "Meaning")
    grid = Grid("Metrics", columns, rows, numbers=frozenset({2}))
    told = Text(
        "Counters begin at 0 in each process that opens the store. Prometheus reads the "
        "same values at /metrics of a server."
    )
    return PageView("Metrics", [told, grid], is_timed=False)


def _rows(metric: Metric) -> Iterator[list[Cell]]:
    definition = metric.definition
    for labels, value in islice(metric.values.items(), _VALUES_MAX):
        pairs = zip(definition.labels, labels, strict=True)
        yield [
            Cell(metric.name, is_code=True),
            Cell(", ".join(f"{name}={text}" for name, text in pairs)),
            Cell(_shown(value, definition.name, definition.unit)),
            Cell(definition.help),
        ]


def _shown(value: float | Distribution, name: str, unit: str) -> str:
    if isinstance(value, Distribution):
        mean = value.total / value.count if value.count else 0.0
        return f"{value.count:,} times, {duration(mean * NS_PER_SECOND)} on average"
    if name.endswith("_timestamp_seconds"):
        return moment(int(value * NS_PER_SECOND))
    if unit == "seconds":
        return duration(value * NS_PER_SECOND)
    if unit == "bytes":
        return size(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"


METRICS: Final = Section("metrics", "Metrics", metrics)
