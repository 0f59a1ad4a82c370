"""The picture of a year: a panel for each line, which begins at 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.year.levels import LEVEL, Line, amount

mpl.use("Agg")

import matplotlib.pyplot as plt

_LEVEL, _GROWN = "#2a7f4f", "#c0392b"
_COLUMNS = 4


def draw(lines: Sequence[Line], target: Path) -> None:
    """Write the picture of `lines` to `target`."""
    rows = -(-len(lines) // _COLUMNS)
    picture, panels = plt.subplots(
        rows, _COLUMNS, figsize=(3.6 * _COLUMNS, 1.9 * rows + 0.6), squeeze=False
    )
    for axes in panels.flat[len(lines) :]:
        axes.axis("off")
    for axes, line in zip(panels.flat, lines, strict=False):
        _draw_line(axes, line)
    picture.suptitle(
        f"Each month over the first. Thin: processor time; grey: {LEVEL:g} times as much",
        fontsize=12,
    )
    picture.tight_layout()
    picture.savefig(target, dpi=90, metadata={"Software": None})
    plt.close(picture)


def _draw_line(axes: Any, line: Line) -> None:
    months = range(1, len(line.months) + 1)
    axes.plot(months, line.ratios, "o-", ms=3, lw=1.5, color=_LEVEL if line.is_level else _GROWN)
    axes.plot(months, line.processor_ratios or line.ratios, lw=0.8, color="#5577bb")
    axes.axhline(LEVEL, color="#aaaaaa", lw=0.8)
    axes.set_title(f"{line.name}: {amount(line.months[-1], line.unit)}", fontsize=9, loc="left")
    axes.set_ylim(0, max(2.0, 1.1 * max(line.ratios)))
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
