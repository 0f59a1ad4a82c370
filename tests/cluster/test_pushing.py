"""Pushes and imports of a cluster through a bucket that misbehaves; nothing else is shared.

Executors, drivers and pullers are killed, the bucket is slow, answers 503 and loses answers.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.pushes.pull import Puller
from tests.cluster import pushing
from tests.cluster.cluster import Cluster, end_group, library_zip, running
from tests.cluster.test_cluster import DRIVER_S_MAX, drive, shipped
from tests.harness.proxy import Answer, Proxy, Request
from tests.harness.seeds import seed_of
from tests.harness.wheels import ROOT
from tests.shard.conftest import s3_options, s3_server

__all__ = ["s3_server"]

pytestmark = pytest.mark.cluster

KILLS_MAX = 12
"""Kills of pullers in one test, so that a slow machine ends too."""

_PUSH = "from kvstore.bulk.pushes.cli import app; app()"
"""The command `kvstore push`, also where this tree is not installed."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running(shares=False) as started:
        library_zip(started.root / "library.zip")
        yield started


@pytest.fixture(scope="module")
def proxy(s3_server: str) -> Iterator[Proxy]:
    made = urllib.request.Request(f"{s3_server}/{pushing.BUCKET}", method="PUT")
    urllib.request.urlopen(made).close()
    with Proxy(s3_server) as started:
        yield started


def found_by(proxy: Proxy) -> dict[str, str]:
    """The variables by which a process finds the bucket."""
    options = s3_options(proxy.url)
    endpoint = {"AWS_ENDPOINT_URL": options.pop("endpoint")}
    return endpoint | {f"AWS_{name.upper()}": value for name, value in options.items()}


def settings(cluster: Cluster, proxy: Proxy) -> dict[str, str]:
    named = {f"spark.executorEnv.{name}": value for name, value in found_by(proxy).items()}
    return {**shipped(cluster), **named}


class Storm:
    """Weather that fails a fifth of the requests, and keeps one in fifty waiting."""

    def __init__(self, pick: random.Random) -> None:
        self._pick, self._lock = pick, threading.Lock()

    def __call__(self, request: Request) -> Answer:
        with self._lock:
            fate, late_s = self._pick.random(), self._pick.uniform(0, 0.02)
        time.sleep(2.0 if 0.5 < fate < 0.52 else late_s)
        if fate < 0.1:
            return Answer.BUSY
        return Answer.LOST if fate < 0.2 else Answer.WHOLE


class Pullers:
    """`kvstore push pull` for each store, in directories of their own."""

    def __init__(self, root: Path, proxy: Proxy) -> None:
        self._root = root
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **found_by(proxy)}
        self._starts = [0] * pushing.SHARDS
        self._running = [self._start(shard) for shard in range(pushing.SHARDS)]
        self.kills = 0

    def store(self, shard: int) -> Path:
        return self._root / pushing.NAMES[shard] / "store"

    def kill(self, pick: random.Random) -> None:
        """Kill a puller that has opened its store, and start it again."""
        shard = pick.randrange(pushing.SHARDS)
        log = self._log(shard).read_text()
        assert self._running[shard].poll() is None, log[-2000:]
        if log.count("follows") == self._starts[shard] and self.kills < KILLS_MAX:
            end_group(self._running[shard])
            self.kills += 1
            self._running[shard] = self._start(shard)

    def stop(self) -> None:
        for each in self._running:
            end_group(each)

    def _start(self, shard: int) -> subprocess.Popen[bytes]:
        self._starts[shard] += 1
        name = pushing.NAMES[shard]
        directory = self._root / name
        directory.mkdir(exist_ok=True)
        command = ["pull", "store", pushing.URL, "--name", name, "--shard", str(shard)]
        with self._log(shard).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _PUSH, *command, "--create", "--every", "1s"],
                cwd=directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log(self, shard: int) -> Path:
        return self._root / f"{pushing.NAMES[shard]}.log"


def pushes_at(url: str, proxy: Proxy) -> bulk.Pushes:
    return bulk.Pushes(url, options=s3_options(proxy.url))


def test_a_twin_of_a_task_that_the_bucket_keeps_waiting_adds_nothing(
    cluster: Cluster, proxy: Proxy
) -> None:
    """The bucket keeps one of two tasks waiting until its speculative twin has sent a part."""
    names: list[str] = []
    has_twin = threading.Condition()

    def keep_waiting(request: Request) -> Answer:
        name = request.path.partition("?")[0]
        if request.method == "PUT" and name.endswith(".sst"):
            with has_twin:
                if name not in names:
                    names.append(name)
                    has_twin.notify_all()
                if name == names[0]:  # also where its client sends it again
                    assert has_twin.wait_for(lambda: len(names) > 2, DRIVER_S_MAX)
        return Answer.WHOLE

    proxy.weather = keep_waiting
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.minTaskRuntime": "100ms",
    }
    given = {**settings(cluster, proxy), **speculation}
    found = drive(cluster, "straggling", **given)["straggling"]
    assert found == {"number": 1, "rows": pushing.ROWS}
    assert len(names) == 3
    pushes = pushes_at(pushing.STRAGGLED_URL, proxy)
    with kvstore.open(None, engine="memory") as store:
        puller = Puller(store, pushes, name="straggled")
        while puller.step():
            pass
        assert dict(store.scan()) == pushing.model(1)


def test_an_import_and_a_read_through_the_bucket_have_all_rows_whoever_is_killed(
    cluster: Cluster, proxy: Proxy
) -> None:
    seed = seed_of("KVSTORE_PUSHING_SEED")
    proxy.weather = Storm(random.Random(seed))
    found = drive(cluster, "staged", **settings(cluster, proxy))["staged"]
    assert found["kills"]
    assert list(cluster.shared.iterdir()) == []


def test_stores_have_the_sealed_rows_once_whoever_is_killed(
    cluster: Cluster, proxy: Proxy, tmp_path: Path
) -> None:
    """A driver dies, and executors in each push. Pullers die all the time. The bucket storms."""
    pick = random.Random(seed_of("KVSTORE_PUSHING_SEED"))
    proxy.weather = Storm(random.Random(pick.random()))
    pullers = Pullers(tmp_path, proxy)
    pushes = pushes_at(pushing.URL, proxy)
    given = json.dumps({**cluster.settings(), **settings(cluster, proxy)})
    arguments = ("tests.cluster.driver", given, str(cluster.shared), "nights")
    driver = cluster.start_driver(*arguments)
    try:
        while not pushes.list():
            assert ended(driver, pullers, pick) is None, "the driver ended before it was killed"
        end_group(driver)
        driver = cluster.start_driver(*arguments)
        began = time.monotonic()
        while (output := ended(driver, pullers, pick)) is None:
            assert time.monotonic() - began < DRIVER_S_MAX, "the driver takes too long"
    finally:
        end_group(driver)
        pullers.stop()
    assert driver.returncode == 0, output[1][-6000:]
    told = json.loads(output[0].splitlines()[-1])["nights"]
    assert told["states"] == ["added", "added"]
    assert told["kills"]
    assert pullers.kills
    assert list(cluster.shared.iterdir()) == []
    require_exact(pushes, pullers)


def ended(
    driver: subprocess.Popen[str], pullers: Pullers, pick: random.Random
) -> tuple[str, str] | None:
    """Wait a moment for a driver. Its output if it has ended; else a puller was killed."""
    try:
        return driver.communicate(timeout=pick.uniform(1, 5))
    except subprocess.TimeoutExpired:
        pullers.kill(pick)
        return None


def require_exact(pushes: bulk.Pushes, pullers: Pullers) -> None:
    """Fail unless each store has shown the rows of each push from its stamp on, and once."""
    pushed = pushes.list()
    assert [each.number for each in pushed] == [*range(1, pushing.PUSHES + 1)]
    assert sum(each.rows for each in pushed) == pushing.PUSHES * pushing.ROWS
    for shard in range(pushing.SHARDS):
        with kvstore.open(pullers.store(shard)) as store:
            assert store.verify().problems == ()
            records = {each.import_id: each for each in store.imports.all()}
            assert len(records) == pushing.PUSHES
            seen: list[int] = []
            for push in pushed:
                record = records[push.imports[shard].import_id]
                assert record.added is not None
                assert (record.reverted is not None) == (push.number == pushing.REVERTED)
                seen.append(push.number)
                wanted = pushing.expected(seen, shard)
                pushing.require_rows(dict(store.scan(as_of=record.added)), wanted)
            left = [number for number in seen if number != pushing.REVERTED]
            pushing.require_rows(dict(store.scan()), pushing.expected(left, shard))
