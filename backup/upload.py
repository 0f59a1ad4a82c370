"""Uploading a window: from a store's rows to parts, which are yet to be appended as a batch.

One process, or the tasks of a cluster, each for a piece of the key space: all write parts by
`write_batch` of rows from `exported`.

Invariants
1. Parts come in the order of their keys, and hold each row of the window once.
2. Nothing names the parts until the batch is appended: what an upload that failed has left is an
   orphan, which changes no result and is found by a scrub.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from backup.export import Exported, exported
from backup.progress import Attempt
from backup.shard import Batch, BatchDesc, Progress, Shard, Tally
from kvstore.store import Store


class Uploaded(NamedTuple):
    """A batch to append, whose history is whole from `whole_since` on."""

    whole_since: int
    batch: Batch


class Upload(Protocol):
    """Writes the rows of a window that come behind those an attempt has uploaded before."""

    def __call__(
        self, store: Store, shard: Shard, attempt: Attempt, progress: Progress | None
    ) -> Uploaded:
        """Upload. Raises `HistoryGoneError` if the store no longer has the window."""
        ...


def upload_here(
    store: Store, shard: Shard, attempt: Attempt, progress: Progress | None
) -> Uploaded:
    """Upload in this process, in bounded memory; each full part is recorded."""
    window = exported(store, since=attempt.since, upto=attempt.upper - 1, after=attempt.after)
    return upload_window(window, shard, attempt, progress)


def upload_window(
    window: Exported, shard: Shard, attempt: Attempt, progress: Progress | None
) -> Uploaded:
    """Upload rows that are there already, in this process."""
    rows = window.rows if progress is None else Tally(progress).over(window.rows)
    desc = BatchDesc(attempt.lower, attempt.upper)
    return Uploaded(window.whole_since, shard.write_batch(desc, rows, on_full=attempt.record))
