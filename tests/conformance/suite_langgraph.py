"""LangGraph's suite for checkpointers, as one test each; and ours for its stores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.graph import START, StateGraph
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore

import kvstore
from kvstore.adapters.langgraph import KVStoreMemory, KVStoreSaver
from kvstore.errors import FencedError, UsageError
from tests.conformance.langgraph_stores import StoreContract


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What became of each test of the suite: None if it passed."""
    import asyncio

    found: dict[str, str | None] = {}
    number = iter(range(1000))

    @checkpointer_test(name="KVStoreSaver")
    async def saver() -> AsyncIterator[KVStoreSaver]:
        place = tmp_path_factory.mktemp("savers") / f"{next(number)}.db"
        with kvstore.open(place, durability="async") as store:
            yield KVStoreSaver(store)

    class Progress:
        on_capability_start = None
        on_capability_end = None

        @staticmethod
        def on_test_result(capability: str, name: str, passed: bool, error: str | None) -> None:
            found[f"{capability}::{name}"] = None if passed else str(error)

    report = asyncio.run(validate(saver, progress=Progress()))
    for name, result in report.results.items():
        assert result.detected, name
    return found


def test_every_capability_passes(
    results: dict[str, str | None], record_testsuite_property: Any
) -> None:
    record_testsuite_property("inner_passed", sum(error is None for error in results.values()))
    assert {name: error for name, error in results.items() if error is not None} == {}
    assert len(results) >= 81


class TestMemory(StoreContract):
    """Ours."""

    @pytest.fixture
    def memory(self, tmp_path: Path) -> Iterator[BaseStore]:
        with kvstore.open(tmp_path / "s", durability="async") as store:
            yield KVStoreMemory(store)


class TestTheirs(StoreContract):
    """LangGraph's own store keeps the contract too, so the contract asks for nothing of ours."""

    @pytest.fixture
    def memory(self) -> BaseStore:
        return InMemoryStore()


# -- what ours gives beside passing ------------------------------------------------------------


def joined(old: list[str], new: list[list[str]]) -> list[str]:
    return [*old, *(entry for some in new for entry in some)]


class State(TypedDict):
    """A counter, and a log of which a checkpoint has the newest entries alone."""

    count: int
    log: Annotated[list[str], DeltaChannel(joined, snapshot_frequency=5)]


def graph(saver: KVStoreSaver) -> Any:
    def step(state: State) -> dict[str, Any]:
        count = state.get("count", 0) + 1
        return {"count": count, "log": [f"entry {count} {'.' * 200}"]}

    return StateGraph(State).add_node("step", step).add_edge(START, "step").compile(saver)


def config(thread: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}}


def test_a_pruned_thread_goes_on_with_its_whole_state(store: kvstore.Store) -> None:
    saver = KVStoreSaver(store)
    agent = graph(saver)
    for _ in range(20):
        agent.invoke({"count": 0} if not _ else {"log": []}, config("a"))
    before = agent.get_state(config("a")).values
    upper = store.upper - 1
    saver.prune(["a"], keep=2)
    assert len({change.timestamp for change in store.changes(since=upper)}) == 1
    assert agent.get_state(config("a")).values == before
    assert agent.invoke({"log": ["more"]}, config("a"))["log"][:20] == before["log"]
    saver.prune(["a"], strategy="delete")
    assert list(store.keys()) == []


def test_pruning_by_age_and_of_all_threads(store: kvstore.Store) -> None:
    saver = KVStoreSaver(store)
    agent = graph(saver)
    for thread in ("a", "b"):
        for _ in range(12):
            agent.invoke({"count": 1}, config(thread))
    count = len(list(saver.list(None)))
    saver.prune(None, older_than=timedelta(hours=1))
    assert len(list(saver.list(None))) == count
    saver.prune(None, older_than=timedelta(0), keep=3)
    heads = {thread: len(list(saver.list(config(thread)))) for thread in ("a", "b")}
    assert all(3 <= kept < count // 2 for kept in heads.values())
    with pytest.raises(UsageError, match="strategy"):
        saver.prune(["a"], strategy="keep_some")


def test_space_comes_back_after_pruning(store: kvstore.Store) -> None:
    saver = KVStoreSaver(store)
    agent = graph(saver)
    for _ in range(50):
        agent.invoke({"count": 1, "log": ["x" * 1000]}, config("a"))
    store.gc(keep=timedelta(0), compact=True)
    large = store.stats()["data_entries"]
    saver.prune(["a"], strategy="delete")
    agent.invoke({"count": 1}, config("a"))
    store.gc(keep=timedelta(0), compact=True)
    assert store.stats()["data_entries"] < large / 10


def test_all_threads_are_read_as_of_a_time(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        agent = graph(KVStoreSaver(store))
        agent.invoke({"count": 1}, config("a"))
        then = store.now()
        agent.invoke({"count": 5}, config("a"))
        past = KVStoreSaver(tmp_path / "s", as_of=then)
        assert graph(past).get_state(config("a")).values["count"] == 2
        assert agent.get_state(config("a")).values["count"] == 6
        with pytest.raises(UsageError, match="the past"):
            past.delete_thread("a")
        memory = KVStoreMemory(store)
        memory.put(("x",), "k", {"n": 1})
        before = store.now()
        memory.put(("x",), "k", {"n": 2})
        item = KVStoreMemory(store, as_of=before).get(("x",), "k")
        assert item is not None
        assert item.value == {"n": 1}


def test_a_run_that_was_replaced_writes_nothing_more(store: kvstore.Store) -> None:
    saver = KVStoreSaver(store)
    with saver.fenced("a") as first:
        stale = graph(first)
        stale.invoke({"count": 1}, config("a"))
        with saver.fenced("a") as second:
            graph(second).invoke({"count": 10}, config("a"))
            count = len(list(saver.list(config("a"))))
            with pytest.raises(FencedError):
                stale.invoke({"count": 99}, config("a"))
            stale.invoke({"count": 1}, config("another"))
            assert len(list(saver.list(config("a")))) == count
            assert graph(saver).get_state(config("a")).values["count"] == 11


def test_an_item_expires_at_exactly_its_time_unless_it_is_read(tmp_path: Path) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    with kvstore.open(tmp_path / "s", clock=clock) as store:
        memory = KVStoreMemory(store, ttl={"default_ttl": 2.0})
        memory.put(("x",), "read", {})
        memory.put(("x",), "left", {})
        memory.put(("x",), "kept", {}, ttl=60)
        clock.advance(119 * 10**9)
        assert memory.get(("x",), "read") is not None
        assert memory.get(("x",), "left", refresh_ttl=False) is not None
        clock.advance(10**9 + 1000)
        assert [item.key for item in memory.search(("x",), refresh_ttl=False)] == ["kept", "read"]


TWO = """
import sys
from kvstore.adapters.langgraph import KVStoreSaver
from tests.conformance.suite_langgraph import config, graph
saver = KVStoreSaver(sys.argv[1])
print(graph(saver).invoke({"count": 40}, config("theirs"))["count"])
print(graph(saver).get_state(config("ours")).values["count"])
"""


def test_two_windows_at_once(tmp_path: Path) -> None:
    saver = KVStoreSaver(tmp_path / "s")
    agent = graph(saver)
    agent.invoke({"count": 6}, config("ours"))
    command = [sys.executable, "-W", "ignore", "-c", TWO, str(tmp_path / "s")]
    assert subprocess.check_output(command, text=True).split() == ["41", "7"]
    assert agent.get_state(config("theirs")).values["count"] == 41
    saver.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "s", durability="async") as opened:
        yield opened
