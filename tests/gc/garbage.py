"""Probes of a store under GC: stored entries, everything that is readable, garbage that is left."""

from __future__ import annotations

import threading
from pathlib import Path

from kvstore import Store, bulk
from kvstore.codec.keys import TAIL_BYTES, split_data_key, unframe
from kvstore.engine.api import DATA
from kvstore.retention.gc import garbage, revived
from tests.harness.parts import parts_of
from tests.joins.histories import pairs, table

KEYS = [bytes([letter]) for letter in b"abcdef"]


def stored(store: Store, family: str) -> int:
    """Entries that a family holds."""
    cursor, total = parts_of(store).engine.cursor(family), 0
    while keys := cursor.take(1000)[0]:
        total += len(keys)
    return total


def add_import(store: Store, staging: Path, rows: dict[bytes, bytes]) -> tuple[int, int]:
    staged = bulk.Import.create(staging)
    with staged.writer() as writer:
        for key, value in sorted(rows.items()):
            writer.put(key, value)
    staged.seal()
    return staged.import_id, bulk.ingest(store, staging)


def collecting() -> list[threading.Thread]:
    """The threads that collect garbage in the background, of all open stores."""
    return [thread for thread in threading.enumerate() if thread.name == "kvstore-gc"]


def readable(store: Store, since: int, upto: int) -> list[object]:
    """The answers to all reads at or above `since`, up to the time `upto`."""
    times = range(since, upto + 1)
    joined = store.join(table([(key, t) for t in times for key in KEYS]))
    floors = store.floor_many([b"z"] * len(times), as_of=times)
    states: list[object] = [pairs(joined), floors]
    states += [list(store.scan(as_of=t)) for t in times]
    states.append(list(store.changes(since, upto, order="time")))
    states.append(list(store.changes(since, upto, revisions="latest")))
    return states


def left_over(store: Store, since: int) -> list[bytes]:
    """Stored entries that are garbage at `since`, or whose time is older than the time that reads
    return."""
    tails: dict[bytes, list[bytes]] = {}
    cursor = parts_of(store).engine.cursor(DATA)
    while keys := cursor.take(1000)[0]:
        for key in keys:
            framed, _, _ = split_data_key(key)
            tails.setdefault(unframe(framed), []).append(key[-TAIL_BYTES:])
    fragments, stamps = parts_of(store).versions.view
    return [
        key
        for key, of_key in tails.items()
        if garbage(of_key, stamps, fragments.stack(key), since=since)
        or revived(of_key, stamps, fragments.stack(key), since=since)
    ]
