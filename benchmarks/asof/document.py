"""Writes docs/explanation/asof.md and its picture, from one run.

`page.md` beside this module is the text around the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.asof.data import QUESTIONS, Shape

Facts = Mapping[str, Sequence[Mapping[str, Any]]]
"""What each runner has measured, by its name."""

_PLACE: Final = Path(__file__).parent.parent.parent / "docs" / "explanation"
PAGE: Final = _PLACE / "asof.md"
PICTURE: Final = _PLACE / "asof.png"
_TEMPLATE: Final = Path(__file__).parent / "page.md"


def write(found: Facts, shape: Shape, facts: Mapping[str, Any]) -> None:
    """Write the page and the picture."""
    draw(found, PICTURE)
    PAGE.write_text(page(found, shape, facts))


def page(found: Facts, shape: Shape, facts: Mapping[str, Any]) -> str:
    """The page as a whole."""
    parts = {
        "tables": tables(found),
        "verdict": "\n".join(verdict(found)),
        "versions": f"{shape.versions:,}",
        "keys": f"{shape.keys:,}",
        "late": f"{shape.late:.0%}".replace("%", " %"),
        "tied": f"{shape.tied:.0%}".replace("%", " %"),
        "minutes": f"{facts['seconds'] / 60:.1f}",
        "machine": (
            f"Commit {facts['commit']}, {facts['date']}, {facts['processor']} with "
            f"{facts['cores']} cores, load {facts['load']} before the run."
        ),
    }
    return re.sub(r"\{(\w+)\}", lambda match: parts[match[1]], _TEMPLATE.read_text())


def seconds(found: Facts, question: str) -> dict[float, dict[str, float]]:
    """The seconds of each runner that has answered, by density."""
    result: dict[float, dict[str, float]] = {}
    for name, lines in found.items():
        for line in lines:
            if line["question"] == question and "seconds" in line:
                result.setdefault(line["density"], {})[name] = line["seconds"]
    return result


def tables(found: Facts) -> str:
    """For each question the time of each runner over the least one, and the exact answers. Then the
    loads, and what was not measured."""
    names = [name for name, lines in found.items() if "problem" not in lines[0]]
    parts = []
    for question in QUESTIONS:
        head = f"| `{question}`: labels, % of versions | {' | '.join(names)} |"
        rows = [head, "|--:|" + "--:|" * len(names)]
        for density, taken in sorted(seconds(found, question).items()):
            least = min(taken.values())
            cells = [_ratio(taken[name] / least) if name in taken else "" for name in names]
            rows.append(f"| {density * 100:g} | {' | '.join(cells)} |")
        rights = [_share(_right(found[name], question)) for name in names]
        parts.append("\n".join([*rows, f"| exact answers | {' | '.join(rights)} |"]))
    problems = sorted({*_problems(found)})
    return "\n\n".join([*parts, *(["\n".join(problems)] if problems else [])])


def _ratio(ratio: float) -> str:
    return "**1**" if ratio == 1 else f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _share(share: float | None) -> str:
    """Never 100 % for an answer that is wrong."""
    if share is None:
        return ""
    return "all" if share == 1 else f"{min(share * 100, 99.9):.1f} %"


def _right(lines: Sequence[Mapping[str, Any]], question: str) -> float | None:
    """The share of exact answers where most labels were asked."""
    known = [each for each in lines if each["question"] == question and "right" in each]
    return max(known, key=lambda each: float(each["density"]))["right"] if known else None


def _problems(found: Facts) -> Iterator[str]:
    for name, lines in found.items():
        for line in lines:
            if "problem" in line:
                where = "" if line["question"] == "ready" else f", `{line['question']}`"
                yield f"* Not measured: {name}{where} ({line['problem']})."


def verdict(found: Facts) -> Iterator[str]:
    """Who is fastest, and where; and the load that our answers need."""
    for question in QUESTIONS:
        first: dict[str, list[str]] = {}
        for density, taken in sorted(seconds(found, question).items()):
            first.setdefault(min(taken, key=taken.__getitem__), []).append(f"{density * 100:g} %")
        told = "; ".join(f"{name} at {', '.join(where)}" for name, where in first.items())
        yield f"* Fastest for `{question}`: {told}."
    for name in ("kvstore", "kvstore-keys"):
        lines = found.get(name, ())
        loads = [each for each in lines if each["question"] == "ready" and "seconds" in each]
        by_density = seconds({name: lines}, "event")
        if loads and by_density:
            times = loads[0]["seconds"] / by_density[max(by_density)][name]
            yield (
                f"* The load of {name} took {times:.2g} times as long as its `event` join of the "
                "most labels. No join has a part of it."
            )


def draw(found: Facts, target: Path) -> None:
    """A panel for each question: the time of each runner over the least, by the labels."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    picture, panels = plt.subplots(1, len(QUESTIONS), figsize=(11, 4.5), sharey=True)
    colors = dict(zip(found, plt.get_cmap("tab10").colors, strict=False))
    for axes, question in zip(panels, QUESTIONS, strict=True):
        by_density = sorted(seconds(found, question).items())
        for name in found:
            points = [(d, t[name] / min(t.values())) for d, t in by_density if name in t]
            if points:
                width = 2.5 if name.startswith("kvstore") else 1.2
                densities, ratios = zip(*points, strict=True)
                shares = [100 * density for density in densities]
                axes.plot(shares, ratios, "o-", ms=4, lw=width, color=colors[name], label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"{question}: time over the fastest, lower is better", fontsize=10)
        axes.set_xlabel("labels, % of versions")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    picture.tight_layout()
    picture.savefig(target, dpi=90, metadata={"Software": None})
    plt.close(picture)
