"""Elle's recorded histories, judged by our checker of lists.

They lie in its repository alone: `ELLE_CHECKOUT` names a checkout of it. Its tests and the paper
tell the verdicts. The histories that Elle's tests spell out are retold in `tests/txn`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

import pytest

from tests.txn.appends import Step, Transaction, what_is_wrong

VERDICTS: Final = {
    "paper-example": ("a cycle", "a cycle"),
    "si-without-g-single": ("a cycle", "a cycle"),
    "huge-scc": (None, "a cycle"),
}
"""Whether it is serialisable, and strictly so, by Elle: the last one breaks its times alone."""


@pytest.mark.parametrize("name", VERDICTS)
def test_of_lists(name: str) -> None:
    if "ELLE_CHECKOUT" not in os.environ:
        pytest.skip("ELLE_CHECKOUT names no checkout of jepsen-io/elle")
    path = Path(os.environ["ELLE_CHECKOUT"]) / "histories" / f"{name}.edn"
    history = history_of(path.read_text(encoding="utf-8"))
    assert len(history) == {"huge-scc": 10_254}.get(name, 4)
    untimed = [Transaction(each.steps, each.outcome) for each in history]
    assert (what_is_wrong(untimed), what_is_wrong(history)) == VERDICTS[name]


def history_of(text: str) -> list[Transaction]:
    """The transactions of a history. A line is a map of EDN: an invocation, or what came of it; a
    process has one transaction at a time."""
    begun: dict[str, int] = {}
    history = []
    lines = [line for line in text.splitlines() if line and not line.startswith(";")]
    for time, line in enumerate(lines):
        kind = re.search(r":type :(invoke|ok|fail|info)", line)
        process = re.search(r":process (:?\w+)", line)
        name = process[1] if process else ""
        assert kind is not None
        if name == ":nemesis":
            continue  # what was done to the cluster
        steps = re.search(r":value (\[\[.*?\]\])[,}]", line)
        assert steps is not None
        if kind[1] == "invoke":
            begun[name] = time
        else:
            end = None if kind[1] == "info" else time
            history.append(Transaction(_steps(steps[1]), kind[1], begun.pop(name), end))
    return history


def _steps(edn: str) -> tuple[Step, ...]:
    words = {":append": '"append"', ":r": '"r"', "nil": "null", " ": ","}
    listed = json.loads(re.sub(r":append|:r|nil| ", lambda found: words[found[0]], edn))
    return tuple(
        Step(verb, b"%d" % key, (value,) if verb == "append" else tuple(value or ()))
        for verb, key, value in listed
    )
