"""`kvstore.cache.Cache` as a backend of dogpile.cache.

region = make_region().configure(
    "kvstore", expiration_time=60, arguments={"where": "cache.db"}
)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from dogpile.cache import register_backend
from dogpile.cache.api import NO_VALUE, BytesBackend

from kvstore.cache import LEASE_S, Cache, CacheLock

_OF_CACHE: Final = ("where", "prefix", "size_limit", "eviction", "history", "token")


def _dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


class KVStoreBackend(BytesBackend):
    """`arguments` are those of `Cache` without `codec`, and those below. Others are passed by, as
    all backends of dogpile do.

    * `expire`: the seconds after which an entry is gone. Without it dogpile's `expiration_time`
      alone counts, and old values stay to be shown while a new one is made.
    * `distributed_lock`: whether one process of all makes a value (default: True).
    * `lock_lease`: the seconds after which another process makes it (60).

    Values are JSON unless the region has a serializer of its own.
    """

    serializer = staticmethod(_dumps)
    deserializer = staticmethod(json.loads)

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        given = {name: arguments[name] for name in _OF_CACHE if name in arguments}
        self.cache = Cache(**{"prefix": b"dogpile/", **given, "codec": "bytes"})
        self._expire = arguments.get("expire")
        self._is_shared = arguments.get("distributed_lock", True)
        self._lease = arguments.get("lock_lease", LEASE_S)

    def get_mutex(self, key: str) -> CacheLock | None:
        """The lock of a key among all processes."""
        return self.cache.lock(key, self._lease) if self._is_shared else None

    def get_serialized(self, key: str) -> Any:
        """See `dogpile.cache.api.CacheBackend`."""
        return self.cache.get(key, NO_VALUE)

    def get_serialized_multi(self, keys: Iterable[str]) -> Sequence[Any]:
        """See `dogpile.cache.api.CacheBackend`."""
        wanted = list(keys)
        found = self.cache.get_many(wanted)
        return [found.get(key, NO_VALUE) for key in wanted]

    def set_serialized(self, key: str, value: bytes) -> None:
        """See `dogpile.cache.api.CacheBackend`."""
        self.cache.set(key, value, self._expire)

    def set_serialized_multi(self, mapping: Mapping[str, bytes]) -> None:
        """See `dogpile.cache.api.CacheBackend`. One commit."""
        self.cache.set_many(mapping, self._expire)

    def delete(self, key: str) -> None:
        """See `dogpile.cache.api.CacheBackend`."""
        self.cache.delete(key)

    def delete_multi(self, keys: Iterable[str]) -> None:
        """See `dogpile.cache.api.CacheBackend`. One commit."""
        self.cache.delete_many(keys)


register_backend("kvstore", __name__, KVStoreBackend.__name__)
