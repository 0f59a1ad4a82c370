"""A module fits a sitting, a function fits a screen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.house.floors import packages

ROOT = Path(__file__).parent.parent
PACKAGES = [*packages(ROOT), "benchmarks"]

MODULE_LINES_MAX = 450
MODULE_LINES_MEDIAN = 150
FUNCTION_LINES_MAX = 50

LONGER = {
    "kvstore/store/store.py": "the verbs of a store with the texts that users read",
}
"""The modules that may be longer, each with its reason."""


def too_long(path: str, text: str) -> Iterator[str]:
    """The module at `path` if it is too long, and each function in it that is."""
    if path not in LONGER and len(text.splitlines()) > MODULE_LINES_MAX:
        yield path
    if path.endswith(".pyx"):
        return  # the parser knows Python alone
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX:
                yield f"{path}: {node.name}"


def sources(package: str) -> list[Path]:
    return [path for path in (ROOT / package).rglob("*.py*") if path.suffix in {".py", ".pyx"}]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_and_no_function_is_too_long(package: str) -> None:
    found = {
        each
        for path in sources(package)
        for each in too_long(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    }
    assert found == set()


def test_half_of_all_modules_are_short() -> None:
    lines = [
        len(path.read_text(encoding="utf-8").splitlines())
        for package in PACKAGES
        for path in sources(package)
        if path.name != "__init__.py"
    ]
    assert median(lines) <= MODULE_LINES_MEDIAN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n" * MODULE_LINES_MAX, []),
        ("x = 1\n" * (MODULE_LINES_MAX + 1), ["a.py"]),
        ("class A:\n    def f(self):\n" + "        x = 1\n" * (FUNCTION_LINES_MAX - 1), []),
        ("class A:\n    def f(self):\n" + "        x = 1\n" * FUNCTION_LINES_MAX, ["a.py: f"]),
        ("async def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX, ["a.py: f"]),
    ],
)
def test_a_line_too_many_is_found(text: str, expected: list[str]) -> None:
    assert list(too_long("a.py", text)) == expected
