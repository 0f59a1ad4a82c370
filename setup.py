"""Compiles the loops, and builds from an empty directory. All else stands in pyproject.toml.

The loops need a C compiler and Python's headers. Where Linux has no C compiler, the build asks the
installer for the package `ziglang`, which brings one: it lies in the environment of the build
alone, and compiles for any processor of this kind.

`python setup.py -q compiler` tells which compiler a build would take.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

DEBIAN = "Debian and Ubuntu: apt-get install"
ZIG = f"{shlex.quote(sys.executable)} -m ziglang cc -mcpu=baseline"


def compiles(compiler: str) -> bool:
    """Whether the command `compiler` makes a program's object file of C."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "some.c").write_text("#include <stdlib.h>\n")
        command = [*shlex.split(compiler), "-c", "some.c", "-o", "some.o"]
        try:
            done = subprocess.run(command, cwd=directory, capture_output=True, check=False)
        except OSError:
            return False
        return done.returncode == 0


def is_ready() -> bool:
    """Whether a C compiler is here. Other systems than Linux and macOS are left to setuptools."""
    named = os.environ.get("CC") or sysconfig.get_config_var("CC")
    return named is None or compiles(named)


def takes_zig() -> bool:
    """Whether the compiler of `ziglang` takes the place of one that is missing. A compiler that the
    caller has named in CC is not replaced."""
    return sys.platform == "linux" and "CC" not in os.environ and not is_ready()


def require_headers() -> None:
    """End the program where this Python has no headers."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        sys.exit(
            f"kvstore: {headers} is missing; install the headers of this Python "
            f"({DEBIAN} python3-dev), then build again"
        )


def require_compiler() -> None:
    """Have a C compiler for the commands of setuptools. Ends the program where there is none."""
    require_headers()
    if is_ready():
        return
    if not takes_zig() or find_spec("ziglang") is None:
        sys.exit(
            f"kvstore: no C compiler, which its loops need; install one ({DEBIAN} gcc libc6-dev) "
            "or name one in CC, then build again"
        )
    os.environ["CC"] = ZIG
    # Debian's Python names flags of its linker, of which zig refuses some.
    os.environ["LDSHARED"] = f"{ZIG} -shared"
    # Its caches go with the build, and not to the user's directory.
    cache = tempfile.mkdtemp(prefix="kvstore-build-")
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = os.environ["ZIG_LOCAL_CACHE_DIR"] = cache


class Compiler(Command):
    """Say which compiler a build takes, if it is not the usual one."""

    description = "tell which C compiler the loops are compiled with"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        require_headers()
        if takes_zig():
            sys.stdout.write(
                "kvstore: no C compiler here; this build fetches one, the package ziglang "
                f"(100 MB), and does not keep it ({DEBIAN} gcc libc6-dev gives one to keep)\n"
            )
        else:
            require_compiler()


class CompiledLoops(build_ext):
    """`build_ext` that names what it lacks before it begins."""

    def run(self) -> None:
        require_compiler()
        try:
            super().run()
        finally:
            if cache := os.environ.pop("ZIG_GLOBAL_CACHE_DIR", None):
                shutil.rmtree(cache, ignore_errors=True)


class OneName(build_py):
    """Installs `spark_connector` as a second name of `kvstore.spark`, which has the modules."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if package != "spark_connector" or each[1] == "__init__"]


class CleanBuild(build):
    """`build` that begins with nothing.

    setuptools copies into `build/` and never removes from there: a module that was deleted since,
    or a compiled file of older sources, would be in the next wheel.
    """

    def run(self) -> None:
        shutil.rmtree(self.build_base, ignore_errors=True)
        super().run()


# An installer asks `build_meta` for this list. Without an installer setuptools would install the
# list by itself, into this directory.
asks = "setuptools.build_meta" in sys.modules
setup(
    cmdclass={
        "build": CleanBuild,
        "build_py": OneName,
        "build_ext": CompiledLoops,
        "compiler": Compiler,
    },
    setup_requires=["ziglang"] if asks and takes_zig() else [],
)
