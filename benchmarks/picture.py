"""The picture of a run: the scale with the most workloads, each a line on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.report import PEER_NAMES, Scale
from benchmarks.workloads import Workload, section

mpl.use("Agg")

import matplotlib.pyplot as plt

_MET, _MISSED, _NEUTRAL = "#2a7f4f", "#c0392b", "#333333"
_LINE_INCHES = 0.25
_PANEL_INCHES = 8


def draw(scale: Scale, target: Path) -> None:
    """Write the ratios of `scale` to `target`, in two columns of workloads."""
    columns = _columns(scale)
    height = _LINE_INCHES * max(map(_lines_of, columns)) + 1.6
    picture, (panels,) = plt.subplots(
        ncols=len(columns), figsize=(_PANEL_INCHES * len(columns), height), squeeze=False
    )
    ratios = [
        ratio
        for column in columns
        for workload in column
        for ratio in scale.ours(workload)["ratios"]
    ]
    handles: dict[str, Any] = {}
    for axes, column in zip(panels, columns, strict=True):
        _draw_column(axes, scale, column)
        axes.set_xlim(min(0.04, min(ratios) / 1.5), max(12.0, max(ratios) * 1.5))
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    picture.suptitle(
        f"Rate over the baseline's rate, {scale.rows:,} rows: right is faster",
        y=1 - 0.08 / height,
        fontsize=12,
    )
    picture.legend(
        handles.values(),
        handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.35 / height),
        ncol=12,
        frameon=False,
        fontsize=9,
    )
    picture.tight_layout(rect=(0, 0, 1, 1 - 0.65 / height))
    picture.savefig(target, dpi=110, metadata={"Software": None})
    plt.close(picture)


def _columns(scale: Scale) -> list[list[Workload]]:
    """The measured workloads in two columns of about one height, cut between sections."""
    sections: dict[str, list[Workload]] = {}
    for workload in scale.workloads:
        if scale.ours(workload)["median"] is not None:
            sections.setdefault(section(workload.name), []).append(workload)
    parts = list(sections.values())
    if len(parts) < 2:
        return parts
    cuts = ([list(chain(*parts[:cut])), list(chain(*parts[cut:]))] for cut in range(1, len(parts)))
    return min(cuts, key=lambda both: max(map(_lines_of, both)))


def _lines_of(column: Sequence[Workload]) -> float:
    """Lines that a column takes, headings included."""
    return len(column) + 1.5 * len({section(workload.name) for workload in column})


def _draw_column(axes: Any, scale: Scale, column: Sequence[Workload]) -> None:
    """A line a workload, a heading above each section."""
    place, heading, places = 0.0, "", []
    for workload in column:
        if section(workload.name) != heading:
            heading = section(workload.name)
            place += 0.5
            axes.text(0, place, heading, transform=axes.get_yaxis_transform(), weight="bold")
            place += 1
        _draw_workload(axes, scale, workload, place)
        places.append(place)
        place += 1
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(places, [workload.name for workload in column], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place, -0.3)


def _draw_workload(axes: Any, scale: Scale, workload: Workload, place: float) -> None:
    """Peers as dots, ours as a diamond on its range: green at its target or above, red below."""
    axes.axhline(place, color="#eeeeee", linewidth=0.8, zorder=0)
    for number, (kind, name) in enumerate(PEER_NAMES.items()):
        line = scale.peer(workload, kind)
        if line is not None and line["median"]:
            axes.plot(line["median"], place, "o", color=f"C{number}", ms=5, alpha=0.8, label=name)
    mine, target = scale.ours(workload), workload.reach
    colour, label = _NEUTRAL, "kvstore, no target"
    if target is not None:
        axes.plot(target, place, "|", color="#999999", ms=13, mew=2, label="target")
        is_met = mine["median"] >= target
        colour = _MET if is_met else _MISSED
        label = f"kvstore, target {'reached' if is_met else 'missed'}"
    axes.plot([min(mine["ratios"]), max(mine["ratios"])], [place] * 2, color=colour, lw=1.4)
    axes.plot(mine["median"], place, "D", color=colour, ms=7, label=label)
