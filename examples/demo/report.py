"""The demo's table and picture."""

from __future__ import annotations

import calendar
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from kvstore.backup import BackupInfo


@dataclass(frozen=True, slots=True)
class Month:
    """The figures of one month of the demo."""

    month: int
    rows: int
    build_seconds: float
    commit_ms: float
    increment: BackupInfo
    built_early: bool


def table(months: Sequence[Month]) -> Table:
    """One line per month: its import, the commit, and the incremental backup after it."""
    result = Table(title="Flights out of New York, 2013: imported by Spark, backed up by window")
    for column in ("month", "rows", "import s", "rows/s", "commit ms"):
        result.add_column(column, justify="right")
    for column in ("incremental rows", "bytes", "s"):
        result.add_column(column, justify="right", style="cyan")
    for month in months:
        name = calendar.month_abbr[month.month] + (" *" if month.built_early else "")
        seconds = month.build_seconds + month.commit_ms / 1000
        result.add_row(
            name,
            f"{month.rows:,}",
            f"{seconds:.2f}",
            f"{month.rows / seconds:,.0f}",
            f"{month.commit_ms:.1f}",
            f"{month.increment.rows:,}",
            f"{month.increment.bytes:,}",
            f"{month.increment.seconds:.2f}",
        )
    result.caption = "* built before the backup of the month before, added after it"
    return result


def save_picture(months: Sequence[Month], path: Path) -> None:
    """Draw each increment as a bar: its window on the time line, its size as the height."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    start = months[0].increment.upper
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    left = 0.0
    for month in months:
        right = (month.increment.upper - start) / 1e9 + months[0].build_seconds
        size = month.increment.bytes / 1e6
        color = "#d95f02" if month.built_early else "#1b6ca8"
        axes.bar(left, size, width=right - left, align="edge", color=color, edgecolor="white")
        label = f"{calendar.month_abbr[month.month]}\n{month.increment.rows:,}"
        axes.annotate(
            label,
            ((left + right) / 2, size),
            ha="center",
            va="bottom",
            fontsize=8,
            xytext=(0, 28 if month.built_early else 3),  # this bar is too narrow for its label
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "lw": 0.6} if month.built_early else None,
        )
        left = right
    axes.set_title("Backup timeline: every increment covers one window, without gap or overlap")
    axes.set_xlabel("seconds since the first import began   (labels: month, rows in the increment)")
    axes.set_ylabel("increment, MB of Parquet")
    axes.margins(y=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.bar(0, 0, color="#d95f02", label="built before the previous backup, added after it")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
