"""LangChain in a store: bytes by key (`KVStoreByteStore`), and answers of models (`AnswerCache`).

set_llm_cache(AnswerCache("answers.db", expire=86_400))
embedder = CacheBackedEmbeddings.from_bytes_store(model, KVStoreByteStore("vectors.db"))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.load import dumps, loads
from langchain_core.stores import ByteStore

from kvstore.base.timestamp import TimeLike
from kvstore.cache import Cache, CacheCodec, Expire
from kvstore.errors import UsageError
from kvstore.remote.control import StoreOrClient
from kvstore.remote.handle import Handle, Where


class KVStoreByteStore(ByteStore):
    """Bytes by text. `where` is the path of a store, the URL of a server, or an open store. A call
    with many keys is one read of one time, or one commit. With `as_of` it is read only."""

    def __init__(
        self,
        where: Where | Handle,
        *,
        prefix: str = "langchain/",
        as_of: TimeLike | None = None,
        token: str | None = None,
    ) -> None:
        self.handle = Handle.of(where, token=token, read_only=as_of is not None)
        self.as_of = as_of
        self._prefix = prefix.encode()

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of keys; None for those that are absent."""
        return self.handle.store.get_many([self._key(key) for key in keys], as_of=self.as_of)

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Set keys by one commit."""
        self._written.put_many([(self._key(key), value) for key, value in key_value_pairs])

    def mdelete(self, keys: Sequence[str]) -> None:
        """Delete keys by one commit."""
        with self._written.batch() as batch:
            for key in keys:
                batch.delete(self._key(key))

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """The keys that begin with a prefix, sorted, as of one time."""
        for key in self.handle.store.keys(prefix=self._key(prefix or ""), as_of=self.as_of):
            yield key[len(self._prefix) :].decode()

    @property
    def _written(self) -> StoreOrClient:
        if self.as_of is not None:
            raise UsageError("the past cannot be written", "make a store without as_of")
        return self.handle.store

    def _key(self, key: str) -> bytes:
        return self._prefix + key.encode()


class AnswerCache(BaseCache):
    """The answers of models, in a `kvstore.cache.Cache`, which `cache` is. `where` and `options`
    are those of `Cache`. An answer stays for `expire` seconds.

    Answers are JSON of LangChain: reading one makes objects of LangChain's classes, and of no
    others.
    """

    def __init__(
        self,
        where: Where | Handle,
        *,
        expire: Expire = None,
        prefix: bytes = b"answers/",
        **options: Any,
    ) -> None:
        codec = CacheCodec(lambda value: dumps(value).encode(), lambda raw: loads(raw.decode()))
        self.cache = Cache(where, prefix=prefix, codec=codec, **options)
        self._expire = expire

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """The answer to a prompt by a model; None if it is not known."""
        found: RETURN_VAL_TYPE | None = self.cache.get(_key(prompt, llm_string))
        return found

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """Keep an answer. `forget` drops all answers of its model."""
        key = _key(prompt, llm_string)
        self.cache.set(key, list(return_val), self._expire, _tag(llm_string))

    def clear(self, **_: Any) -> None:
        """Drop all answers."""
        self.cache.clear()

    def forget(self, llm_string: str) -> int:
        """Drop all answers of one model, by one commit. Returns how many."""
        return self.cache.evict(_tag(llm_string))


def _key(prompt: str, llm_string: str) -> bytes:
    """Prompts are long: an entry has the digest of both."""
    text = f"{len(prompt)}:{prompt}{llm_string}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=32).digest()


def _tag(llm_string: str) -> str:
    return blake2b(llm_string.encode(errors="surrogatepass"), digest_size=16).hexdigest()
