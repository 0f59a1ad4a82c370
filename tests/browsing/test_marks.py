"""Runs of garbage collection and pushes are marked where a look shows changes over time."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.bulk.pushes import Puller, Pushes
from kvstore.errors import CorruptionError
from kvstore.mvcc.meta import Meta
from kvstore.remote.server.page import Page
from kvstore.retention.gc import COLLECTIONS, collections
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of
from tests.page.asking import Asking

pytestmark = pytest.mark.usefixtures("each_engine")


def overwritten(store: kvstore.Store, clock: ManualClock, times: int) -> kvstore.Timestamp:
    """A key that was put some times, a second apart. Returns a time behind the last one."""
    for _ in range(times):
        store.put(b"k", b"v")
        clock.advance(NS_PER_SECOND)
    return store.now()


def test_runs_of_gc_that_removed_something_are_marked(tmp_path: Path) -> None:
    clock = ManualClock(10**18)
    with (
        kvstore.open(tmp_path / "s", clock=clock, durability="async") as store,
        bounds(COLLECTIONS_TOLD=2),
    ):
        for times in (2, 3, 0, 4):  # a run that removes nothing has no mark
            begun = overwritten(store, clock, times)
            store.gc(before=begun)
            clock.advance(NS_PER_SECOND)
        overwritten(store, clock, 1)
        marks = store.browsing.activity(begun).marks
        [mark] = [mark for mark in marks if mark.kind == "collection"]
        assert (mark.at, mark.rows) == (begun, 4)
        assert [run.versions for run in collections(Meta(parts_of(store).engine))] == [3, 4]
    with kvstore.open(tmp_path / "s", clock=clock) as store:
        assert mark in store.browsing.activity(begun).marks


@pytest.mark.damages_store
def test_a_damaged_record_of_runs_is_found(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        engine = parts_of(store).engine
        batch = engine.batch()
        Meta(engine).stage(batch, COLLECTIONS, {"runs": [{"at": -1, "since": 0, "versions": 1}]})
        engine.write(batch)
        with pytest.raises(CorruptionError, match="collections"):
            store.browsing.activity(0)
        assert "collections" in str(store.verify().problems)


def test_a_push_is_marked_by_its_number(tmp_path: Path) -> None:
    pushes = Pushes(str(tmp_path / "pushes"))

    def push() -> None:
        with pushes.begin() as building:
            with building.writer() as writer:
                writer.put(b"pushed", b"row")
            building.seal()

    push()
    with kvstore.open(tmp_path / "s", durability="async") as store:
        begun = store.now()
        store.put(b"own", b"v")
        puller = Puller(store, pushes, name="one")
        while puller.step():
            pass
        [pushed] = store.browsing.activity(begun).marks
        assert (pushed.kind, pushed.push, pushed.rows) == ("push", "1", 1)
        assert pushed.at == store.history(b"pushed")[0].timestamp
        pushes.revert(1)
        while puller.step():
            pass
        both = store.browsing.activity(begun).marks
        assert [(mark.kind, mark.push) for mark in both] == [("push", "1"), ("push reverted", "1")]
        assert store.browsing.activity(begun, both[0].at).marks == [pushed]
        shown = Asking(Page(store, None)).text("activity?per=hour")
        assert f"1 rows of push 1, import {pushed.import_id:016x}" in shown
        push()
        push()
        puller.step()
        imports = Asking(Page(store, None)).html("imports")
        [taken, *_] = imports.all("progress")  # the push, its revert and the next push, of four
        assert (taken.attributes["value"], taken.attributes["max"]) == ("3", "4")
        assert "1 reverted, 1 added" in imports.all("main")[0].text
        assert "push 2" in imports.all("main")[0].text
