"""The contents of a collection, as readers of its parts see them: chains, batches, parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pyarrow.parquet as pq

from backup.chains import Chain, Chains
from backup.instants import labels_of, time_or_label
from backup.place import CollectionPlace, find_place
from backup.sealed import Secret
from backup.shard import Shard, ShardBatch, ShardPart, ShardSnapshot, Storage
from backup.shard.rows.part_reader import fault_of, open_part
from kvstore.clock import Clock, WallClock
from kvstore.forks import own
from kvstore.storage.address import address_text, public_address
from kvstore.storage.limited_blob import Bandwidth
from kvstore.storage.patience import Patience, Waiting
from kvstore.timestamp import TimeLike, Timestamp


class CollectionContents:
    """A collection that is read. `backup.Collection` also writes it, and has the arguments."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        passphrase: str | None = None,
        *,
        key_file: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        clock: WallClock | None = None,
        patience: float | None = None,
        on_wait: Callable[[Waiting], None] | None = None,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.url = address_text(url)
        secret = Secret.given(passphrase, key_file)
        if storage is None:
            retries = Patience(patience, tell=on_wait)
            found = find_place(
                self.url, secret, options=options, patience=retries, bandwidth=bandwidth
            )
        else:
            found = CollectionPlace(storage, secret, self.url)
        self._found, self._place = found, found.storage
        # A place in memory ends with its process, and a given storage has no address.
        self._is_lasting = storage is None and not self.url.startswith("memory:")
        self._address = public_address(self.url)
        self._clock = clock or Clock()
        self._chains = self._chains_on(self._place)
        own(self, f"the collection at {self.url}")

    def __repr__(self) -> str:
        return f"<backup.Collection {self._address}>"

    # -- contents ---------------------------------------------------------------------------

    @property
    def since(self) -> Timestamp:
        """The oldest instant of the newest chain that can be restored; 0 for an empty one."""
        newest = self._chains.newest()
        return Timestamp(0 if newest is None else newest.since)

    @property
    def upper(self) -> Timestamp:
        """The first instant that cannot be restored yet; 0 for an empty collection."""
        newest = self._chains.newest()
        return Timestamp(0 if newest is None else newest.upper)

    @property
    def source(self) -> str | None:
        """The `store_id` of the store that is backed up here; None for an empty collection."""
        record = self._chains.read()
        return None if record is None else record.source

    def labels(self) -> dict[str, Timestamp]:
        """The labels of instants. Each can be given where an `as_of` is asked for."""
        return labels_of(self._chains.filled())

    def batches(self) -> Sequence[ShardBatch]:
        """The batches of the newest chain, oldest first, for readers of parts."""
        newest = self._chains.newest()
        return () if newest is None else newest.refresh().batches

    def chain(self, name: str | None = None, *, covering: Sequence[int] = ()) -> Chain | None:
        """The chain `name`; None if it is gone.

        Without a name, the newest chain that covers all times of `covering`, or the newest of all
        where no chain covers them.
        """
        return self._chains.chain(name, covering)

    def chains(self) -> Sequence[Sequence[ShardBatch]]:
        """The batches of all chains, oldest first."""
        return [shard.refresh().batches for shard in self._chains.shards()]

    def check_part(self, part: ShardPart) -> str | None:
        """Read a part of one of the chains; returns its fault, None if its bytes are as written."""
        return fault_of(self._place.blob, part)

    def open_part(self, part: ShardPart) -> pq.ParquetFile:
        """Open a part of one of the `batches`, to be read piece by piece, each page checked.

        Raises `MissingPartError` if compaction has replaced the part: look at the batches again.
        """
        return open_part(self._place.blob, part)

    def snapshot(
        self, as_of: TimeLike | None
    ) -> AbstractContextManager[tuple[Shard, ShardSnapshot]]:
        """A snapshot of the newest chain that covers `as_of`. Raises as `restore` does."""
        return self._chains.snapshot(None if as_of is None else self._time(as_of))

    def snapshots(self) -> AbstractContextManager[Mapping[Shard, ShardSnapshot]]:
        """All chains, oldest first, each with a snapshot at its newest instant."""
        return self._chains.snapshots()

    # -- inside -----------------------------------------------------------------------------

    def _chains_on(self, storage: Storage) -> Chains:
        return Chains(storage, self.url, self._clock)

    def _time(self, time: TimeLike, name: str = "as_of") -> int:
        """A time that a caller gave as the argument `name`, or the instant of a label."""
        return time_or_label(time, self.labels, name=name, now=self._clock.wall_ns)
