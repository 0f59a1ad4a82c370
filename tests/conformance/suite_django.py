"""What Django's own tests ask of every cache backend, retold: its package has no tests."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

settings.configure(
    CACHES={
        "default": {
            "BACKEND": "kvstore.adapters.django.DjangoCache",
            "LOCATION": os.path.join(tempfile.mkdtemp(prefix="kvstore-django-"), "s"),
        }
    },
    USE_TZ=True,
)

from django.core.cache import CacheHandler, cache  # noqa: E402
from django.core.cache.backends.base import CacheKeyWarning  # noqa: E402

import kvstore  # noqa: E402
from kvstore.adapters.django import DjangoCache  # noqa: E402

CLOCK = kvstore.ManualClock()


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[DjangoCache]:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        yield DjangoCache(store, {})  # type: ignore[arg-type]  # a path otherwise


def made(backend: DjangoCache, **params: Any) -> DjangoCache:
    """A second face of the same cache."""
    return DjangoCache(backend.cache.store, params)  # type: ignore[arg-type]  # as above


def test_django_makes_the_backend_by_its_settings(tmp_path: Path) -> None:
    config = {
        "BACKEND": "kvstore.adapters.django.DjangoCache",
        "LOCATION": str(tmp_path / "s"),
        "TIMEOUT": 30,
        "KEY_PREFIX": "site",
        "OPTIONS": {"SIZE_LIMIT": 1 << 20, "CODEC": "json", "MAX_ENTRIES": 7},
    }
    found = CacheHandler({"default": config})["default"]
    found.set("k", [1])
    assert found.get("k") == [1]
    assert list(found.cache) == ["site:1:k"]
    assert 29 < found.cache.ttl("site:1:k") <= 30
    found.close()
    assert found.get("k") == [1]
    found.cache.close()
    assert cache is not None


@pytest.mark.parametrize(
    "value", ["text", "caf\u00e9", 42, 1.5, True, None, [1, {"a": [None]}], {"x": {}}, "", 0]
)
def test_values_of_json_come_back(backend: DjangoCache, value: object) -> None:
    backend.set("k", value)
    assert backend.get("k", "absent") == value


def test_get_add_delete_has_key(backend: DjangoCache) -> None:
    assert backend.get("absent") is None
    assert backend.get("absent", "default") == "default"
    assert backend.add("k", 1) is True
    assert backend.add("k", 2) is False
    assert backend.has_key("k")
    assert "k" in backend
    assert backend.delete("k") is True
    assert backend.delete("k") is False
    assert backend.get_or_set("k", lambda: 5) == 5
    assert backend.get_or_set("k", 6) == 5
    backend.set("none", None)
    assert backend.get("none", 1) is None
    assert backend.add("none", 1) is False


def test_many(backend: DjangoCache) -> None:
    assert backend.set_many({"a": 1, "b": 2, "c": 3}) == []
    assert backend.get_many(["a", "c", "d"]) == {"a": 1, "c": 3}
    backend.delete_many(["a", "b"])
    assert backend.get_many(["a", "b", "c"]) == {"c": 3}
    assert backend.get_many([]) == {}
    backend.clear()
    assert backend.get("c") is None


def test_numbers(backend: DjangoCache) -> None:
    backend.set("n", 41)
    assert backend.incr("n") == 42
    assert backend.incr("n", 10) == 52
    assert backend.decr("n", 2) == 50
    assert backend.incr("n", -50) == 0
    for change in (backend.incr, backend.decr):
        with pytest.raises(ValueError, match="not found"):
            change("absent")


def test_timeouts(backend: DjangoCache) -> None:
    backend.set("zero", 1, timeout=0)
    backend.set("negative", 1, timeout=-1)
    backend.set("ever", 1, timeout=None)
    backend.set("soon", 1, timeout=100)
    backend.set_many({"x": 1}, timeout=0)
    assert backend.get_many(["zero", "negative", "ever", "soon", "x"]) == {"ever": 1, "soon": 1}
    assert backend.cache.ttl(":1:ever") is None
    assert backend.touch("ever", 10) is True
    assert 9 < backend.cache.ttl(":1:ever") <= 10
    assert backend.touch("soon", None) is True
    assert backend.cache.ttl(":1:soon") is None
    assert backend.touch("soon", 0) is True
    assert backend.get("soon") is None
    assert backend.touch("absent") is False
    assert backend.add("never", 1, timeout=0) is True
    assert backend.get("never") is None


def test_versions_and_prefixes_are_apart(backend: DjangoCache) -> None:
    backend.set("k", 1)
    backend.set("k", 2, version=2)
    assert (backend.get("k"), backend.get("k", version=2)) == (1, 2)
    assert backend.incr_version("k", delta=4) == 5
    assert (backend.get("k"), backend.get("k", version=5)) == (None, 1)
    assert backend.decr_version("k", version=5) == 4
    with pytest.raises(ValueError, match="not found"):
        backend.incr_version("absent")
    other = made(backend, KEY_PREFIX="other", VERSION=2)
    assert other.get("k") is None
    other.set("k", 9)
    assert (other.get("k"), backend.get("k", version=2)) == (9, 2)


def test_a_long_key_warns_and_works(backend: DjangoCache) -> None:
    with pytest.warns(CacheKeyWarning):
        backend.set("k" * 300, 1)
    with pytest.warns(CacheKeyWarning):
        assert backend.get("k" * 300) == 1


async def test_coroutines(backend: DjangoCache) -> None:
    await backend.aset("k", 1)
    assert await backend.aget("k") == 1
    assert await backend.aincr("k") == 2
    assert await backend.aget_many(["k"]) == {"k": 2}
    assert await backend.adelete("k")


def test_threads_lose_no_increment(backend: DjangoCache) -> None:
    backend.set("n", 0)

    def count() -> None:
        for _ in range(100):
            backend.incr("n")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.get("n") == 400


def test_sessions_are_kept() -> None:
    """Django's sessions are JSON unless they are told otherwise."""
    from django.contrib.sessions.backends.cache import SessionStore

    session = SessionStore()
    session["user"] = 7
    session.save()
    again = SessionStore(session.session_key)
    assert again["user"] == 7
    again.delete()
    assert not SessionStore().exists(session.session_key)
    cache.cache.close()
