"""A store as a mapping of zict: spilled values of Dask and others, which other processes share.

spilled = Buffer({}, KVStoreMapping("spill.db"), n=1000)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from zict.common import ZictBase

from kvstore.base.timestamp import TimeLike
from kvstore.errors import UsageError
from kvstore.remote.control import StoreOrClient
from kvstore.remote.handle import Handle, Where

_ROWS_AT_ONCE: Final = 1000
"""Rows of one commit of an update."""


class KVStoreMapping(ZictBase[str, bytes]):
    """Texts to bytes. `where` is the path of a store, the URL of a server, or an open store. With
    `as_of` it is the mapping at that time, and read only. An update is one commit for each thousand
    rows. It needs no lock of its own: any thread and process may use it."""

    def __init__(
        self,
        where: Where | Handle,
        *,
        prefix: str = "zict/",
        as_of: TimeLike | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__()
        self.handle = Handle.of(where, token=token, read_only=as_of is not None)
        self.as_of = as_of
        self._prefix = prefix.encode()

    def __getitem__(self, key: str) -> bytes:
        value = self._get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._do_update([(key, value)])

    def __delitem__(self, key: str) -> None:
        if not isinstance(key, str) or self._written.pop(self._key(key)) is None:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return self._get(key) is not None

    def __iter__(self) -> Iterator[str]:
        """The keys, sorted, as of one time."""
        for key in self.handle.store.keys(prefix=self._prefix, as_of=self.as_of):
            yield key[len(self._prefix) :].decode(errors="surrogateescape")

    def __len__(self) -> int:
        """The number of keys, by a pass over them."""
        return self.handle.store.count(prefix=self._prefix, as_of=self.as_of)

    def clear(self) -> None:
        """Delete all keys by one write."""
        self._written.delete_range(prefix=self._prefix)

    def close(self) -> None:
        """Let the store go; see `Handle.close`. The next use opens it again."""
        handle = getattr(self, "handle", None)  # zict's finalizer calls this after a failed making
        if handle is not None:
            handle.close()

    # -- inside -----------------------------------------------------------------------------

    @property
    def _written(self) -> StoreOrClient:
        if self.as_of is not None:
            raise UsageError("the past cannot be written", "make a mapping without as_of")
        return self.handle.store

    def _do_update(self, items: Iterable[tuple[str, Any]]) -> None:
        rows: dict[bytes, bytes] = {}
        for key, value in items:
            rows[self._key(key)] = _joined(value)
            if len(rows) == _ROWS_AT_ONCE:
                self._written.put_many(rows)
                rows = {}
        if rows:
            self._written.put_many(rows)

    def _get(self, key: object) -> bytes | None:
        if not isinstance(key, str):
            return None
        return self.handle.store.get(self._key(key), as_of=self.as_of)

    def _key(self, key: object) -> bytes:
        if not isinstance(key, str):
            raise TypeError(f"the key is a {type(key).__name__}, not a str")  # as zict's others do
        return self._prefix + key.encode(errors="surrogateescape")


def _joined(value: Any) -> bytes:
    """The bytes of a value: a buffer, or a list of buffers."""
    parts = value if isinstance(value, list | tuple) else [value]
    for part in parts:
        if not isinstance(part, bytes | bytearray | memoryview):
            raise TypeError(f"the value is a {type(part).__name__}, not bytes")
    return b"".join(parts)
