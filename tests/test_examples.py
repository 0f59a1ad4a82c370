"""Every example in a docstring runs, in an empty directory, with an open and empty `store`."""

from __future__ import annotations

import ast
import re
import textwrap
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import backup, bulk

ROOT = Path(__file__).parent.parent

_EXAMPLE = re.compile(r"^ *Example:\n\n((?:(?:    .*)?\n)+)", re.MULTILINE)


def examples(package: str) -> dict[str, str]:
    """The code of each example, by its module and the line of its docstring."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "Example:" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(value=ast.Constant(value=str(docstring))):
                    for code in _EXAMPLE.findall(docstring):
                        found[f"{path.relative_to(ROOT)}:{node.lineno}"] = textwrap.dedent(code)
    return found


FOUND = {
    name: code for each in ("kvstore", "bulk", "backup") for name, code in examples(each).items()
}

NAMES = {"kvstore": kvstore, "bulk": bulk, "backup": backup, "pa": pa, "timedelta": timedelta}
"""The names that an example may use."""


@pytest.mark.parametrize("name", FOUND)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with kvstore.open("examples.db", durability="async") as store:
        exec(compile(FOUND[name], name, "exec"), {**NAMES, "store": store})


def test_examples_are_found_and_assert_something() -> None:
    assert len(FOUND) >= 14
    assert [name for name, code in FOUND.items() if "assert " not in code] == []
