"""Spark on a cluster: executors with directories of their own, with the library or without it.

`make test` runs a short form, `make cluster` all.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.again import DONE, KINDS, UNDER_WAY
from tests.cluster.cluster import Cluster, end_group, install_wheel, library_zip, running
from tests.cluster.driver import KILLS
from tests.harness.seeds import seed_of

DRIVER_S_MAX = 900
"""The longest life of a driver; a quiet machine needs a minute for the longest."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running() as started:
        library_zip(started.root / "library.zip")
        yield started


def drive(cluster: Cluster, *scenarios: str, **settings: str) -> dict[str, Any]:
    """Run scenarios of tests/cluster/driver.py; their results."""
    given = {**cluster.settings(), **settings}
    driver = cluster.start_driver(
        "tests.cluster.driver", json.dumps(given), str(cluster.shared), *scenarios
    )
    try:
        out, errors = driver.communicate(timeout=DRIVER_S_MAX)
    finally:
        end_group(driver)
    sys.stderr.write(errors.partition("\n")[0] + "\n")  # the seed
    assert driver.returncode == 0, errors[-6000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def shipped(cluster: Cluster) -> dict[str, str]:
    """The settings that ship the library as an archive, as docs/how-to/spark-cluster.md says."""
    return {
        "spark.archives": f"{cluster.root / 'library.zip'}#kvstore_library",
        "spark.executorEnv.PYTHONPATH": "kvstore_library",
    }


@pytest.mark.cluster
def test_work_on_a_cluster_with_a_shared_directory_survives_a_killed_executor(
    cluster: Cluster,
) -> None:
    found = drive(cluster, "loads", **shipped(cluster))["loads"]
    assert found["rows"] == found["streamed"] == 3000


@pytest.mark.cluster
def test_executors_with_an_installed_wheel_do_the_same_work(cluster: Cluster) -> None:
    python = str(install_wheel(cluster))
    found = drive(cluster, "loads", **{"spark.pyspark.python": python})["loads"]
    assert found["rows"] == found["streamed"] == 3000


@pytest.mark.cluster
def test_directories_that_workers_do_not_see_are_refused_in_one_line(cluster: Cluster) -> None:
    if not cluster.hides:
        pytest.skip("mounts need root, and here workers see every directory")
    errors = drive(cluster, "hidden", **shipped(cluster))["hidden"]
    assert sorted(errors) == ["collection", "copy", "ordered", "read", "restore", "staging"]
    for name, error in errors.items():
        assert "does not see" in error, name
        assert str(cluster.driver) in error, name


@pytest.mark.cluster
def test_executors_without_the_library_are_reported_in_one_line(cluster: Cluster) -> None:
    errors = drive(cluster, "bare")["bare"]
    for error in errors.values():
        assert "executors cannot import the library: No module named" in error
        assert "\n" not in error


@pytest.mark.cluster
def test_executors_with_sources_alone_are_told_what_they_lack(cluster: Cluster) -> None:
    sources = library_zip(cluster.root / "sources.zip", left_out=(".so", ".pyc", ".c"))
    errors = drive(cluster, "bare", **{"spark.submit.pyFiles": str(sources)})["bare"]
    for error in errors.values():
        assert "executors have sources without compiled modules" in error
        assert "No module named 'kvstore.loops.blocks'; install a wheel" in error
        assert "\n" not in error


@pytest.mark.cluster
def test_a_job_whose_driver_died_is_run_again_while_workers_die(cluster: Cluster) -> None:
    """Each kind of work runs twice: its driver is killed, and then a worker with its executors."""
    pick = random.Random(seed_of("KVSTORE_CLUSTER_DRIVER_SEED"))
    killed = 0
    for kind in KINDS:
        driver, seen = under_way(cluster, kind, "killed", pick)
        end_group(driver)
        assert driver.stdout is not None
        killed += DONE not in seen + driver.stdout.read()
        driver, _ = under_way(cluster, kind, "again", pick)
        cluster.kill_worker(pick)
        try:
            _, errors = driver.communicate(timeout=DRIVER_S_MAX)
        finally:
            end_group(driver)
        assert driver.returncode == 0, f"{kind}: {errors[-6000:]}"
    assert killed, "each driver had ended before it was killed"


def under_way(
    cluster: Cluster, kind: str, attempt: str, pick: random.Random
) -> tuple[subprocess.Popen[str], str]:
    """A driver that has begun its work, or has ended it, and its output so far."""
    settings = json.dumps({**cluster.settings(), **shipped(cluster)})
    shared, tasks = str(cluster.shared), str(pick.randrange(4))
    driver = cluster.start_driver("tests.cluster.again", settings, shared, kind, attempt, tasks)
    assert driver.stdout is not None
    line = driver.stdout.readline()
    if line.strip() not in (UNDER_WAY, DONE):
        end_group(driver)
        raise AssertionError(f"{kind}: {driver.communicate()[1][-6000:]}")
    return driver, line


@pytest.mark.cluster
def test_executors_that_die_in_every_kind_of_work_change_no_result(cluster: Cluster) -> None:
    kills = drive(cluster, "kills", **shipped(cluster))["kills"]
    assert sorted(kills) == ["backup", "compact", "import", "restore", "stream"]
    assert min(kills.values()) >= KILLS, kills
