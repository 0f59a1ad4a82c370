"""A snapshot of a served store, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.client.snapshots import ClientSnapshot
from kvstore.client.threads import CallThreads
from kvstore.timestamp import Timestamp

if TYPE_CHECKING:
    import pyarrow as pa


class AsyncSnapshot:
    """Reads at `as_of`; `AsyncClient.snapshot` makes it. See `ClientSnapshot`."""

    def __init__(self, snapshot: ClientSnapshot, threads: CallThreads) -> None:
        self._snapshot = snapshot
        self._run, self._each = threads.run, threads.each

    @property
    def as_of(self) -> Timestamp:
        """The time of all reads."""
        return self._snapshot.as_of

    async def get(self, key: bytes, default: bytes | None = None) -> bytes | None:
        """As `AsyncClient.get`, at this snapshot's time."""
        return await self._run(self._snapshot.get, key, default)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `AsyncClient.get_many`, at this snapshot's time."""
        return await self._run(self._snapshot.get_many, keys)

    async def floor(self, key: bytes, prefix: bytes | None = None) -> tuple[bytes, bytes] | None:
        """As `AsyncClient.floor`, at this snapshot's time."""
        return await self._run(self._snapshot.floor, key, prefix)

    async def floor_many(
        self, keys: Sequence[bytes], prefix: bytes | None = None
    ) -> list[tuple[bytes, bytes] | None]:
        """As `AsyncClient.floor_many`, at this snapshot's time."""
        return await self._run(self._snapshot.floor_many, keys, prefix)

    async def scan(self, *args: Any, **options: Any) -> AsyncIterator[tuple[bytes, bytes]]:
        """As `AsyncClient.scan`, at this snapshot's time."""
        async for batch in self.scan_batches(*args, **options):
            for row in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                yield row

    def scan_batches(self, *args: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """As `AsyncClient.scan_batches`, at this snapshot's time."""
        return self._each(partial(self._snapshot.scan_batches, *args, **options))

    def join(self, *args: Any, **options: Any) -> AsyncIterator[pa.RecordBatch]:
        """As `AsyncClient.join`: no label is above this snapshot's time."""
        return self._each(partial(self._snapshot.join, *args, **options))

    async def close(self) -> None:
        """End the claim on history. Repeatable."""
        await self._run(self._snapshot.close)

    def __repr__(self) -> str:
        return f"<kvstore.AsyncSnapshot as of {self.as_of}>"
