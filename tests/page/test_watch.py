"""What a server measures for its page, in bounded space: trends of the last hour, and callers."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore.base.timestamp import NS_PER_SECOND
from kvstore.limits import CALLERS_MAX, TRENDS_SAMPLES
from kvstore.remote.server.page import Page
from kvstore.remote.server.watch import Callers, Watch
from tests.page.asking import Asking

EVERY_NS = 10 * NS_PER_SECOND


@pytest.fixture
def clock() -> kvstore.ManualClock:
    return kvstore.ManualClock(1_700_000_000 * NS_PER_SECOND)


def test_trends_tell_the_rates_of_an_hour_and_keep_no_more(
    tmp_path: Path, clock: kvstore.ManualClock
) -> None:
    with kvstore.open(tmp_path / "store", durability="sync", clock=clock) as store:
        watch = Watch(store, Callers(clock), clock)
        person = Asking(Page(store, None, watch=watch))
        assert "come within" in person.text("trends")
        for number in range(TRENDS_SAMPLES + 9):
            if number < 2 or number > TRENDS_SAMPLES + 6:
                for _ in range(20):
                    store.put(b"k", b"v")
            watch.trends.note()
            clock.advance(EVERY_NS)
        assert len(watch.trends.samples) == TRENDS_SAMPLES
        page = person.html("trends")
        newest = {each.text.split(" ")[0]: each.text for each in page.all("h2")}
        assert newest["Commits"] == "Commits 2/s"
        assert newest["Bytes"].startswith("Bytes")
        assert "no fsync yet" not in newest["Latency"]
        lines = page.all("polyline")
        assert len(lines) == 8
        points = [pair.split(",") for pair in lines[0].attributes["points"].split()]
        assert len(points) == TRENDS_SAMPLES - 1
        assert all(0 <= float(x) <= 1000 and 0 <= float(y) <= 160 for x, y in points)
        assert [float(y) for _, y in points[:3]] == [160.0] * 3  # nothing was committed then
        assert float(points[-1][1]) < 160
        axis = page.text_of_class("values")
        assert axis.startswith("2/s1/s0/s")


@pytest.mark.parametrize("listens", [False, True])
def test_a_follower_counts_the_commits_of_the_owner(
    tmp_path: Path, clock: kvstore.ManualClock, listens: bool
) -> None:
    """It knows the fsyncs of an owner that listens."""
    with kvstore.open(tmp_path / "store", durability="sync", control=listens) as store:
        store.put(b"k", b"v")
        with kvstore.follow(tmp_path / "store") as reader:
            watch = Watch(reader, Callers(clock), clock)
            watch.trends.note()
            for _ in range(30):
                store.put(b"k", b"v")
            reader.refresh()
            clock.advance(EVERY_NS)
            watch.trends.note()
            text = Asking(Page(reader, None, watch=watch)).text("trends")
            assert "Commits 3/s" in text
            assert ("the owner does not listen" in text) is not listens


def test_callers_are_told_by_what_they_asked_for_and_forgotten_at_the_bound(
    store: kvstore.Store, clock: kvstore.ManualClock
) -> None:
    callers = Callers(clock)
    for number in range(CALLERS_MAX + 5):
        clock.advance(NS_PER_SECOND)
        with callers.calling(f"10.0.0.1:{number}", "<b>agent</b>" * 100, "scan"):
            pass
    with callers.calling("10.0.0.2:1", "\u202ecurl", "get"):
        page = Asking(Page(store, None, watch=Watch(store, callers, clock))).html("connected")
    text = page.all("main")[0].text
    assert "10.0.0.2:1" in text
    assert "under way" in text
    assert "\\xe2\\x80\\xaecurl" in text
    assert len(callers.all()) == CALLERS_MAX
    assert callers.all()[-1].address == "10.0.0.1:6"
    assert all(len(caller.agent) <= 120 for caller in callers.all())
