"""A standalone cluster of Spark on this machine: a master, workers and drivers, each a process.

    <root>/shared        every machine sees it
    <root>/driver        the directory of drivers; workers see it empty, where a mount can hide it
    <root>/environment   the Python of the executors: what kvstore needs, without kvstore
    <root>/worker-0 ...  the directories of workers

Where the tests have the rights for it (root on Linux), each worker runs in a mount namespace of its
own, with an empty file system over `<root>/driver`, and over `<root>/shared` where the cluster
shares nothing. Elsewhere `hides` is false, and workers see everything.

Invariants
1. Each process of the cluster has its own directory, also for temporary files: a relative path
   means another place in each.
2. All processes end with the cluster: each leads a process group, and the group is killed.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyspark

from kvstore.spark.java import java_for_spark
from tests.harness.wheels import ROOT, build, source_copy

WAIT_S: Final = 180.0
"""A bound of each wait; a loaded machine starts a JVM in ten seconds."""

_FAST: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java options for a JVM that lives for seconds."""

_HERE: Final = {"SPARK_LOCAL_IP": "127.0.0.1"}
_MASTER: Final = "org.apache.spark.deploy.master.Master"
_WORKER: Final = "org.apache.spark.deploy.worker.Worker"
_ADDRESS: Final = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED: Final = "Successfully registered with master"


@dataclass
class Cluster:
    """A running cluster. `hides` tells whether workers cannot see the directory of drivers, and the
    shared one if `shares` is false."""

    root: Path
    master: str = ""
    hides: bool = False
    shares: bool = True
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_workers(self, count: int, *, cores: int = 1) -> None:
        """Start workers, and wait until the master knows them."""
        logs = []
        for _ in range(count):
            directory = f"worker-{len(self.workers)}"
            options = ["--cores", str(cores), "--memory", "1g", "--webui-port", "0"]
            work = ["--work-dir", str(self.root / directory), self.master]
            hiding = [self.driver, *([] if self.shares else [self.shared])] if self.hides else []
            logs.append(_start(self, directory, [_WORKER, *options, *work], hiding=hiding))
            self.workers.append(self.processes[-1])
        for log in logs:
            _found(log, re.compile(_REGISTERED), self)

    def kill_worker(self, pick: random.Random) -> None:
        """Kill a worker with its executors, and start another one in its place."""
        running = [each for each in self.workers if each.poll() is None]
        killed = pick.choice(running)
        end_group(killed)
        self.processes.remove(killed)
        self.start_workers(1)

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    @property
    def driver(self) -> Path:
        return self.root / "driver"

    @property
    def python(self) -> Path:
        """The Python of the executors."""
        return self.root / "environment" / "bin" / "python"

    def settings(self) -> dict[str, str]:
        """The settings of a session on this cluster, without the library on its executors."""
        return {
            "spark.master": self.master,
            "spark.pyspark.python": str(self.python),
            "spark.pyspark.driver.python": sys.executable,
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.driver.extraJavaOptions": _FAST,
            "spark.executor.extraJavaOptions": _FAST,
            "spark.ui.enabled": "false",
            "spark.task.maxFailures": "8",
            "spark.deploy.maxExecutorRetries": "-1",  # an application survives any number of kills
            "spark.sql.shuffle.partitions": "4",
        }

    def start_driver(
        self, module: str, *arguments: str, **environment: str
    ) -> subprocess.Popen[str]:
        """Run a module of the tests as a driver, in the directory of drivers."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=self.driver,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "SPARK_LOCAL_IP": "127.0.0.1",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def stop(self) -> None:
        for process in reversed(self.processes):
            end_group(process)


def end_group(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kill a process and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def running(workers: int = 2, *, cores: int = 1, shares: bool = True) -> Iterator[Cluster]:
    """A cluster with `workers` workers, for the time of the block."""
    root = Path(tempfile.mkdtemp(prefix="kvc-"))
    cluster = Cluster(root, shares=shares)
    try:
        for directory in (cluster.shared, cluster.driver):
            directory.mkdir()
        make_environment(root / "environment")
        cluster.hides = _may_mount()
        log = _start(cluster, "master", [_MASTER, "--port", "0", "--webui-port", "0"])
        cluster.master = _found(log, _ADDRESS, cluster)[1]
        cluster.start_workers(workers, cores=cores)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


def library_zip(
    path: Path, *, left_out: tuple[str, ...] = (".pyc", ".c", ".pyi", ".pyx", ".pxi", ".md")
) -> Path:
    """The library as a wheel installs it, with its compiled modules, as an archive that Spark
    unpacks: `kvstore` has the other packages inside."""
    with zipfile.ZipFile(path, "w") as archive:
        for package in ("kvstore", "pyspark_kvstore"):
            for directory, _, names in os.walk(ROOT / package, followlinks=True):
                for name in sorted(names):
                    if not name.endswith(left_out):
                        file = Path(directory, name)
                        archive.write(file, file.relative_to(ROOT))
    return path


def install_wheel(cluster: Cluster) -> Path:
    """A Python for executors into which a wheel of this tree is installed."""
    place = cluster.root / "installed"
    site = make_environment(place / "environment")
    build(source_copy(place), "wheel", place)
    (wheel,) = place.glob("*.whl")
    options = ["-q", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    return place / "environment" / "bin" / "python"


def make_environment(directory: Path) -> Path:
    """A Python that imports the packages installed here, but nothing of an editable install: a line
    of a `.pth` file adds a directory, and leaves the `.pth` files in there alone. Returns the
    directory of its packages."""
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return site


def _may_mount() -> bool:
    try:
        done = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"],
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0


def _start(
    cluster: Cluster, name: str, arguments: Sequence[str], *, hiding: Sequence[Path] = ()
) -> Path:
    directory = cluster.root / name
    (directory / "tmp").mkdir(parents=True)
    home = Path(pyspark.__file__).parent
    java = [str(java_for_spark().home / "bin" / "java"), "-Xmx256m", *_FAST.split()]
    command = [*java, "-cp", f"{home}/jars/*", arguments[0]]
    command += ["--host", "127.0.0.1", *arguments[1:]]
    if hiding:
        script = " && ".join([*(f'mount -t tmpfs none "{each}"' for each in hiding), 'exec "$@"'])
        command = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
    log = directory / "log"
    with log.open("wb") as output:
        cluster.processes.append(
            subprocess.Popen(
                command,
                cwd=directory,
                env={**_plain_environment(home), "TMPDIR": str(directory / "tmp")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        )
    return log


def _plain_environment(home: Path) -> dict[str, str]:
    """The environment of another machine: nothing of this tree and its tests."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    (core,) = home.glob("jars/spark-core_*.jar")
    return {
        **kept,
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(java_for_spark().home),
        # Spark's own scripts derive it from the directories of a release.
        "SPARK_SCALA_VERSION": core.name.partition("_")[2].partition("-")[0],
    }


def _found(log: Path, wanted: re.Pattern[str], cluster: Cluster) -> re.Match[str]:
    until = time.monotonic() + WAIT_S
    while True:
        found = wanted.search(log.read_text(errors="replace"))
        if found is not None:
            return found
        if time.monotonic() > until or any(each.poll() is not None for each in cluster.processes):
            raise AssertionError(log.read_text(errors="replace")[-4000:])
        time.sleep(0.05)
