"""Histories of every kind of change, and comparisons of two stores."""

from __future__ import annotations

import random
from pathlib import Path

import kvstore
from kvstore import backup, bulk
from kvstore.backup.shard import ShardBatch
from kvstore.backup.window import Attempt, upload_here

KEYS = 60

Instants = list[kvstore.Timestamp]


def staged_import(place: Path, value: bytes = b"import") -> bulk.Import:
    """A sealed import of every third key."""
    staged = bulk.Import.create(place)
    with staged.writer() as writer:
        for number in range(0, KEYS, 3):
            writer.put(b"k%02d" % number, value)
    staged.seal()
    return staged


def change(store: kvstore.Store, pick: random.Random, count: int) -> None:
    """Puts, deletes, range deletes and batches of them, at random."""
    for _ in range(count):
        key = b"k%02d" % pick.randrange(KEYS)
        action = pick.random()
        if action < 0.5:
            store.put(key, pick.randbytes(4))
        elif action < 0.6:
            store.put(key, pick.randbytes(4) * 5000)
        elif action < 0.75:
            store.delete(key)
        elif action < 0.9:
            store.delete_range(key, b"k%02d" % (int(key[1:]) + pick.randrange(1, 20)))
        else:
            with store.batch() as batch:
                batch.delete_range(b"k10", b"k20")
                for number in range(10, 20, 2):
                    batch.put(b"k%02d" % number, pick.randbytes(3))
                batch.delete(b"k30")


def live_through(
    store: kvstore.Store, collection: backup.Collection, staging: Path, *, seed: int
) -> Instants:
    """Make four windows of every kind of change, with a backup after each; returns instants in
    between."""
    pick = random.Random(seed)
    instants: Instants = []
    imported = staged_import(staging)
    for window in range(4):
        if window == 1:
            bulk.ingest(store, staging)
        if window == 3:
            store.revert_import(imported.import_id)
        for _ in range(40):
            key = b"k%02d" % pick.randrange(60)
            action = pick.random()
            if action < 0.6:
                store.put(key, pick.randbytes(4))
            elif action < 0.8:
                store.delete(key)
            else:
                store.delete_range(key, b"k%02d" % (int(key[1:]) + pick.randrange(1, 20)))
            instants.append(kvstore.Timestamp(store.upper - 1))
        collection.backup(store)
    return instants


def versions(store: kvstore.Store, upto: int) -> list[kvstore.Change]:
    """Every stored version at or below `upto`."""
    return list(store.replication.versions(since=None, upto=upto))


def upload_and_be_killed(store: kvstore.Store, collection: backup.Collection) -> ShardBatch:
    """Put `b"b"`, and leave a backup of it that was uploaded and recorded, but not appended."""
    with collection.snapshot(None) as (shard, _):
        store.put(b"b", b"1")
        attempt = Attempt.begin(shard.blob, shard.name, shard.upper, int(store.sync()))
        uploaded = upload_here(store, shard, attempt, None).batch
        rows = collection.open_part(uploaded.parts[0]).read().to_batches()[0]
        attempt.record(uploaded.parts[0], rows.slice(rows.num_rows - 1))
    return uploaded


def parts_of(root: Path) -> list[Path]:
    return sorted(root.rglob("*.parquet"))


def flip_a_bit(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    path.write_bytes(damaged)


class Crash(BaseException):
    """Stands for the end of the process."""


def same(source: kvstore.Store, replica: kvstore.Store) -> None:
    """The replica has the versions of its source, up to the replica's `upper`."""
    upto = replica.upper - 1
    assert versions(replica, upto) == versions(source, upto)
    assert list(replica.scan(as_of=upto)) == list(source.scan(as_of=upto))
    assert replica.verify().problems == ()
