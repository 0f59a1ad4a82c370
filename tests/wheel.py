"""What a release uploads: the source archive, the wheel that is built from it, and tests of the
wheel where nothing else of this tree is found.

    python -m tests.wheel [TARGET [WITH]]  build both into TARGET (dist), judge them, test the wheel
    python -m tests.wheel --installed      run the tests with this Python, which has the wheel
    python -m tests.wheel --bill [TARGET]  write what the release is made of, and its checksums

WITH is `pinned` (the versions of constraints.txt), `oldest` (the lower bounds of pyproject.toml, as
uv resolves them) or `newest` (what pip takes).

The wheel is built from the unpacked archive in an empty directory, so a file that the archive
lacks is missed here. The installed wheel runs in a new environment; `tests/` is copied beside
nothing, so `import kvstore` finds the wheel alone. pip takes the dependencies from where it is
set up to take them.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

TOP_LEVEL: Final = {"kvstore", "pyspark_kvstore", "spark_connector"}
"""The import names of the distribution. None of them is a word that others would use."""

WHEEL_BYTES_MAX: Final = 8 << 20
ARCHIVE_BYTES_MAX: Final = 8 << 20
"""The budget: a wheel has 14 compiled modules, 0.3 MB each unpacked."""

PARTS: Final = ("codec", "commit", "loops", "mvcc", "stateful", "store", "txn", "verify")
EXTRAS: Final = "server,testing,metrics"
PIP: Final = ("-m", "pip", "--disable-pip-version-check", "-q")


def main(target: Path, versions: str) -> None:
    """Build, judge and test beside dependencies of these versions."""
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch)
        archive, wheel = built(target, empty)
        print(f"{archive.name}: {archive.stat().st_size:,} bytes")
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
        judge(archive, wheel)
        python = installed(wheel, empty / "environment", versions)
        beside = empty / "beside"
        shutil.copytree(ROOT / "tests", beside / "tests", symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", beside)
        run(python, "-m", "tests.wheel", "--installed", cwd=beside)


def built(target: Path, scratch: Path) -> tuple[Path, Path]:
    """The source archive of this tree, and the wheel that its files make."""
    target.mkdir(parents=True, exist_ok=True)
    for old in [*target.glob("kvstore_mvcc-*.tar.gz"), *target.glob("kvstore_mvcc-*.whl")]:
        old.unlink()
    hook = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-W", "ignore", "-c", hook, str(target.absolute()), cwd=ROOT)
    (archive,) = target.glob("kvstore_mvcc-*.tar.gz")
    with tarfile.open(archive) as held:
        held.extractall(scratch / "source")
    (source,) = (scratch / "source").iterdir()
    into = ("-w", str(target.absolute()), str(source))
    pins = ("--build-constraint", "constraints.txt")
    run(sys.executable, *PIP, "wheel", "--no-deps", *pins, *into, cwd=ROOT)
    (wheel,) = target.glob("kvstore_mvcc-*.whl")
    return archive, wheel


def judge(archive: Path, wheel: Path) -> None:
    """Refuse a generic import name, files that are not ours to install, and too many bytes."""
    with zipfile.ZipFile(wheel) as held:
        names = [name for name in held.namelist() if ".dist-info/" not in name]
    found = {name.split("/")[0] for name in names}
    assert found == TOP_LEVEL, f"import names {found}"
    modules = {Path(name).name.split(".")[0] for name in names if name.endswith(".so")}
    sources = {path.stem for path in (ROOT / "kvstore" / "loops").glob("*.pyx")}
    assert modules == sources, f"compiled {sorted(modules ^ sources)}"
    assert not [name for name in names if name.endswith(".c")]
    assert wheel.stat().st_size < WHEEL_BYTES_MAX, "beyond the budget of a wheel"
    assert archive.stat().st_size < ARCHIVE_BYTES_MAX, "beyond the budget of an archive"


def installed(wheel: Path, place: Path, versions: str) -> str:
    """The Python of a new environment that has the wheel."""
    venv.create(place, with_pip=True)
    python = str(place / "bin" / "python")
    run(python, *PIP, "install", "-c", "constraints.txt", "pip", cwd=ROOT)
    wanted = ("--group", "wheel", f"{wheel.absolute()}[{EXTRAS}]")
    if versions == "oldest":
        run(python, *PIP, "install", "uv", cwd=ROOT)
        lowest = ("--resolution", "lowest-direct", "--python", python)
        # uv takes the lower bounds of what it is asked for itself, and not of what a wheel names.
        run(python, "-m", "uv", "pip", "install", "-q", *lowest, *wanted, *named(), cwd=ROOT)
    else:
        pins = ("-c", "constraints.txt") if versions == "pinned" else ()
        run(python, *PIP, "install", *pins, *wanted, cwd=ROOT)
    run(str(place / "bin" / "kvstore"), "--version", cwd=place)
    return python


def named() -> list[str]:
    """What the distribution and the extras that are tested depend on, with their bounds."""
    extras = [f'extra == "{name}"' for name in EXTRAS.split(",")]
    found = [each.partition("; ") for each in metadata.requires("kvstore-mvcc") or ()]
    return [each for each, _, when in found if not when or when in extras]


def test_installed() -> int:
    """Run the tests with this Python, from the directory that has `tests`. Returns pytest's
    status."""
    import kvstore

    here, beside = Path(kvstore.__file__), Path.cwd()
    assert not here.is_relative_to(beside), f"{here} is beside the tests, and not installed"
    print(f"testing {here.parent}", flush=True)
    parts = [f"tests/{part}" for part in PARTS]
    spark = "tests/codec/test_tuples.py::test_whole_columns_are_encoded_as_rows_are"
    passed_over = ["--deselect", spark]  # it compares with Spark, which is not installed there
    # Dependencies may deprecate each other: a warning is an error where they are pinned.
    how = ("-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning")
    command = [sys.executable, "-m", "pytest", *how, *passed_over, *parts]
    return subprocess.run(command, check=False).returncode


def bill(target: Path) -> None:
    """Write a bill of materials in the form of CycloneDX, of the wheel with all that it needs, as
    pinned; and `SHA256SUMS` of all files, which `sha256sum -c` reads."""
    wheel = sorted(target.glob("kvstore_mvcc-*.whl"))[0]
    with tempfile.TemporaryDirectory() as scratch:
        place, tool = Path(scratch, "environment"), Path(scratch, "tool")
        for each, wanted in ((place, str(wheel.absolute())), (tool, "cyclonedx-bom")):
            venv.create(each, with_pip=True)
            pins = ("-c", "constraints.txt") if each is place else ()
            run(str(each / "bin" / "python"), *PIP, "install", *pins, wanted, cwd=ROOT)
        run(str(place / "bin" / "python"), *PIP, "uninstall", "-y", "pip", "setuptools", cwd=ROOT)
        name = "-".join(wheel.name.split("-")[:2])
        made = ("--of", "JSON", "-o", str(target.absolute() / f"{name}.cdx.json"))
        listed = (str(place / "bin" / "python"), "--pyproject", "pyproject.toml")
        run(str(tool / "bin" / "cyclonedx-py"), "environment", *made, *listed, cwd=ROOT)
    sums = target / "SHA256SUMS"
    sums.unlink(missing_ok=True)
    files = sorted(path for path in target.iterdir() if path.is_file())
    sums.write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))


def sha256(path: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(*command: str, cwd: Path) -> None:
    """Run a program to its end. Raises `CalledProcessError` unless it succeeds."""
    subprocess.run(command, cwd=cwd, check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--installed"]:
        sys.exit(test_installed())
    if sys.argv[1:2] == ["--bill"]:
        bill(Path(*sys.argv[2:] or ["dist"]))
        sys.exit()
    target, versions = [*sys.argv[1:], *("dist", "pinned")[len(sys.argv) - 1 :]]
    if versions not in ("pinned", "oldest", "newest"):
        sys.exit(f"{versions}: pass pinned, oldest or newest")
    main(Path(target), versions)
