"""Asks the driver of a store the cases of this directory: see README.md. Needs Python alone."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CASES = Path(__file__).parent / "cases"
FIELDS = ("value", "rows", "versions", "changes", "found", "time")
"""The fields of answers, of which each has one."""
OURS = ("save", "expect", "error")
"""The fields of a step that the driver does not get."""


class Driver:
    """The program that is asked."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, and its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the driver ended with {self.process.wait()} at {request}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End the program in order."""
        self.process.communicate()


class UnknownError(Exception):
    """The driver does not know the operation."""


def resolved(given: Any, times: dict[str, int]) -> Any:
    """A value of a case, with times in the place of their names."""
    if isinstance(given, str) and given.startswith("@"):
        name, minus, less = given[1:].partition("-")
        return times[name] - int(less if minus else 0)
    if isinstance(given, list):
        return [resolved(each, times) for each in given]
    if isinstance(given, dict):
        return {name: resolved(each, times) for name, each in given.items()}
    return given


def problem(driver: Driver, case: dict[str, Any]) -> str | None:
    """What is wrong with the answers to a case; None if nothing is."""
    driver.ask({"op": "open"})
    times: dict[str, int] = {"zero": 0}
    for number, step in enumerate(case["steps"], 1):
        request = {name: each for name, each in step.items() if name not in OURS}
        answer = driver.ask(resolved(request, times))
        if answer.get("unknown"):
            raise UnknownError(step["op"])
        if ("error" in answer) is not bool(step.get("error")):
            return f"step {number}, {json.dumps(step)}: {answer}"
        if "save" in step:
            times[step["save"]] = answer["time"]
        if "expect" in step:
            found = next((answer[name] for name in FIELDS if name in answer), None)
            expected = resolved(step["expect"], times)
            if found != expected:
                return f"step {number}, {json.dumps(step)}: {found}, not {expected}"
    return None


def cases(groups: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cases, each with its group."""
    for path in sorted(CASES.glob("*.jsonl")):
        if not groups or path.stem in groups:
            for line in path.read_text(encoding="utf-8").splitlines():
                yield path.stem, json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", default="", help="some groups alone, between commas")
    parser.add_argument("command", nargs="+", help="the driver")
    given = parser.parse_args()
    driver = Driver(given.command)
    passed, failed, unknown = 0, 0, {}
    for group, case in cases([name for name in given.groups.split(",") if name]):
        try:
            wrong = problem(driver, case)
        except UnknownError as error:
            unknown[group] = str(error)
            continue
        passed, failed = passed + (wrong is None), failed + (wrong is not None)
        if wrong is not None:
            print(f"{group}: {case['name']}: {wrong}")
    driver.end()
    for group, operation in unknown.items():
        print(f"{group}: left out, {operation!r} is unknown to the driver")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
