"""Verifying a collection, at three depths: files exist, bytes are as written, contents are right.

Contents are compared by fingerprint: the sum, modulo 2^64, of a hash of every version. The order in
which the two sides list their versions does not matter, and neither side is held in memory.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa

from kvstore.backup.chains import Chains, no_backup
from kvstore.backup.rows import row_batches
from kvstore.backup.shard import EMPTY, Shard, ShardSnapshot, Window
from kvstore.base.arguments import word
from kvstore.base.meters import OnProgress, Tally
from kvstore.errors import Argument, CorruptionError, HistoryGoneError, UsageError
from kvstore.store import Store

Depth: TypeAlias = Literal["files", "checksums", "contents"]
Fingerprint: TypeAlias = "tuple[int, int]"
DEPTHS: Final[tuple[Depth, ...]] = ("files", "checksums", "contents")
_DEPTH: Final = word(*DEPTHS)

_NUMBERS = struct.Struct("<qBIi")
_MODULUS = 1 << 64


class VerifyReport(NamedTuple):
    """The extent of a verification. `rows` were compared with the store at the depth `"contents"`;
    at the other depths they are the rows of all parts."""

    chains: int
    backups: int
    parts: int
    bytes: int
    rows: int


def verify_collection(
    chains: Chains, *, depth: Depth, store: Store | None, progress: OnProgress | None
) -> VerifyReport:
    """Check a collection; see `Collection.verify`."""
    record = chains.read()
    chains.require_named(record)
    for shard in chains.shards(record):
        shard.require_newest()
    shards = chains.filled(record)
    if record is None or not shards:
        raise no_backup(chains.where)
    if store is not None:
        chains.require_reached(record, shards[-1], store)
    return verify_chains(shards, chains.where, depth=depth, store=store, progress=progress)


def require_comparison(depth: str, *, given: bool) -> None:
    """Raise `UsageError` unless a store is given to the one depth that compares with a store."""
    if depth == "contents" and not given:
        raise UsageError(
            (Argument.of("depth", depth), " compares with a store, and has none"),
            ("pass ", Argument("store")),
        )
    if depth != "contents" and given:
        raise UsageError(
            (Argument.of("depth", depth), " compares with no store"),
            ("pass ", Argument.of("depth", "contents")),
        )


def verify_chains(
    shards: Sequence[Shard],
    where: str,
    *,
    depth: Depth,
    store: Store | None,
    progress: OnProgress | None = None,
) -> VerifyReport:
    """Check all chains; see `Collection.verify`."""
    _DEPTH.check("depth", depth)
    require_comparison(depth, given=store is not None)
    held: list[ShardSnapshot] = []

    def tell(rows: int) -> None:
        for snapshot in held:
            snapshot.renew()
        if progress is not None:
            progress(rows)

    tally = Tally(tell)
    damaged: list[str] = []
    for shard in shards:
        with ExitStack() as stack:
            if depth != "files":  # the snapshot keeps parts until they are read
                try:
                    held[:] = [stack.enter_context(shard.snapshot(shard.upper - 1))]
                except HistoryGoneError:
                    if shard.refresh().since != EMPTY:
                        raise
                    continue  # the chain has just expired
            found = shard.scrub(checksums=depth != "files", tally=tally)
        held.clear()
        damaged += [f"{name} is missing" for name in found.missing]
        damaged += [f"{name}: its size or checksum differs" for name in found.altered]
    if damaged:
        raise CorruptionError(
            where, "; ".join(damaged), "restore an instant before it, and make a new full backup"
        )
    batches = [batch for shard in shards for batch in shard.state.batches]
    parts = [part for batch in batches for part in batch.parts]
    rows = sum(part.rows for part in parts)
    if store is not None:
        compared = comparable(shards, store)
        looked = Tally(lambda _: tell(tally.rows))  # these rows were counted when they were read
        rows = sum(_compare_contents(shard, where, store, looked) for shard in compared)
    return VerifyReport(
        len(shards), len(batches), len(parts), sum(part.size for part in parts), rows
    )


def comparable(shards: Sequence[Shard], store: Store) -> list[Shard]:
    """The chains, oldest first, that share some history with `store`.

    The store may have lost all the history of an older chain. The newest chain is always among the
    result: if the store has lost all of its history, that is an error.
    """
    since = store.since
    return [shard for shard in shards if shard is shards[-1] or shard.upper > since]


def _compare_contents(shard: Shard, where: str, store: Store, tally: Tally) -> int:
    """Compare the state at the oldest time that both keep, and all changes after it."""
    since, upto = max(shard.since, store.since), shard.upper - 1
    versions = store.replication.versions
    with shard.snapshot(upto) as snapshot:
        changes = Compared(
            fingerprint(tally.over(snapshot.view(Window(since, upto)))),
            fingerprint(row_batches(versions(since=since, upto=upto))),
        )
    with shard.snapshot(since) as snapshot:
        state = Compared(
            fingerprint(tally.over(snapshot.read()), at=since),
            fingerprint(row_batches(versions(since=0, upto=since, revisions="latest")), at=since),
        )
    return require_equal(where, changes, state, since=since, upto=upto)


class Compared(NamedTuple):
    """Fingerprints of the same rows as a collection and a store have them."""

    ours: Fingerprint
    theirs: Fingerprint


def require_equal(where: str, changes: Compared, state: Compared, *, since: int, upto: int) -> int:
    """Returns how many rows were compared. Raises `CorruptionError` if fingerprints differ."""
    for what, rows, (ours, theirs) in (
        (f"changes in ({since}, {upto}]", "versions", changes),
        (f"state at {since}", "rows", state),
    ):
        if ours != theirs:
            raise CorruptionError(
                where,
                f"its {what} differ from the store's: {ours[1]} {rows} against {theirs[1]}",
                "find out which is right, and make a new full backup",
            )
    return changes.ours[1] + state.ours[1]


def together(fingerprints: Iterable[Fingerprint]) -> Fingerprint:
    """The fingerprint of a whole, from the fingerprints of parts that share no rows."""
    total = count = 0
    for number, rows in fingerprints:
        total, count = total + number, count + rows
    return total % _MODULUS, count


def fingerprint(batches: Iterable[pa.RecordBatch], *, at: int | None = None) -> Fingerprint:
    """An order-independent hash of rows, and their number. O(bytes).

    The rows of a state are hashed as if written at `at`, since the two sides may know them by
    different times. Where an import and its revert lie below `since`, the backup has the time of
    the revert for a key that the import had covered, and the store the time of the earlier put.
    """
    total = count = 0
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("key", "op", "value", "end_key"))
        times = batch.column("timestamp").to_pylist() if at is None else repeat(at)
        for key, op, value, end, timestamp in zip(*columns, times, strict=at is None):
            third = value if value is not None else end
            # The lengths are hashed too: otherwise two different rows could have the same bytes.
            length = -1 if third is None else len(third)
            head = _NUMBERS.pack(timestamp, op, len(key), length)
            digest = hashlib.blake2b(head + key + (third or b""), digest_size=8).digest()
            total += int.from_bytes(digest, "little")
        count += batch.num_rows
    return total % _MODULUS, count
