"""One line for each cost over the year, by month, and whether it stays level.

A week's figure is the median of its samples. A month's is the least of its weeks: the load of
neighbours on the machine only adds, and growth shows in the least as well. Times are taken twice,
by the wall and by the processor, and a line of times has grown if both have: neighbours that write
lengthen waits for the disk, neighbours that compute lengthen the time of the processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from benchmarks.year.plan import WEEKS_IN_A_MONTH

LEVEL: Final = 1.5
"""A line is level if no month is above the first one by more than this factor."""

PROCESSOR: Final = ", processor"
"""Ends the name of the processor time of a cost."""

Unit: TypeAlias = Literal["time", "bytes", "count"]

UNITS: Final[Mapping[str, Unit]] = {
    "opening": "time",
    "get": "time",
    "scan": "time",
    "scan of hot keys, limit 2": "time",
    "parallel scan": "time",
    "commit": "time",
    "transaction": "time",
    "delete_range": "time",
    "import": "time",
    "revert": "time",
    "gc": "time",
    "feed of a day": "time",
    "backup": "time",
    "expiry of backups": "time",
    "checkpoint": "time",
    "memory": "bytes",
    "files": "count",
    "disk": "bytes",
    "records in meta": "count",
    "import records": "count",
    "fragments": "count",
    "files of backups": "count",
    "disk of backups": "bytes",
}
"""All lines, in the order of the table and of the picture."""

_SMALL: Final[Mapping[Unit, float]] = {"time": 20e-6, "bytes": 4 << 20, "count": 50}
"""Up to 1.5 times this, an amount is level whatever it was in the first month: a call more of
RocksDB, one more buffer, the files that happen to wait for a compaction."""


class Line(NamedTuple):
    """A cost over the months."""

    name: str
    months: tuple[float, ...]
    processor: tuple[float, ...] = ()
    """Its processor time; empty for an amount."""

    @property
    def unit(self) -> Unit:
        return UNITS[self.name]

    @property
    def ratios(self) -> list[float]:
        """Each month over the first."""
        return _ratios(self.months)

    @property
    def processor_ratios(self) -> list[float]:
        """Each month's processor time over the first's."""
        return _ratios(self.processor)

    @property
    def is_level(self) -> bool:
        small = _SMALL[self.unit]
        series = filter(None, (self.months, self.processor))
        return any(max(months) <= LEVEL * max(months[0], small) for months in series)


def _ratios(months: Sequence[float]) -> list[float]:
    return [month / months[0] if months[0] else 1.0 for month in months]


def lines(weeks: Sequence[Mapping[str, float]]) -> list[Line]:
    """The lines of a year, from the costs of its weeks. A cost that no week has is left out."""
    found = {name: tuple(_months(weeks, name)) for name in UNITS}
    return [
        Line(name, months, tuple(_months(weeks, name + PROCESSOR)))
        for name, months in found.items()
        if months
    ]


def _months(weeks: Sequence[Mapping[str, float]], name: str) -> Iterator[float]:
    for start in range(0, len(weeks), WEEKS_IN_A_MONTH):
        found = [week[name] for week in weeks[start : start + WEEKS_IN_A_MONTH] if name in week]
        if found:
            yield min(found)


def table(found: Sequence[Line]) -> str:
    """A Markdown table with a row a line."""
    rows = [
        "| cost | first month | last month | highest month | processor time | level |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for line in found:
        highest = max(line.ratios)
        processor = f"{max(line.processor_ratios):.2f} x" if line.processor else ""
        rows.append(
            f"| {line.name} | {amount(line.months[0], line.unit)} "
            f"| {amount(line.months[-1], line.unit)} "
            f"| {highest:.2f} x (month {line.ratios.index(highest) + 1}) | {processor} "
            f"| {'yes' if line.is_level else '**no**'} |"
        )
    return "\n".join(rows)


def amount(value: float, unit: Unit) -> str:
    """`value` as people write it."""
    if unit == "count":
        return f"{value:,.0f}"
    steps = (
        ((1, "s"), (1e-3, "ms"), (0, "us"))
        if unit == "time"
        else ((2**30, "GiB"), (2**20, "MiB"), (0, "KiB"))
    )
    least, name = next(step for step in steps if value >= step[0])
    return f"{value / (least or {'us': 1e-6, 'KiB': 1024}[name]):.3g} {name}"
