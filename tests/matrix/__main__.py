"""Each release of PySpark that the library runs on, in an environment of its own: `make
spark-matrix`.

    python -m tests.matrix DIRECTORY [PYTHON-PYSPARK...]

Each pair of a Python and a PySpark gets an environment in the directory, with the library's other
dependencies, and runs `tests.matrix.scenario` in a classic session and by Spark Connect. A Python
that this machine lacks is reported and left out. The loops are compiled in this tree, once for each
Python. Without names such as `3.13-4.2.1` all pairs are run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAIRS: Final = (
    ("3.10", "3.5.9"),
    ("3.11", "3.5.9"),
    ("3.10", "4.0.5"),
    ("3.13", "4.0.5"),
    ("3.11", "4.1.4"),
    ("3.13", "4.1.4"),
    ("3.10", "4.2.1"),
    ("3.11", "4.2.1"),
    ("3.13", "4.2.1"),
    ("3.11", "4.3.0"),
    ("3.12", "4.3.0"),
    ("3.13", "4.3.0"),
)
KINDS: Final = ("classic", "connect")
CONNECT: Final = 4
"""The first major release whose Spark Connect the library runs on."""
SECONDS_MAX: Final = 1800


def needed(release: str) -> list[str]:
    """The requirements of an environment: a release of PySpark, and what else the library needs."""
    import tomllib  # Python 3.11 has it, and make test runs on 3.10 too

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["spark"]
    others = [each for each in extra if not each.startswith("pyspark")]
    spark = f"pyspark[connect]=={release}" if _has_connect(release) else f"pyspark=={release}"
    return [spark, *project["dependencies"], *others, "pytest", "setuptools", "cython"]


def _has_connect(release: str) -> bool:
    return int(release.partition(".")[0]) >= CONNECT


def python_of(version: str) -> str | None:
    """A Python of this version that runs, found by its name on the path, or by pyenv."""
    installed = Path.home() / ".pyenv" / "versions"
    found = [str(each) for each in sorted(installed.glob(f"{version}.*/bin/python"))]
    for name in (shutil.which(f"python{version}"), *found):
        if name is not None:
            done = subprocess.run([name, "-c", ""], capture_output=True, check=False)
            if done.returncode == 0:
                return name
    return None


def environment(directory: Path, python: str, release: str) -> Path:
    """The Python of an environment with this release. It is made once."""
    ready = directory / "ready"
    path = directory / "bin" / "python"
    if not ready.exists():
        subprocess.run([python, "-m", "venv", "--clear", str(directory)], check=True)
        quiet = ["-q", "--disable-pip-version-check"]
        subprocess.run([str(path), "-m", "pip", "install", *quiet, *needed(release)], check=True)
        compile_loops = [str(path), "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(compile_loops, cwd=ROOT, check=True)
        ready.touch()
    return path


def main(directory: str, *names: str) -> int:
    pairs = {f"{version}-{release}": (version, release) for version, release in PAIRS}
    failed = 0
    for name in names or pairs:
        version, release = pairs[name]
        python = python_of(version)
        if python is None:
            print(f"spark-matrix: no Python {version} here; PySpark {release} is left out on it")
            continue
        path = environment(Path(directory).absolute() / name, python, release)
        for kind in KINDS if _has_connect(release) else KINDS[:1]:
            command = [str(path), "-m", "tests.matrix.scenario", kind]
            given = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, env=given, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
            )
            if done.returncode:
                failed += 1
                print(f"{kind}: PySpark {release}, Python {version}: failed\n{done.stderr[-4000:]}")
            print(done.stdout, end="", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
