"""The halves of the loops are twins, and the compiled half is loaded wherever it can be."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvstore.loops import chosen
from tests.loops import compiled, public_names
from tests.loops.loaded import Outcome, has_compiler, outcome, problem_here

ROOT = Path(__file__).parent.parent.parent

needs_compiled = pytest.mark.skipif(compiled is None, reason="not compiled here")


def twins(name: str) -> tuple[Any, Any]:
    halves = ("plain", "compiled")
    one, other = (import_module(f"kvstore.loops.{half}.{name}") for half in halves)
    return one, other


@needs_compiled
@pytest.mark.parametrize("name", chosen.TWINS)
def test_twins_have_the_same_public_names(name: str) -> None:
    plain, other = map(public_names, twins(name))
    assert plain.keys() == other.keys()
    for found in plain:
        assert members(plain[found]) == members(other[found])


@needs_compiled
@pytest.mark.parametrize("name", chosen.TWINS)
def test_functions_of_twins_have_the_same_parameters(name: str) -> None:
    plain, other = map(public_names, twins(name))
    for found in plain:
        if not inspect.isclass(plain[found]):
            assert parameters(plain[found]) == parameters(other[found]), found


@needs_compiled
@pytest.mark.parametrize("name", chosen.TWINS)
def test_every_compiled_module_is_of_the_present_revision(name: str) -> None:
    assert twins(name)[1].REVISION == chosen.REVISION


def members(found: Any) -> set[str]:
    """The public methods and attributes of a class, and of the classes that it extends."""
    if not inspect.isclass(found):
        return set()
    return {name for name in dir(found) if not name.startswith("_")}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("problem", "has_compiler", "expected"),
    [
        (None, True, Outcome(True, "the compiled loops are loaded")),
        (None, False, Outcome(True, "the compiled loops are loaded")),
        (
            "stale",
            False,
            Outcome(True, "no C compiler with Python's headers here: plain loops run"),
        ),
        (
            "stale",
            True,
            Outcome(False, "stale, and a C compiler is here; `make setup` compiles them"),
        ),
    ],
)
def test_plain_loops_pass_only_where_no_compiler_is(
    problem: str | None, has_compiler: bool, expected: Outcome
) -> None:
    assert outcome(problem, has_compiler=has_compiler) == expected


def test_the_check_fails_where_compiled_loops_are_turned_off_and_a_compiler_is() -> None:
    done = check_loops({chosen.VARIABLE: "plain"})
    text = done.stdout + done.stderr
    if has_compiler():
        assert (done.returncode, "KVSTORE_LOOPS=plain keeps" in done.stderr) == (1, True), text
    else:
        assert (done.returncode, done.stdout) == (
            0,
            f"loops: {outcome('', has_compiler=False).text}\n",
        )


def test_compiled_loops_are_loaded_wherever_a_compiler_is() -> None:
    """The rule of `make check` holds on this machine."""
    done = check_loops({chosen.VARIABLE: ""})
    assert done.returncode == 0, done.stderr


@needs_compiled
def test_loops_of_another_revision_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(chosen.VARIABLE, raising=False)
    monkeypatch.setattr(chosen, "COMPILED", False)
    monkeypatch.setattr(chosen, "REVISION", -1)
    assert str(problem_here()).startswith("the compiled loops are stale: blocks has revision")


@pytest.mark.parametrize("compiler", ["false", "/nonexistent/cc"])
def test_a_compiler_that_does_not_compile_is_none(
    monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert not has_compiler()


def check_loops(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.loops.loaded"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
