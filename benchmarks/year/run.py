"""The command: `python -m benchmarks.year [--minute] [--write] [--scratch PLACE]`.

Prints the table and ends with 1 where a line is not level or a state is wrong. Each run leaves
a file of JSON lines in benchmarks/out: the facts of the machine, then the costs of each week.
`--write` makes docs/explanation/year.md and its picture.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from benchmarks import machine
from benchmarks.year import calendar, document
from benchmarks.year.levels import Line, lines, table
from benchmarks.year.plan import MINUTE, YEAR, Plan

_OUT: Final = Path(__file__).parent.parent / "out"


def main() -> None:
    """Play, report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.year", description=__doc__)
    parser.add_argument("--minute", action="store_true", help="play fewer and shorter days")
    parser.add_argument("--write", action="store_true", help="write the page of the year")
    parser.add_argument("--scratch", help="where the store lies; the system's place by default")
    options = parser.parse_args()
    plan = MINUTE if options.minute else YEAR
    began, facts = time.monotonic(), machine.facts()
    _OUT.mkdir(exist_ok=True)
    target = _OUT / f"year-{facts['commit']}-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}.jsonl"
    weeks = []
    with target.open("w") as file:
        print(json.dumps({"facts": facts}), file=file, flush=True)
        for week in played(plan, options.scratch):
            print(json.dumps(week), file=file, flush=True)
            weeks.append(week)
            _say(f"[{time.monotonic() - began:5.0f} s] week {len(weeks)} of {plan.weeks}")
    found = lines(weeks)
    if options.write:
        document.write(found, plan, {**facts, "seconds": time.monotonic() - began})
    print(table(found))
    print(f"figures: {target}")
    if any(not line.is_level for line in found):
        sys.exit(document.verdict(found))


def played(plan: Plan, scratch: str | None = None) -> Iterator[dict[str, float]]:
    """The costs of each week of a year that is played in a directory of its own."""
    with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as place:
        yield from calendar.play(Path(place), plan)


def minute(scratch: str | None = None) -> list[Line]:
    """The lines of a year that takes a minute."""
    return lines(list(played(MINUTE, scratch)))


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
