"""What cachelib asks of every cache, retold: its package has no tests."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cachelib import SimpleCache

import kvstore
from kvstore.adapters.cachelib import CachelibCache


@pytest.fixture(params=["ours", "theirs"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Ours, and a cache of their project: the tests ask for nothing of ours."""
    if request.param == "theirs":
        yield SimpleCache()
        return
    with kvstore.open(tmp_path / "s", durability="async") as store:
        yield CachelibCache(store)


SAMPLES = {"text": "caf\u00e9", "int": 1, "float": 1.5, "list": [1, [2]], "dict": {"a": None}}


def test_set_get_delete(cache: Any) -> None:
    for key, value in SAMPLES.items():
        assert cache.set(key, value)
        assert cache.get(key) == value
    assert cache.get("absent") is None
    assert (cache.delete("text"), cache.delete("text")) == (True, False)
    assert cache.get("text") is None


def test_many(cache: Any) -> None:
    assert cache.set_many(SAMPLES) == list(SAMPLES)
    assert cache.get_many(*SAMPLES, "absent") == [*SAMPLES.values(), None]
    assert cache.get_dict("int", "absent") == {"int": 1, "absent": None}
    assert cache.delete_many("int", "float") == ["int", "float"]
    assert cache.get_many("int", "float", "text") == [None, None, SAMPLES["text"]]


def test_add_and_has(cache: Any) -> None:
    assert cache.add("k", 1)
    assert not cache.add("k", 2)
    assert cache.get("k") == 1
    assert (cache.has("k"), cache.has("absent")) == (True, False)
    assert cache.clear()
    assert not cache.has("k")


def test_numbers(cache: Any) -> None:
    assert [cache.inc("n"), cache.inc("n", 5), cache.dec("n"), cache.dec("m")] == [1, 6, 5, -1]


def test_timeouts(tmp_path: Path) -> None:
    clock = kvstore.ManualClock(1_700_000_000 * 10**9)
    with kvstore.open(tmp_path / "s", clock=clock) as store:
        cache = CachelibCache(store, default_timeout=10)
        cache.set("default", 1)
        cache.set("ever", 1, timeout=0)
        cache.set("long", 1, timeout=timedelta(minutes=1))
        cache.set_many({"short": 1}, timeout=1)
        found = []
        for seconds in (2, 9, 50):
            clock.advance(seconds * 10**9)
            found.append([key for key in ("default", "ever", "long", "short") if cache.has(key)])
        assert found == [["default", "ever", "long"], ["ever", "long"], ["ever"]]
        assert CachelibCache(store, default_timeout=0).set("x", 1)
        assert cache.cache.ttl("x") is None
