"""Each public suite in an environment of its own: `make conformance`.

    python -m tests.conformance DIRECTORY [NAME...]

Each suite of `tests.conformance.suites` gets an environment in the directory, with the newest
releases of what it needs from the package index, and runs there. So does the how-to of the adapter.
The outcome is written to `docs/reference/conformance.md`; with names, their rows alone are new. The
status is 1 if a test fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as Xml
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple

from tests.conformance.suites import SUITES, Suite

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "conformance.md"
SECONDS_MAX: Final = 3600
ALWAYS: Final = ("pytest", "pytest-asyncio")

HEAD: Final = """\
# Conformance

Most of these suites were written by other projects, for stores like ours. Where a package has no
tests, they are ours: the row says that they are retold, or our own. Some suites have a few tests of
ours beside theirs. `make conformance` installs each package from the package index into an
environment of its own, runs the suite and the how-to of the adapter there, and writes this page.
Some rows judge the judges: the checkers that search recorded histories of this store for lost and
stale answers agree with other projects on histories whose verdicts are published.

| suite | package | passed | left out | date |
|---|---|--:|---|---|
"""


class Outcome(NamedTuple):
    """What became of the tests of one suite."""

    passed: int
    failed: list[str]
    skipped: Counter[str]
    """How many tests skipped themselves, by their reason."""


def main(directory: Path, names: list[str]) -> int:
    """Run the suites, and write the page. Returns the exit status."""
    known = {suite.name: suite for suite in SUITES}
    rows = written()
    failed = []
    for suite in [known[name] for name in names] or SUITES:
        python = environment(directory / suite.name, suite)
        outcome = run(python, suite, directory)
        failed += [f"{suite.name}: {test}" for test in outcome.failed]
        rows[suite.name] = row(suite, version_of(python, suite), outcome)
        print(rows[suite.name], flush=True)
    text = "\n".join(rows[suite.name] for suite in SUITES if suite.name in rows)
    PAGE.write_text(f"{HEAD}{text}\n", encoding="utf-8")
    print("\n".join(failed) or "all passed")
    return 1 if failed else 0


def written() -> dict[str, str]:
    """The rows that the page has, by the suite."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return {found[1]: found[0] for found in re.finditer(r"^\| `(\w+)`.*$", text, re.MULTILINE)}


def environment(place: Path, suite: Suite) -> Path:
    """The Python of an environment for the suite. It is made once for its requirements."""
    python, ready = place / "bin" / "python", place / "ready"
    wanted = "\n".join([*ALWAYS, *ours(), *suite.requires])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"{suite.name}: making its environment", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, *wanted.splitlines()], check=True)
        ready.write_text(wanted)
    return python


def ours() -> list[str]:
    """What the library needs, and its server, by which processes share a store."""
    import tomllib  # Python 3.11 has it, and `make test` imports this module on 3.10 too

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["server"]]


def run(python: Path, suite: Suite, directory: Path) -> Outcome:
    """Run the suite and the how-to."""
    report = directory / f"{suite.name}.xml"
    tests = [f"tests/conformance/suite_{suite.name}.py"]
    if suite.page:
        page = suite.page
        tests.append(f"tests/test_documents.py::test_every_block_of_a_page_runs_in_order[{page}]")
    without = " or ".join(suite.left_out)
    choice = ["-k", f"not ({without})"] if without else []
    subprocess.run(
        [
            *(str(python), "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", str(ROOT), "-o", "asyncio_mode=auto"),
            *("-W", "ignore", f"--junitxml={report}", *choice, *tests),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KVSTORE_CONFORMANCE": suite.name},
        timeout=SECONDS_MAX,
        check=False,
    )
    return outcome_of(report.read_text(encoding="utf-8"))


def outcome_of(report: str) -> Outcome:
    """The outcome that a report of pytest tells."""
    passed, failed, skipped = 0, [], Counter[str]()
    for case in Xml.fromstring(report).iter("testcase"):
        if (found := case.find("skipped")) is not None:
            skipped[found.get("message") or ""] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            passed += 1
    return Outcome(passed, failed, skipped)


def version_of(python: Path, suite: Suite) -> str:
    """The version of the suite's package in an environment, or the commit of its checkout."""
    if suite.checkout:
        if suite.checkout not in os.environ:
            return "without a checkout"
        command = ["git", "-C", os.environ[suite.checkout], "rev-parse", "--short=10", "HEAD"]
    else:
        code = f"from importlib.metadata import version; print(version({suite.package!r}))"
        command = [str(python), "-c", code]
    return subprocess.check_output(command, text=True).strip()


def row(suite: Suite, version: str, outcome: Outcome) -> str:
    """The row of the page."""
    left = "; ".join(reasons(suite, outcome)) or "nothing"
    day = datetime.now(timezone.utc).date()
    failed = f", **{len(outcome.failed)} failed**" if outcome.failed else ""
    named = f"`{suite.name}`: {suite.source}, for `{suite.adapter}`"
    return f"| {named} | {suite.package} {version} | {outcome.passed}{failed} | {left} | {day} |"


def reasons(suite: Suite, outcome: Outcome) -> Iterator[str]:
    """What did not run, and why."""
    for test, reason in suite.left_out.items():
        yield f"`{test}`: {reason}"
    for reason, count in sorted(outcome.skipped.items()):
        shown = reason.removeprefix("Skipped: ").strip().replace("|", "/").splitlines()[0]
        yield f"{count} skipped by the suite ({shown})"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
