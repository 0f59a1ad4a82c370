"""A new collection of versions that were given their times, and not backed up from a store.

    write the parts -> append them as the first batch

Invariants
1. A collection that has a backup is refused: history is never rewritten.
2. Nothing names the parts before the append. A seed that was killed leaves orphans, which a scrub
   finds, and perhaps an empty collection, which can be seeded again.
3. The source of a seeded collection is no store: the first bit of its id is set, and no store has
   such an id. So no store can append to it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final, TypeAlias

from backup.chains import RETENTION, Chains
from backup.shard import ShardBatch, delete_batch
from kvstore.errors import UpperMismatchError, UsageError
from kvstore.timestamp import Timestamp

Write: TypeAlias = "Callable[[str], ShardBatch]"
"""Writes the parts of the first batch of a chain, which it is given the name of."""

_FIRST_BIT: Final = 1 << 63


def seed_collection(chains: Chains, write: Write, *, since: int) -> Timestamp:
    """Seed as `Collection.seed` says."""
    record = chains.read()
    if record is None:
        record = chains.begin(f"{secrets.randbits(63) | _FIRST_BIT:016x}")
    elif not int(record.source, 16) & _FIRST_BIT or chains.filled(record):
        raise _exists(chains)
    shard = chains.shard(record.chains[-1])
    batch = write(shard.name)
    shard.critical(RETENTION).downgrade(since)
    try:
        shard.writer().compare_and_append(batch)
    except UpperMismatchError as error:
        delete_batch(shard.blob, batch)
        raise _exists(chains) from error
    shard.leave_witness()
    return Timestamp(batch.upper - 1)


def _exists(chains: Chains) -> UsageError:
    return UsageError(
        f"{chains.where} holds a collection", "seed a new one: history is never rewritten"
    )
