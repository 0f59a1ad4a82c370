"""`python -m tests.loops.loaded`: fail where a C compiler is and plain loops run.

An installation falls back to plain loops without a word, so that it works without a C compiler.
`make check` must not: a machine that can compile the loops and runs plain ones tests half of them
and measures the wrong half.

    loaded    compiler    outcome
    yes       any         passes
    no        no          passes, and says that plain loops run
    no        yes         fails, and says why the compiled loops are not loaded
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from kvstore.loops import chosen


class Outcome(NamedTuple):
    """Whether the check passes, and its message."""

    passes: bool
    text: str


def outcome(problem: str | None, *, has_compiler: bool) -> Outcome:
    """Whether the check passes, and its message, if `problem` keeps the compiled loops from being
    loaded. None means that they are loaded."""
    if problem is None:
        return Outcome(True, "the compiled loops are loaded")
    if not has_compiler:
        return Outcome(True, "no C compiler with Python's headers here: plain loops run")
    return Outcome(False, f"{problem}, and a C compiler is here; `make setup` compiles them")


def problem_here() -> str | None:
    """Why this interpreter does not load the compiled loops, None where it does."""
    if chosen.COMPILED:
        return None
    if os.environ.get(chosen.VARIABLE) == "plain":
        return f"{chosen.VARIABLE}=plain keeps the compiled loops from being loaded"
    for name in chosen.TWINS:
        try:
            module = import_module(f"kvstore.loops.compiled.{name}")
        except ImportError as error:
            return f"the compiled loops are not loaded: {error}"
        if module.REVISION != chosen.REVISION:
            return f"the compiled loops are stale: {name} has revision {module.REVISION}"
    return "the compiled loops are not loaded"


def has_compiler() -> bool:
    """Whether the C compiler of setuptools compiles an extension module here."""
    named = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "empty.c").write_text("#include <Python.h>\n")
        headers = f"-I{sysconfig.get_path('include')}"
        command = [*shlex.split(named), headers, "-c", "empty.c", "-o", "empty.o"]
        try:
            done = subprocess.run(command, cwd=directory, capture_output=True, check=False)
        except OSError:
            return False
        return done.returncode == 0


def main() -> int:
    """Say whether the compiled loops are loaded. The exit status is 1 where they must be."""
    problem = problem_here()
    found = outcome(problem, has_compiler=problem is not None and has_compiler())
    print(f"loops: {found.text}", file=sys.stdout if found.passes else sys.stderr)
    return not found.passes


if __name__ == "__main__":
    sys.exit(main())
