"""Writes docs/explanation/year.md and its picture, from one run: `make year`.

`page.md` beside this module is the text around the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.year.levels import LEVEL, Line, table
from benchmarks.year.plan import Plan

_PLACE: Final = Path(__file__).parent.parent.parent / "docs" / "explanation"
PAGE: Final = _PLACE / "year.md"
PICTURE: Final = _PLACE / "year.png"
_TEMPLATE: Final = Path(__file__).parent / "page.md"


def write(lines: Sequence[Line], plan: Plan, facts: Mapping[str, Any]) -> None:
    """Write the page and the picture."""
    from benchmarks.year import picture  # matplotlib is not needed for anything else

    picture.draw(lines, PICTURE)
    PAGE.write_text(page(lines, plan, facts))


def page(lines: Sequence[Line], plan: Plan, facts: Mapping[str, Any]) -> str:
    """The page as a whole."""
    parts = {
        "minutes": f"{facts['seconds'] / 60:.0f}",
        "table": table(lines),
        "verdict": verdict(lines),
        "plan": _described(plan),
        "machine": (
            f"Commit {facts['commit']}, {facts['date']}, {facts['processor']} with "
            f"{facts['cores']} cores, load {facts['load']} before the run, an fsync of "
            f"{facts['fsync_ms']} ms."
        ),
        "level": f"{LEVEL:g}",
        "keep_days": str(plan.keep_days),
        "pinned_days": str(plan.pinned_days),
        "backup_days": str(plan.backup_days),
    }
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], _TEMPLATE.read_text())


def verdict(lines: Sequence[Line]) -> str:
    """One sentence: which lines are not level."""
    grown = [line.name for line in lines if not line.is_level]
    if not grown:
        return "All lines are level."
    return f"Not level: {', '.join(grown)}."


def _described(plan: Plan) -> str:
    days = plan.weeks * plan.days
    counts = {
        f"imports of {plan.import_rows} rows": plan.imports,
        "reverts of an import": plan.reverts,
        "deletions of all rows of a user": plan.deletes,
        "versions of three hot keys": plan.hot_puts,
        "durable commits of 10 rows": plan.commits,
        "transactions": plan.transactions,
        "checkpoints": plan.checkpoints,
        "look-ups of 100 rows, scans of 1,000 rows and scans of hot keys": plan.reads,
    }
    rows = [
        f"{plan.users:,} users have up to {plan.rows_per_user} rows of {plan.value_bytes} bytes.",
        "",
        "| in the year | |",
        "|---|--:|",
        f"| days of service | {days:,} |",
        *(f"| {name} | {count * days:,} |" for name, count in counts.items()),
    ]
    return "\n".join(rows)
