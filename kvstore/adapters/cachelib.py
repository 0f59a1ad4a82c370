"""`kvstore.cache.Cache` behind cachelib's interface, for Flask-Caching, Flask-Session and others.

cache = CachelibCache("cache.db")
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from cachelib.base import BaseCache

from kvstore.cache import Cache
from kvstore.remote.handle import Handle, Where


class CachelibCache(BaseCache):
    """`where` and `options` are those of `Cache`, which `cache` is. A timeout of 0 keeps an entry,
    as everywhere in cachelib. Values are JSON unless `codec` says otherwise."""

    def __init__(
        self,
        where: Where | Handle,
        default_timeout: int | timedelta = 300,
        *,
        prefix: bytes = b"cachelib/",
        **options: Any,
    ) -> None:
        super().__init__(default_timeout)
        self.cache = Cache(where, prefix=prefix, **options)

    def get(self, key: str) -> Any:
        """The value of a key; None if there is none."""
        return self.cache.get(key)

    def get_many(self, *keys: str) -> list[Any]:
        """The values of keys, by one call."""
        found = self.cache.get_many(keys)
        return [found.get(key) for key in keys]

    def get_dict(self, *keys: str) -> dict[str, Any]:
        """The values of keys, by key."""
        return dict(zip(keys, self.get_many(*keys), strict=True))

    def set(self, key: str, value: Any, timeout: Any = None) -> bool:
        """Set a key."""
        return self.cache.set(key, value, self._expire(timeout))

    def add(self, key: str, value: Any, timeout: Any = None) -> bool:
        """Set a key that is absent. One of many callers does."""
        return self.cache.add(key, value, self._expire(timeout))

    def set_many(self, mapping: dict[str, Any], timeout: Any = None) -> list[Any]:
        """Set many keys in one commit."""
        self.cache.set_many(mapping, self._expire(timeout))
        return list(mapping)

    def delete(self, key: str) -> bool:
        """Delete a key. Returns whether it was there."""
        return self.cache.delete(key)

    def delete_many(self, *keys: str) -> list[Any]:
        """Delete many keys in one commit."""
        self.cache.delete_many(keys)
        return list(keys)

    def has(self, key: str) -> bool:
        """Whether a key is there. Its value is not read."""
        return key in self.cache

    def clear(self) -> bool:
        """Delete all keys."""
        self.cache.clear()
        return True

    def inc(self, key: str, delta: int = 1) -> int:
        """Add to a number. No increment is lost."""
        total: int = self.cache.incr(key, delta)
        return total

    def dec(self, key: str, delta: int = 1) -> int:
        """Subtract from a number."""
        total: int = self.cache.decr(key, delta)
        return total

    def _expire(self, timeout: Any) -> float | None:
        seconds = self.default_timeout if timeout is None else timeout
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        return seconds or None
