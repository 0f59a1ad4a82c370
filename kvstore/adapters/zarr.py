"""Zarr arrays in a store: each chunk and each document of metadata is a key below a prefix.

    root = zarr.open_group(ZarrStore("grids.db"))

`ZarrStore(..., as_of=time)` reads all arrays as they were at that time. Writes inside
`with store.commit():` show at once, or not at all. A chunk of a bulk load has the key
`prefix + path`, such as `zarr/temperature/c/0/0`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    SuffixByteRequest,
)
from zarr.abc.store import (
    Store as Interface,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from kvstore.adapters.tree import children
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.errors import PreconditionError, UsageError
from kvstore.remote.handle import Handle, Where
from kvstore.transaction import Transaction

T = TypeVar("T")


class ZarrStore(Interface):
    """A store of Zarr. `where` is the path of a store, the URL of a server, or an open store.

    Calls of a store by path or URL run in threads, so that the event loop of Zarr goes on.
    """

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(
        self,
        where: Where | Handle,
        *,
        prefix: str = "zarr/",
        as_of: TimeLike | None = None,
        read_only: bool = False,
        token: str | None = None,
    ) -> None:
        """`as_of` is a time as `Store.get` takes it. It is resolved at the first read, so `"-1h"`
        names one time for all arrays. A store of the past is read only."""
        super().__init__(read_only=read_only or as_of is not None)
        self.handle = Handle.of(where, token=token, read_only=as_of is not None)
        self._prefix = prefix
        self._root = prefix.encode()
        self._as_of = as_of
        self._lock = threading.Lock()
        self._transaction: Transaction | None = None

    @property
    def as_of(self) -> Timestamp | None:
        """The time of all reads; None for the newest."""
        with self._lock:
            if self._as_of is not None and type(self._as_of) is not Timestamp:
                with self.handle.store.snapshot(self._as_of) as snapshot:
                    self._as_of = snapshot.as_of
            return self._as_of

    def with_read_only(self, read_only: bool = False) -> ZarrStore:
        """The same arrays, writable or not. The past stays read only."""
        if self._as_of is not None and not read_only:
            raise UsageError("the past cannot be written", "open a ZarrStore without as_of")
        return ZarrStore(self.handle, prefix=self._prefix, as_of=self._as_of, read_only=read_only)

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Collect all writes to this store in the block, from any thread, and make them one commit
        at its end. Reads of this store in the block see them. An exception drops them.

        They lie in memory until then: at most `BATCH_BYTES_MAX` bytes. Raises `ConflictError`, with
        nothing written, if another writer has changed what the block read.
        """
        self._check_writable()
        with self.handle.store.transaction() as transaction:
            with self._lock:
                if self._transaction is not None:
                    raise UsageError("a commit inside a commit", "write in one block")
                self._transaction = transaction
            try:
                yield
            finally:
                with self._lock:
                    self._transaction = None

    # -- reading ----------------------------------------------------------------------------

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """See `zarr.abc.store.Store.get`."""
        await self._ensure_open()
        return await asyncio.to_thread(
            self.get_sync, key, prototype=prototype, byte_range=byte_range
        )

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The value of a key, or a part of it, for callers without an event loop."""
        value = self._read(key)
        if value is None:
            return None
        made = default_buffer_prototype() if prototype is None else prototype
        return made.buffer.from_bytes(value[_part(len(value), byte_range)])

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """See `zarr.abc.store.Store.get_partial_values`."""
        wanted = (self.get(key, prototype, byte_range) for key, byte_range in key_ranges)
        return list(await asyncio.gather(*wanted))

    async def exists(self, key: str) -> bool:
        """See `zarr.abc.store.Store.exists`."""
        return await asyncio.to_thread(self._read, key) is not None

    async def getsize(self, key: str) -> int:
        """See `zarr.abc.store.Store.getsize`."""
        value = await asyncio.to_thread(self._read, key)
        if value is None:
            raise FileNotFoundError(key)
        return len(value)

    async def list(self) -> AsyncIterator[str]:
        """See `zarr.abc.store.Store.list`."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """See `zarr.abc.store.Store.list_prefix`."""
        keys = await asyncio.to_thread(self._keys, prefix)
        for key in keys:
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """See `zarr.abc.store.Store.list_dir`. Costs a seek for each name."""
        below = self._root + (f"{prefix.rstrip('/')}/".encode() if prefix.rstrip("/") else b"")
        names = await asyncio.to_thread(self._names, below)
        for name in names:
            yield name

    # -- writing ----------------------------------------------------------------------------

    async def set(self, key: str, value: Buffer) -> None:
        """See `zarr.abc.store.Store.set`."""
        await self._ensure_open()
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Set a key, for callers without an event loop."""
        self._check_writable()
        if not isinstance(value, Buffer):
            raise TypeError(f"the value is a {type(value).__name__}, not a Buffer")
        self._write(lambda target: target.put(self._key(key), value.to_bytes()))

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """See `zarr.abc.store.Store.set_if_not_exists`. Safe beside other writers."""
        self._check_writable()

        def put() -> None:
            with self._lock:
                open_commit = self._transaction
                if open_commit is not None:
                    if open_commit.get(self._key(key)) is None:
                        open_commit.put(self._key(key), value.to_bytes())
                    return
            with suppress(PreconditionError):  # another value is there
                self.handle.store.put_if(self._key(key), value.to_bytes(), None)

        await asyncio.to_thread(put)

    async def delete(self, key: str) -> None:
        """See `zarr.abc.store.Store.delete`."""
        await asyncio.to_thread(self.delete_sync, key)

    def delete_sync(self, key: str) -> None:
        """Delete a key, for callers without an event loop."""
        self._check_writable()
        self._write(lambda target: target.delete(self._key(key)))

    async def delete_dir(self, prefix: str) -> None:
        """See `zarr.abc.store.Store.delete_dir`. One write for any number of keys."""
        self._check_writable()
        below = self._root + (f"{prefix.rstrip('/')}/".encode() if prefix else b"")
        await asyncio.to_thread(self._write, lambda target: target.delete_range(prefix=below))

    # -- the store --------------------------------------------------------------------------

    def close(self) -> None:
        """Let the store go; see `Handle.close`."""
        super().close()
        self.handle.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrStore) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"ZarrStore({str(self)!r})"

    def __str__(self) -> str:
        return f"kvstore://{self.handle!r}@{self._as_of or ''}/{self._prefix}"

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_as_of": self.as_of, "_transaction": None}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    # -- inside -----------------------------------------------------------------------------

    def _identity(self) -> tuple[Any, ...]:
        return self.handle, self._prefix, self._as_of, self.read_only

    def _key(self, key: str) -> bytes:
        return self._root + key.encode()

    def _read(self, key: str) -> bytes | None:
        with self._lock:
            if self._transaction is not None:
                return self._transaction.get(self._key(key))
        return self.handle.store.get(self._key(key), as_of=self.as_of)

    def _write(self, write: Callable[[Any], object]) -> None:
        with self._lock:
            if self._transaction is not None:
                write(self._transaction)
                return
        write(self.handle.store)

    def _keys(self, prefix: str) -> Sequence[str]:
        below = self._key(prefix)
        with self._lock:
            if self._transaction is not None:
                rows = self._transaction.scan(prefix=below)
                return [key[len(self._root) :].decode() for key, _ in rows]
        found = self.handle.store.keys(prefix=below, as_of=self.as_of)
        return [key[len(self._root) :].decode() for key in found]

    def _names(self, below: bytes) -> Sequence[str]:
        with self._lock:
            if self._transaction is not None:
                rows = self._transaction.scan(prefix=below)
                names = (key[len(below) :].partition(b"/")[0] for key, _ in rows)
                return [name.decode() for name in dict.fromkeys(names)]
        found = children(self.handle.store, below, as_of=self.as_of)
        return [name.decode() for name in dict.fromkeys(child.name for child in found)]


def _part(size: int, wanted: ByteRequest | None) -> slice:
    """The part of a value that a request names."""
    if wanted is None:
        return slice(None)
    if isinstance(wanted, RangeByteRequest):
        return slice(wanted.start, wanted.end)
    if isinstance(wanted, OffsetByteRequest):
        return slice(wanted.offset, None)
    if isinstance(wanted, SuffixByteRequest):
        return slice(max(size - wanted.suffix, 0), None)
    raise ValueError(f"Unexpected byte_range, got {wanted}.")
