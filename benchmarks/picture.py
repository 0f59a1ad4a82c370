"""The pictures of a run: a few rows each, in words, on a logarithmic axis.

A row has a mark for each workload that it names, green where the target is reached. Where peers
were measured too, the best of them stands beside, by its name. A picture shows the largest scale
at which most of its workloads were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import matplotlib as mpl

from benchmarks.report import PEER_NAMES, Line, Scale
from benchmarks.workloads import Workload

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

_MET, _MISSED, _NEUTRAL, _PEER = "#2a7f4f", "#c0392b", "#333333", "#1f77b4"
_SHAPES: Final = "Dos^v"
_LINE_INCHES: Final = 0.34
_WIDTH_INCHES: Final = 9.0


class Picture(NamedTuple):
    """Rows of words; each has workloads by the name of their marks."""

    title: str
    rows: Mapping[str, Mapping[str, str]]

    @property
    def file(self) -> str:
        """The name of its file."""
        return self.title.lower().replace(" ", "-") + ".png"

    @property
    def workloads(self) -> list[str]:
        """The workloads of all rows."""
        return [workload for marks in self.rows.values() for workload in marks.values()]


def _alone(**rows: str) -> dict[str, dict[str, str]]:
    """Rows of one mark, by the names of their workloads, with `_` for `-`."""
    return {words: {"kvstore": name.replace("_", "-")} for name, words in rows.items()}


def _shares(**marks: str) -> dict[str, dict[str, str]]:
    """A row for each share of labels; the marks are the beginnings of workloads' names."""
    return {
        f"labels: {share} % of versions": {
            mark.replace("_", " "): f"{name}-{share}" for mark, name in marks.items()
        }
        for share in ("0.1", "1", "10", "100")
    }


PICTURES: Final = (
    Picture(
        "Writing",
        _alone(
            bulk_load="load all rows, sorted",
            commit_100="durable commit of 100 rows",
            commit_10k="durable commit of 10,000 rows",
            transact_synced="durable transaction",
            transact="transaction that waits for no disk",
            delete_range="delete a tenth of all rows",
            import_1gb="add a prebuilt import of 1 GB",
        ),
    ),
    Picture(
        "Reading",
        _alone(
            get="read one key",
            get_as_of="read one key at an old time",
            get_many="read many keys in one call",
            scan="scan all rows",
            scan_as_of="scan all rows at an old time",
            scan_arrow="scan into Arrow",
            changes_arrow="read changes as Arrow",
        ),
    ),
    Picture(
        "YCSB",
        {
            words: {
                f"against {name}": f"ycsb-{mix}" + ("" if name == "RocksDB" else f"-{name}")
                for name in ("RocksDB", "lmdb", "sqlite3")
            }
            for mix, words in {
                "a": "A: half reads, half updates",
                "b": "B: 95 % reads, 5 % updates",
                "c": "C: reads only",
                "d": "D: reads of the newest rows",
                "e": "E: short scans",
                "f": "F: reads, and writes of what was read",
            }.items()
        },
    ),
    Picture(
        "Joins",
        _shares(
            against_DuckDB="join-store",
            against_Polars="join-polars",
            against_pandas="join-pandas",
            collection_against_DuckDB="join-collection",
        ),
    ),
    Picture(
        "Backups",
        _alone(
            backup="increment of 10,000 changes",
            backup_full="full backup",
            backup_scan="read a backup at an old time",
            restore="restore",
            disk_trimmed="disk, history given up",
            disk="disk, history kept",
        ),
    ),
    Picture(
        "Spark",
        _alone(
            spark_import="import rows",
            spark_read="read a collection",
            spark_read_increments="read a collection with increments",
            spark_read_source="read by the data source",
            spark_read_checkpoint="read a checkpoint",
            spark_apply="apply a stream of changes",
            spark_backup="full backup by tasks",
        ),
    ),
    Picture(
        "Joins by Spark",
        _shares(
            against_ASOF_JOIN="spark-join-checkpoint",
            collection_against_ASOF_JOIN="spark-join-collection",
            against_a_window="spark-join-window",
        ),
    ),
)


def draw(scales: Sequence[Scale], target: Path) -> list[Picture]:
    """Write a picture into the directory `target` for each that has figures, and return these."""
    target.mkdir(exist_ok=True)
    drawn = []
    for picture in PICTURES:
        shown = max(scales, key=lambda scale: (len(_measured(picture, scale)), scale.rows))
        if _measured(picture, shown):
            _draw(picture, shown, target / picture.file)
            drawn.append(picture)
    return drawn


def _measured(picture: Picture, scale: Scale) -> dict[str, Workload]:
    return {
        each.name: each
        for each in scale.workloads
        if each.name in picture.workloads and scale.ours(each)["median"] is not None
    }


def _draw(picture: Picture, scale: Scale, target: Path) -> None:
    measured = _measured(picture, scale)
    rows = {
        words: {mark: measured[name] for mark, name in marks.items() if name in measured}
        for words, marks in picture.rows.items()
    }
    rows = {words: marks for words, marks in rows.items() if marks}
    figure, axes = plt.subplots(figsize=(_WIDTH_INCHES, _LINE_INCHES * len(rows) + 1.5))
    for place, marks in enumerate(rows.values()):
        axes.axhline(place, color="#eeeeee", linewidth=0.8, zorder=0)
        for number, workload in enumerate(marks.values()):
            _mark(axes, scale.ours(workload), workload, place, _SHAPES[number])
        if len(marks) == 1:
            _best_peer(axes, scale, next(iter(marks.values())), place)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.08)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(f"{picture.title}, {scale.rows:,} rows: right of 1 is faster", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _legend(axes, list(dict.fromkeys(mark for marks in rows.values() for mark in marks)))
    figure.tight_layout()
    figure.savefig(target, dpi=90, metadata={"Software": None})
    plt.close(figure)


def _mark(axes: Any, line: Line, workload: Workload, place: float, shape: str) -> None:
    """The median on its range. The colour tells whether it is at the target."""
    target = workload.reach
    is_met = target is not None and line["median"] >= target
    colour = _NEUTRAL if target is None else _MET if is_met else _MISSED
    axes.plot([min(line["ratios"]), max(line["ratios"])], [place] * 2, color=colour, lw=1.2)
    axes.plot(line["median"], place, shape, color=colour, ms=7)


def _best_peer(axes: Any, scale: Scale, workload: Workload, place: float) -> None:
    found = {name: scale.peer(workload, kind) for kind, name in PEER_NAMES.items()}
    medians = {name: line["median"] for name, line in found.items() if line and line["median"]}
    if not medians:
        return
    name = max(medians, key=lambda each: medians[each])
    axes.plot(medians[name], place, "o", color=_PEER, ms=5)
    axes.annotate(
        name, (medians[name], place), (0, 5), textcoords="offset points", ha="center",
        fontsize=8, color=_PEER,
    )  # fmt: skip


def _legend(axes: Any, marks: Sequence[str]) -> None:
    """The shapes where there are several, and the colours."""
    shapes = [(mark, _SHAPES[at], _NEUTRAL) for at, mark in enumerate(marks) if len(marks) > 1]
    colours = [
        ("target reached", "s", _MET),
        ("missed", "s", _MISSED),
        ("no target", "s", _NEUTRAL),
    ]
    for name, shape, colour in shapes + colours:
        axes.plot([], [], shape, color=colour, label=name, ls="none")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.4, -0.25 / (_LINE_INCHES * 4)), ncol=4,
        frameon=False, fontsize=8,
    )  # fmt: skip
