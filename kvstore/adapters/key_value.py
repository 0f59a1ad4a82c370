"""A store behind the interface of py-key-value-aio, which FastMCP and others use.

    store = KVStore("sessions.db")
    await store.put("ada", {"seen": 1}, collection="users", ttl=60)

Keys: the prefix, the collection and the key as one encoded tuple. An entry is gone at exactly its
time, and `as_of` shows all entries as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from key_value.aio.stores.base import (
    BaseDestroyCollectionStore,
    BaseDestroyStore,
    BaseEnumerateCollectionsStore,
    BaseEnumerateKeysStore,
    ManagedEntry,
)

from kvstore.base.timestamp import TimeLike, Timestamp, to_timestamp
from kvstore.codec.tuples import decode_tuple, encode_tuple
from kvstore.errors import UsageError
from kvstore.remote.control import StoreOrClient
from kvstore.remote.handle import Handle, Where
from kvstore.transaction import Transaction

T = TypeVar("T")


class KVStore(
    BaseDestroyStore,
    BaseDestroyCollectionStore,
    BaseEnumerateCollectionsStore,
    BaseEnumerateKeysStore,
):
    """`where` is the path of a store, the URL of a server, or an open store. Calls run in threads
    of the pool of the event loop. A call with many keys is one commit. With `as_of` it is read
    only."""

    def __init__(
        self,
        where: Where | Handle,
        *,
        prefix: str = "key_value/",
        as_of: TimeLike | None = None,
        default_collection: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> None:
        self.handle = Handle.of(where, token=token, read_only=as_of is not None)
        self.as_of = as_of
        self._prefix = prefix.encode()
        super().__init__(default_collection=default_collection, stable_api=True, **options)

    async def close(self) -> None:
        """Let the store go; see `Handle.close`."""
        self.handle.close()

    # -- inside: the methods that the base class calls --------------------------------------

    async def _get_managed_entry(self, *, collection: str, key: str) -> ManagedEntry | None:
        return (await self._get_managed_entries(collection=collection, keys=[key]))[0]

    async def _get_managed_entries(
        self, *, collection: str, keys: Sequence[str]
    ) -> list[ManagedEntry | None]:
        wanted = [self._key(collection, key) for key in keys]
        values = await self._run(lambda store: store.get_many(wanted, as_of=self.as_of))
        load = self._serialization_adapter.load_json
        return [None if raw is None else load(json_str=raw.decode()) for raw in values]

    async def _put_managed_entry(
        self, *, collection: str, key: str, managed_entry: ManagedEntry
    ) -> None:
        await self._put(collection, [key], [managed_entry])

    async def _put_managed_entries(
        self,
        *,
        collection: str,
        keys: Sequence[str],
        managed_entries: Sequence[ManagedEntry],
        ttl: float | None,
        created_at: datetime,
        expires_at: datetime | None,
    ) -> None:
        await self._put(collection, keys, managed_entries)

    async def _put(
        self, collection: str, keys: Sequence[str], entries: Sequence[ManagedEntry]
    ) -> None:
        rows = []
        for key, entry in zip(keys, entries, strict=True):
            text = self._serialization_adapter.dump_json(
                entry=entry, key=key, collection=collection
            )
            due = None if entry.expires_at is None else to_timestamp(entry.expires_at)
            rows.append((self._key(collection, key), text.encode(), due))

        def put(store: StoreOrClient) -> None:
            try:
                _put_rows(store, rows)
            except UsageError:  # a time has passed since: the entry is gone already
                now = store.now()
                if all(due is None or due > now for _, _, due in rows):
                    raise
                _put_rows(store, [row for row in rows if row[2] is None or row[2] > now])

        self._require_present()
        await self._run(put)

    async def _delete_managed_entry(self, *, key: str, collection: str) -> bool:
        return await self._delete_managed_entries(keys=[key], collection=collection) > 0

    async def _delete_managed_entries(self, *, keys: Sequence[str], collection: str) -> int:
        wanted = list(dict.fromkeys(self._key(collection, key) for key in keys))

        def delete(transaction: Transaction) -> int:
            values = transaction.get_many(wanted)
            found = [key for key, raw in zip(wanted, values, strict=True) if raw is not None]
            for key in found:
                transaction.delete(key)
            return len(found)

        self._require_present()
        return await self._run(lambda store: store.transact(delete))

    async def _get_collection_keys(self, *, collection: str, limit: int | None = None) -> list[str]:
        below = self._key(collection)
        found = await self._run(
            lambda store: list(store.keys(prefix=below, as_of=self.as_of, limit=limit))
        )
        return [str(decode_tuple(key[len(below) :])[0]) for key in found]

    async def _get_collection_names(self, *, limit: int | None = None) -> list[str]:
        def names(store: StoreOrClient) -> list[str]:
            found: list[str] = []
            start, end = self._prefix, self._prefix + b"\xff"
            while limit is None or len(found) < limit:
                key = next(iter(store.keys(start, end, as_of=self.as_of, limit=1)), None)
                if key is None:
                    break
                name = str(decode_tuple(key[len(self._prefix) :])[0])
                found.append(name)
                start = self._key(name) + b"\xff"
            return found

        return await self._run(names)

    async def _delete_collection(self, *, collection: str) -> bool:
        return await self._delete_below(self._key(collection))

    async def _delete_store(self) -> bool:
        return await self._delete_below(self._prefix)

    async def _delete_below(self, prefix: bytes) -> bool:
        self._require_present()
        deleted = await self._run(lambda store: store.delete_range(prefix=prefix, idempotent=True))
        return deleted is not None

    def _key(self, *fields: str) -> bytes:
        return self._prefix + encode_tuple(fields)

    async def _run(self, work: Callable[[StoreOrClient], T]) -> T:
        return await asyncio.to_thread(lambda: work(self.handle.store))

    def _require_present(self) -> None:
        if self.as_of is not None:
            raise UsageError("the past cannot be written", "make a store without as_of")


def _put_rows(store: StoreOrClient, rows: list[tuple[bytes, bytes, Timestamp | None]]) -> None:
    with store.batch() as batch:
        for key, raw, due in rows:
            batch.put(key, raw, expires=due)
