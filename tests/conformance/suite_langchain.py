"""langchain-tests: byte stores and caches, with and without asyncio."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.outputs import Generation
from langchain_tests.integration_tests.base_store import BaseStoreAsyncTests, BaseStoreSyncTests
from langchain_tests.integration_tests.cache import AsyncCacheTestSuite, SyncCacheTestSuite

import kvstore
from kvstore.adapters.langchain import AnswerCache, KVStoreByteStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "s", durability="async") as opened:
        yield opened


class Bytes:
    """A new byte store."""

    @pytest.fixture
    def kv_store(self, store: kvstore.Store) -> KVStoreByteStore:
        return KVStoreByteStore(store)

    @pytest.fixture
    def three_values(self) -> tuple[bytes, bytes, bytes]:
        return b"foo", b"\x00\xff", b""


class TestBytes(Bytes, BaseStoreSyncTests[bytes]):
    pass


class TestBytesAsync(Bytes, BaseStoreAsyncTests[bytes]):
    pass


class TestAnswers(SyncCacheTestSuite):
    @pytest.fixture
    def cache(self, store: kvstore.Store) -> AnswerCache:
        return AnswerCache(store)


class TestAnswersAsync(AsyncCacheTestSuite):
    @pytest.fixture
    def cache(self, store: kvstore.Store) -> AnswerCache:
        return AnswerCache(store)


def test_a_model_is_forgotten_and_bytes_are_read_as_they_were(store: kvstore.Store) -> None:
    cache = AnswerCache(store, expire=60)
    for model in ("a", "b"):
        for prompt in ("x", "y"):
            cache.update(prompt, model, [Generation(text=prompt + model)])
    assert cache.forget("a") == 2
    assert cache.lookup("x", "a") is None
    assert cache.lookup("x", "b") == [Generation(text="xb")]
    vectors = KVStoreByteStore(store)
    vectors.mset([("k", b"1")])
    then = store.now()
    vectors.mset([("k", b"2")])
    assert KVStoreByteStore(store, as_of=then).mget(["k"]) == [b"1"]
