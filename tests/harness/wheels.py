"""Wheels of this tree that are built without a compilation: the modules that were compiled in the
tree are in them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("kvstore", "bulk", "backup", "spark_connector", "pyspark_kvstore")
EXTENSIONS: Final = re.compile(r"\[\[tool\.setuptools\.ext-modules\]\]\n(?:.+\n)+\n")


def source_copy(tmp_path: Path) -> Path:
    """A copy of the sources whose compiled modules are files like others. Compiling them takes a
    minute."""
    source = tmp_path / "source"
    for name in PACKAGES:
        skipped = shutil.ignore_patterns("__pycache__", "*.c")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skipped)
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    settings = EXTENSIONS.sub("", (ROOT / "pyproject.toml").read_text())
    settings = settings.replace('"loops/*.pyx"', '"loops/*.pyx", "loops/*.so"')
    (source / "pyproject.toml").write_text(settings)
    return source


def build(source: Path, kind: str, target: Path) -> None:
    build = f"import setuptools.build_meta as b, sys; print(b.build_{kind}(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", build, str(target)], cwd=source, check=True, capture_output=True
    )
