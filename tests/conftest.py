"""Fixtures of every test: one Spark session, both engines, and the depth of random tests.

Hypothesis draws new examples on every run and prints how to repeat a failure. `make test` runs the
profile `ci`, `make soak` the profile `soak`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import kvstore
from kvstore.errors import ClosedError, PoisonedError
from kvstore.opening import ENGINES, engine_at
from tests.harness.bounds import bounds, some_tiny
from tests.harness.parts import parts_of
from tests.memory import tmp_path as tmp_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

for suite in (
    "kvstore.testing.engines",
    "kvstore.testing.histories",
    "kvstore.backup.testing.blobs",
    "kvstore.backup.testing.consensus",
):
    pytest.register_assert_rewrite(suite)

settings.register_profile(
    "ci",
    max_examples=40,
    stateful_step_count=30,
    deadline=None,  # the tests share two cores with a JVM, so a time limit would test the machine
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak", settings.get_profile("ci"), max_examples=3000, stateful_step_count=100
)
settings.load_profile("ci")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep every test that needs Spark in one worker, so that a run starts one session. The tests
    that trace memory come before them there."""
    if "spark" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.spark)
    if item.get_closest_marker("spark") or item.get_closest_marker("traces_memory"):
        item.add_marker(pytest.mark.xdist_group("spark"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that trace memory run first, before a Spark session has threads: see
    `tests.harness.traced`."""
    items.sort(key=lambda item: item.get_closest_marker("traces_memory") is None)


def pytest_collection_finish() -> None:
    """Have the collector of garbage pass by the tests themselves: many tests call it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The run's one Spark session. A test that changes its `conf` must change it back."""
    from kvstore.spark import session

    # Spark's processes find credentials of object stores in the usual places.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "test")
    started = session(
        "tests",
        cores=2,
        memory="1g",
        # Fast to start rather than fast in the long run; one GC thread.
        **{"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},
    )
    yield started
    started.stop()


@pytest.fixture(scope="session")
def spawn() -> Any:
    """Processes forked from a process that has imported everything and opened nothing: each starts
    fast, without inherited handles."""
    context = multiprocessing.get_context("forkserver")
    # A target in a module of tests needs the first two.
    context.set_forkserver_preload(
        [
            "pytest",
            "hypothesis.stateful",
            "tests.backup.children",
            "tests.crash.children",
            "tests.live.children",
            "tests.server.cut_off",
            "tests.shared.programs",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        # Variables by which imports are looked up; without them each child would import anew.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


@pytest.fixture(autouse=True)
def _tiny_limits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `tiny_limits` hold whatever the limits are: every other run has many tiny ones.

    A failure shows the seed of its limits, which `KVSTORE_BOUNDS_SEED` in the environment repeats.
    In a marked module, a test that depends on the limits themselves is marked `usual_limits`.
    """
    marked = (request.node.get_closest_marker(name) for name in ("tiny_limits", "usual_limits"))
    is_tiny, is_usual = marked
    with bounds(some_tiny() if is_tiny and not is_usual else {}):
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    """A new store in `tmp_path / "store"`, open; its commits need not last."""
    with kvstore.open(tmp_path / "store", durability="async") as opened:
        yield opened


@pytest.fixture(params=ENGINES, scope="module")
def each_engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests once per engine: `pytestmark = pytest.mark.usefixtures("each_engine")`.

    Without an argument `engine`, `kvstore.open` makes new stores with that engine. It opens an
    existing store, for example a restored one, by the engine that made it. Child processes find the
    name in the environment variable `EACH_ENGINE`.
    """
    open_store = kvstore.open

    def open_with(path: Any, engine: str = "", *args: Any, **options: Any) -> kvstore.Store:
        made_by = None if path is None else engine_at(Path(path))
        return open_store(path, engine or made_by or request.param, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvstore, "open", open_with)
        patch.setenv("EACH_ENGINE", request.param)
        yield request.param


@pytest.fixture(autouse=True)
def _every_store_is_sound_when_closed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Verify each store before it is closed, so that every random history checks the invariants.

    Tests marked `damages_store` damage a store by hand, so their stores are not verified.
    """
    if request.node.get_closest_marker("damages_store"):
        yield
        return
    close = kvstore.Store.close

    def verified_close(store: kvstore.Store) -> None:
        if not parts_of(store).committer.health.poison:
            # a memory engine can be poisoned without its store
            with suppress(ClosedError, PoisonedError):
                store.verify().require_ok()
        close(store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvstore.Store, "close", verified_close)
        yield
