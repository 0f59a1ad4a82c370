"""Wheels of this tree, built without a C compiler: their loops are the plain ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("kvstore", "bulk", "backup", "spark_connector", "pyspark_kvstore")


def source_copy(tmp_path: Path) -> Path:
    """A copy of the sources, in which no C compiler is needed."""
    source = tmp_path / "source"
    for name in PACKAGES:
        skipped = shutil.ignore_patterns("__pycache__", "*.so", "*.c", "*.pyx", "*.pxi")
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Compiling takes half a minute and is optional. Here the compiler fails at once.
    for path in (ROOT / "kvstore" / "loops" / "compiled").glob("*.p[xy][xi]"):
        (source / path.relative_to(ROOT)).touch()
    return source


def build(source: Path, kind: str, target: Path) -> None:
    build = f"import setuptools.build_meta as b, sys; print(b.build_{kind}(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", build, str(target)],
        cwd=source,
        env={**os.environ, "CC": "false"},
        check=True,
        capture_output=True,
    )
