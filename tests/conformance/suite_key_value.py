"""What py-key-value-aio asks of every store, retold: its package has no tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from key_value.aio.stores.memory import MemoryStore
from key_value.aio.wrappers.prefix_keys import PrefixKeysWrapper

import kvstore
from kvstore.adapters.key_value import KVStore
from kvstore.errors import UsageError


@pytest.fixture(params=["ours", "theirs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Ours, and the store in memory of their project: the tests ask for nothing of ours."""
    if request.param == "theirs":
        yield MemoryStore()
        return
    with kvstore.open(tmp_path / "s", durability="async") as opened:
        yield KVStore(opened)


VALUE = {"text": "caf\u00e9", "n": 1, "list": [1, 2.5, None, True], "deep": {"a": {}}}


async def test_a_value_comes_back_and_is_replaced(store: Any) -> None:
    assert await store.get("k") is None
    await store.put("k", VALUE)
    assert await store.get("k") == VALUE
    await store.put("k", {})
    assert await store.get("k") == {}
    assert await store.delete("k") is True
    assert await store.delete("k") is False
    assert await store.get("k") is None


async def test_collections_are_apart(store: Any) -> None:
    for name in ("a", "ab", "a::b", "\u00e9"):
        await store.put("k", {"in": name}, collection=name)
    for name in ("a", "ab", "a::b", "\u00e9"):
        assert await store.get("k", collection=name) == {"in": name}
    assert await store.get("k") is None
    named = set(await store.collections()) - {"default_collection"}  # a look may make it
    assert named == {"a", "a::b", "ab", "\u00e9"}
    assert await store.destroy_collection("a") is True
    assert "a" not in await store.collections()
    assert await store.get("k", collection="ab") == {"in": "ab"}
    assert await store.destroy() is True
    assert await store.collections() == []


async def test_many(store: Any) -> None:
    keys = [f"k{n}" for n in range(20)]
    await store.put_many(keys, [{"n": n} for n in range(20)], collection="c")
    found = await store.get_many([*keys, "absent"], collection="c")
    assert found == [*({"n": n} for n in range(20)), None]
    assert sorted(await store.keys("c")) == sorted(keys)
    assert len(await store.keys("c", limit=7)) == 7
    assert await store.delete_many([*keys[:5], "absent"], collection="c") == 5
    assert len(await store.keys("c")) == 15
    assert await store.get_many([], collection="c") == []
    with pytest.raises(ValueError):  # zip's
        await store.put_many(["a", "b"], [{}], collection="c")


async def test_time_to_live(store: Any) -> None:
    await store.put("k", {"n": 1}, ttl=100)
    await store.put("stays", {"n": 2})
    value, left = await store.ttl("k")
    assert value == {"n": 1}
    assert 99 < left <= 100
    assert await store.ttl("stays") == ({"n": 2}, None)
    assert await store.ttl("absent") == (None, None)
    await store.put_many(["a", "b"], [{}, {}], ttl=50)
    assert [round(each) for _, each in await store.ttl_many(["a", "b"])] == [50, 50]
    await store.put("k", {"n": 3})
    assert await store.ttl("k") == ({"n": 3}, None)
    for wrong in (0, -1):
        with pytest.raises(Exception, match=r"(?i)ttl"):
            await store.put("x", {}, ttl=wrong)


async def test_tasks_at_once(store: Any) -> None:
    async def work(worker: int) -> None:
        for n in range(20):
            await store.put(f"{worker}/{n}", {"n": n})
            assert await store.get(f"{worker}/{n}") == {"n": n}

    await asyncio.gather(*(work(n) for n in range(8)))
    assert len(await store.keys()) == 160


async def test_a_wrapper_of_theirs_stands_on_it(store: Any) -> None:
    wrapped = PrefixKeysWrapper(key_value=store, prefix="p")
    await wrapped.put("k", {"n": 1})
    assert await wrapped.get("k") == {"n": 1}
    assert len(await store.keys()) == 1


async def test_exact_expiry_and_the_past(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as opened:
        store = KVStore(opened)
        await store.put("k", {"n": 1}, ttl=3600)
        (key,) = opened.keys()
        then = opened.now()
        await store.put_many(["k", "l"], [{"n": 2}, {"n": 3}])
        assert len(opened.history(key)) == 2
        past = KVStore(opened, as_of=then)
        assert await past.get_many(["k", "l"]) == [{"n": 1}, None]
        with pytest.raises(UsageError, match="the past"):
            await past.put("k", {})
