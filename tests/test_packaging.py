"""The installed project: one name, the version, wheels without stale files."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import kvstore
from tests.harness.wheels import ROOT, build, source_copy


def test_the_version_is_the_distributions() -> None:
    assert kvstore.__version__ == version("kvstore-mvcc")


def test_the_model_needs_neither_pytest_nor_hypothesis() -> None:
    refuse = "import sys; sys.modules.update(dict.fromkeys(('pytest', 'hypothesis')))"
    command = f"{refuse}; from kvstore.testing import model"
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True)


def test_spark_connector_is_a_second_name_of_the_same_objects() -> None:
    import spark_connector
    from kvstore import spark

    assert spark_connector.__all__ == spark.__all__
    assert all(getattr(spark_connector, name) is getattr(spark, name) for name in spark.__all__)


@pytest.mark.parametrize("stranger", ["bulk", "backup"])
@pytest.mark.parametrize("form", ["package", "script"])
def test_a_foreign_package_of_a_generic_name_does_no_harm(
    tmp_path: Path, stranger: str, form: str
) -> None:
    file = tmp_path / (f"{stranger}.py" if form == "script" else f"{stranger}/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise RuntimeError('a stranger')\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    subprocess.run(
        [sys.executable, "-c", "from kvstore import bulk, backup; bulk.Import; backup.Collection"],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        check=True,
    )


def test_spark_finds_the_format_of_an_editable_install(tmp_path: Path) -> None:
    """Spark lists the modules on the path whose names begin with `pyspark_`. A finder of an
    editable install lists none."""
    source = source_copy(tmp_path)
    build(source, "editable", tmp_path)
    (wheel,) = tmp_path.glob("kvstore_mvcc-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); import pkgutil"
    names = "print([each.name for each in pkgutil.iter_modules() if 'spark_kv' in each.name])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{code}; {names}"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['pyspark_kvstore']\n"


def test_a_wheel_holds_no_file_of_an_earlierbuild(tmp_path: Path) -> None:
    source = source_copy(tmp_path)
    deleted = source / "kvstore" / "deleted.py"
    deleted.touch()
    build(source, "wheel", tmp_path / "first")
    deleted.unlink()
    build(source, "wheel", tmp_path)
    (wheel,) = tmp_path.glob("kvstore_mvcc-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {"spark_connector/__init__.py", "spark_connector/py.typed"} | {
        os.path.relpath(os.path.join(at, name), source)
        for package in ("kvstore", "pyspark_kvstore")
        for at, _, names in os.walk(source / package, followlinks=True)
        for name in names
        if name.endswith((".py", ".pyi", ".pyx", ".pxi", ".h", ".so"))
        or name == "py.typed"
        or os.path.basename(at) in ("options", "files")
    }
    assert {name.split("/")[0] for name in held} == {
        "kvstore",
        "pyspark_kvstore",
        "spark_connector",
    }
    assert held == expected


def run_without_compiler(source: Path, *command: str, **environment: str) -> tuple[int, list[str]]:
    """The exit status and the lines of a program that finds no program on its path."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=source,
        env={"PATH": str(source), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_a_build_without_a_compiler_asks_for_one_or_says_what_it_lacks(tmp_path: Path) -> None:
    source = source_copy(tmp_path)
    status, lines = run_without_compiler(source, "setup.py", "-q", "build_ext", CC="false")
    assert (status, len(lines)) == (1, 1)
    assert "no C compiler, which its loops need; install one (Debian and Ubuntu: apt" in lines[0]
    if sys.platform == "linux":
        hook = "import setuptools.build_meta as b; print(b.get_requires_for_build_wheel())"
        status, lines = run_without_compiler(source, "-c", hook)
        assert (status, lines[-1]) == (0, "['ziglang']")
        status, lines = run_without_compiler(source, "setup.py", "-q", "compiler")
        assert (status, len(lines)) == (0, 1)
        assert "no C compiler here; this build fetches one, the package ziglang" in lines[0]
    status, lines = run_without_compiler(
        source, "setup.py", "-q", "compiler", CC=f"{sys.executable} -c ''"
    )
    assert (status, lines) == (0, [])
