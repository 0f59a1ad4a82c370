"""`python -m tests.loops.sanitized`: the compiled loops under the sanitizers of the C compiler.

The project is copied to `build/sanitized`. The loops are compiled there with checks of each address
and of each operation that C leaves undefined. The tests that feed arbitrary bytes to the loops run
against this copy. The first finding ends the process with an error. Where the compiler has no
sanitizers, the program says so and does nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent.parent
COPY: Final = ROOT / "build" / "sanitized"
PACKAGES: Final = ("kvstore", "tests")
FLAGS: Final = "-fsanitize=address,undefined -fno-sanitize-recover=all -g -O1"
TESTS: Final = (
    "tests/loops",
    "tests/changes/test_entry.py",
    "tests/verify/test_hostile_entries.py",
    "tests/fuzz",
    "tests/mvcc",
    "tests/tables/test_nested.py",
)

_CHECK: Final = """\
import sys
from kvstore.loops.compiled import LOOPS
modules = [sys.modules[f"kvstore.loops.{name}"] for name in LOOPS]
assert all("sanitized" in module.__file__ for module in modules), modules
"""


_OVERRUN: Final = """\
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
ctypes.string_at(libc.malloc(8), 9)
"""
"""A fault that sanitizers at work report."""


def libraries(compiler: str) -> list[str]:
    """The libraries to load before the interpreter: the sanitizer's runtime, and the library of
    C++, whose exceptions it wraps. Empty where the compiler has no sanitizers."""
    found = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        told = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False
        )
        path = told.stdout.strip()
        if not os.path.isabs(path) or not os.path.exists(path):
            return []
        found.append(os.path.realpath(path))
    return found


def build() -> None:
    """Copy the project, and compile the loops there."""
    shutil.rmtree(COPY, ignore_errors=True)
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
        shutil.copytree(ROOT / package, COPY / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", COPY)
    sources = sorted((COPY / "kvstore" / "loops").glob("*.pyx"))
    subprocess.run(
        [sys.executable, "-m", "Cython.Build.Cythonize", "-i", *map(str, sources)],
        cwd=COPY,
        env={**os.environ, "CFLAGS": FLAGS, "LDFLAGS": FLAGS},
        check=True,
    )


def main() -> int:
    """Build, check that the build is imported, and run the tests."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    preloaded = libraries(compiler) if shutil.which(compiler) else []
    if not preloaded:
        print("sanitize: the C compiler has no sanitizers here; the loops did not run under them")
        return 0
    build()
    environment = {
        **os.environ,
        "PYTHONPATH": str(COPY),
        # so that each object has an allocation of its own, whose end is checked
        "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter frees much memory only at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }

    def run(*command: str, **options: Any) -> int:
        words = [sys.executable, *command]
        return subprocess.run(words, cwd=COPY, env=environment, check=False, **options).returncode

    if run("-c", _CHECK) or not run("-c", _OVERRUN, stderr=subprocess.DEVNULL):
        print("sanitize: the copy does not run under the sanitizers")
        return 1
    failed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *sys.argv[1:])
    print("sanitize: see above" if failed else "sanitize: nothing found")
    return failed


if __name__ == "__main__":
    sys.exit(main())
