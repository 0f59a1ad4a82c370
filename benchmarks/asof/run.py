"""Asks all runners: `python -m benchmarks.asof`, or `make asof-bench`.

    --versions N     versions of the history
    --rounds N       each join is measured so often at most, and its least time counts
    --only NAMES     these runners, separated by commas
    --feast PYTHON   the Python of an environment that has feast[duckdb]
    --write          write docs/explanation/asof.md and its picture

A runner whose package is missing is skipped, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.asof import document
from benchmarks.asof.data import DENSITIES, Shape, make
from benchmarks.asof.runners import RUNNERS, Feast, Runner

_ROOT: Final = Path(__file__).parent.parent.parent
_FEAST: Final = _ROOT / ".venv" / "feast" / "bin" / "python"
_SECONDS_MAX: Final = 900


def main() -> None:
    """Measure, print the page's tables, and write the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asof", description=__doc__)
    parser.add_argument("--versions", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(each.name for each in RUNNERS))
    parser.add_argument("--feast", type=Path, default=_FEAST)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    kinds = [each for each in RUNNERS if each.name in asked.only.split(",")]
    facts, shape, began = machine.facts(), Shape(asked.versions), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="asof-") as directory:
        place = Path(directory) / "data"
        make(place, shape)
        found = measure(kinds, place, asked.rounds, asked.feast)
    facts["seconds"] = time.perf_counter() - began
    print(document.tables(found))
    if asked.write:
        document.write(found, shape, facts)


def measure(
    kinds: Sequence[type[Runner]],
    place: Path,
    rounds: int,
    feast: Path = _FEAST,
    densities: Sequence[float] = DENSITIES,
) -> dict[str, list[dict[str, Any]]]:
    """The facts of each runner, by its name; a runner that cannot run has one with a `problem`."""
    found = {}
    for kind in kinds:
        print(f"{kind.name} ...", file=sys.stderr, flush=True)
        python = feast if issubclass(kind, Feast) else Path(sys.executable)
        found[kind.name] = _measure(kind, place, rounds, python, densities)
    return found


def _measure(
    kind: type[Runner], place: Path, rounds: int, python: Path, densities: Sequence[float]
) -> list[dict[str, Any]]:
    is_here = python == Path(sys.executable)
    if not python.exists() or (is_here and find_spec(kind.package) is None):
        return [{"question": "ready", "problem": f"{kind.package} is not installed"}]
    command = [str(python), "-W", "ignore", "-m", "benchmarks.asof.runners", kind.name, str(place)]
    done = subprocess.run(
        [*command, str(rounds), *map(str, densities)],
        cwd=_ROOT,
        env={**_environment(os.environ), "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=_SECONDS_MAX,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return [{"question": "ready", "problem": said[-1] if said else f"exit {done.returncode}"}]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a runner. Feast reports its use to its makers unless it is told not to."""
    return {**given, "FEAST_USAGE": "False"}
