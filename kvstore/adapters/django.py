"""`kvstore.cache.Cache` as a cache backend of Django.

CACHES = {
    "default": {
        "BACKEND": "kvstore.adapters.django.DjangoCache",
        "LOCATION": "/var/cache/site.db",
        "OPTIONS": {"SIZE_LIMIT": 1 << 30},
    }
}
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache

from kvstore.cache import Cache


class DjangoCache(BaseCache):
    """`LOCATION` is the path of a store or the URL of a server. `OPTIONS` are those of `Cache` in
    capitals: `CODEC`, `SIZE_LIMIT`, `EVICTION`, `HISTORY`, `PREFIX`, `TOKEN`.

    Values are JSON. Sessions and messages of Django are; cached templates and querysets are not:
    give `CODEC` a `CacheCodec` of your own for those. `cache.cache` is the `Cache`, with its tags.
    """

    def __init__(self, location: str, params: Mapping[str, Any]) -> None:
        super().__init__(dict(params))
        options = {
            name.lower(): each
            for name, each in (params.get("OPTIONS") or {}).items()
            if name not in ("MAX_ENTRIES", "CULL_FREQUENCY")  # of Django, for other backends
        }
        options.setdefault("prefix", b"django/")
        self.cache = Cache(location, **options)

    def get(self, key: str, default: Any = None, version: int | None = None) -> Any:
        """See Django."""
        return self.cache.get(self.make_and_validate_key(key, version=version), default)

    def get_many(self, keys: Iterable[str], version: int | None = None) -> dict[str, Any]:
        """See Django. One call."""
        named = {self.make_and_validate_key(key, version=version): key for key in keys}
        return {named[each]: value for each, value in self.cache.get_many(named).items()}

    def set(
        self, key: str, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None
    ) -> None:
        """See Django."""
        made = self.make_and_validate_key(key, version=version)
        self.cache.set(made, value, self._expire(timeout))

    def set_many(
        self,
        data: Mapping[str, Any],
        timeout: Any = DEFAULT_TIMEOUT,
        version: int | None = None,
    ) -> list[str]:
        """See Django. One commit."""
        rows = {self.make_and_validate_key(key, version=version): data[key] for key in data}
        self.cache.set_many(rows, self._expire(timeout))
        return []

    def add(
        self, key: str, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None
    ) -> bool:
        """See Django. One of many callers sets the key."""
        made = self.make_and_validate_key(key, version=version)
        return self.cache.add(made, value, self._expire(timeout))

    def touch(self, key: str, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        """See Django."""
        made = self.make_and_validate_key(key, version=version)
        return self.cache.touch(made, self._expire(timeout))

    def delete(self, key: str, version: int | None = None) -> bool:
        """See Django."""
        return self.cache.delete(self.make_and_validate_key(key, version=version))

    def delete_many(self, keys: Iterable[str], version: int | None = None) -> None:
        """See Django. One commit."""
        self.cache.delete_many([self.make_and_validate_key(key, version=version) for key in keys])

    def has_key(self, key: str, version: int | None = None) -> bool:
        """See Django. The value is not read."""
        return self.make_and_validate_key(key, version=version) in self.cache

    def incr(self, key: str, delta: int = 1, version: int | None = None) -> int:
        """See Django. No increment is lost, and the expiry stays."""
        made = self.make_and_validate_key(key, version=version)
        try:
            total: int = self.cache.incr(made, delta, default=None)
        except KeyError as error:
            raise ValueError(f"Key {key!r} not found") from error
        return total

    def clear(self) -> None:
        """See Django."""
        self.cache.clear()

    def close(self, **_: Any) -> None:
        """Django calls this at the end of each request: the store stays open."""

    def _expire(self, timeout: Any) -> float | None:
        """Seconds from now, or None for ever. Django has the time itself, or the default."""
        at = self.get_backend_timeout(timeout)
        return None if at is None else at - time.time()
