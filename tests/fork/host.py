"""The program that forks: it has everything open, under load, while its children misbehave.

    python -m tests.fork.host PLACE ENGINE DURABILITY CHILDREN SEED

Writes each acknowledged row's number to PLACE/acknowledged, prints "done" when all children have
ended as they should, and writes until it is killed.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.storage.journal import Journal, Sync
from kvstore.store import Store
from kvstore.tasks import Tasks, Worker
from tests.harness import forks

OTHER_ROWS = 20_000
"""Rows of the passes that are open during a fork: more than one chunk, as a pass reads a chunk at
once."""

LOCAL = threading.local()
KEPT = threading.Event()

Calls = dict[str, Callable[[], object]]


def main() -> None:
    place, engine, durability = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    count, seed = int(sys.argv[4]), int(sys.argv[5])
    with ExitStack() as held:
        store = held.enter_context(
            kvstore.open(
                place / "store",
                engine=engine,
                durability=durability,  # type: ignore[arg-type]
                gc=kvstore.GcPolicy(keep=timedelta(days=1), every=timedelta(milliseconds=20)),
            )
        )
        atexit.register(store.close)
        threading.Thread(target=write, args=(store, place / "acknowledged"), daemon=True).start()
        calls = {**on_store(store, held), **on_others(place, held)}
        threading.Thread(target=keep, args=(place,), daemon=True).start()
        KEPT.wait()
        if not forks.run(calls, count=count, seed=seed):
            return  # in a child, through all blocks
        print("done", flush=True)
        signal.pause()


def write(store: Store, acknowledged: Path) -> None:
    """Put row after row, and note each acknowledged row. The system keeps the notes when the
    process is killed."""
    note = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = 0
    while True:
        store.put(b"row %012d" % number, number.to_bytes(8, "big") * 64)
        os.write(note, number.to_bytes(8, "big"))
        number += 1


def keep(place: Path) -> None:
    """Hold a store in a variable of this thread: the interpreter clears it before a child's hooks
    run."""
    LOCAL.store = kvstore.open(place / "local", durability="async")
    LOCAL.store.put(b"k", b"v")
    KEPT.set()
    threading.Event().wait()


def on_store(store: Store, held: ExitStack) -> Calls:
    """Calls on a store and on objects that it made."""
    begun = store.sync()
    with store.batch() as batch:
        for number in range(OTHER_ROWS):
            batch.put(b"other %08d" % number, bytes(200))
    snapshot = held.enter_context(store.snapshot())
    left_to_its_end = store.snapshot()
    hold = held.enter_context(store.hold("forks"))
    feed = held.enter_context(store.feed("forks", start=begun))
    transaction = store.transaction()
    transaction.__enter__()
    transaction.put(b"never", b"")
    store.put(b"kept", b"v")
    for _ in range(2):  # the second look-up is answered from the values that are kept in memory
        store.get(b"kept")
    reading = store.transaction()
    # Leaving the block without an error would commit, which a child is refused.
    held.push(lambda *error: transaction.__exit__(*error) if error[0] else transaction.rollback())
    changeset = held.enter_context(store.changeset())
    batch = store.batch()
    batch.put(b"never", b"")
    passes: dict[str, Iterator[Any]] = {
        "scan": store.scan(prefix=b"other"),
        "reverse": store.scan(prefix=b"other", reverse=True),
        "changes": store.changes(begun, order="time"),
        "batches": store.scan_batches(prefix=b"other"),
        "feed": feed.batches(),
    }
    for each in passes.values():
        next(each)
    get, put = store.get, store.put
    del changeset
    return {
        "get": lambda: store.get(b"k"),
        "a bound get": lambda: get(b"k"),
        "get_many": lambda: store.get_many([b"k"]),
        "put": lambda: store.put(b"k", b"v"),
        "a bound put": lambda: put(b"k", b"v"),
        "delete_range": lambda: store.delete_range(b"a", b"z"),
        "put_if": lambda: store.put_if(b"k", b"v", None),
        "a new scan": lambda: list(store.scan()),
        "a new snapshot": store.snapshot,
        "a new transaction": store.transaction,
        "a new batch": store.batch,
        "a new changeset": lambda: store.changeset().__enter__(),
        "a new feed": lambda: store.feed("other", start=begun),
        "with": lambda: store.__enter__(),
        "upper": lambda: store.upper,
        "sync": lambda: store.sync(),
        "gc": lambda: store.gc(keep=timedelta(days=1)),
        "verify": lambda: store.verify(),
        "stats": lambda: store.stats(),
        "checkpoint": lambda: store.checkpoint("nowhere"),
        "clear_range": lambda: store.clear_range(b"a", b"b"),
        "tasks": lambda: store.tasks,
        "snapshot.get": lambda: snapshot.get(b"k"),
        "snapshot.scan": lambda: list(snapshot.scan()),
        "a snapshot that is dropped": lambda: left_to_its_end.get(b"k"),
        "hold.timestamp": lambda: hold.timestamp,
        "hold.move": lambda: hold.move(begun),
        "feed.ack": lambda: feed.ack(feed.position),
        "transaction.get": lambda: transaction.get(b"k"),
        "transaction.get of a value that is kept in memory": lambda: reading.get(b"kept"),
        "transaction.scan": lambda: list(reading.scan()),
        "transaction.commit": lambda: store.transact(lambda txn: txn.put(b"k", b"v")),
        "batch": lambda: batch.__exit__(None, None, None),
        **{f"{name} in flight": lambda each=each: list(each) for name, each in passes.items()},
    }


def on_others(place: Path, held: ExitStack) -> Calls:
    """Calls on handles that no store has made."""
    tasks = held.enter_context(Tasks.open(place / "tasks"))
    atexit.register(tasks.close)
    tasks.insert("queue", b"job")
    claimed = tasks.claim(["queue"])
    assert claimed is not None
    journal = held.enter_context(Journal.open(place / "journal", sync=Sync.interval(0.01)))
    atexit.register(journal.close)
    journal.append(b"parent")
    writer = bulk.Import.create(place / "import").writer()
    held.push(lambda *error: writer.__exit__(*error) if error[0] else writer.abandon())
    rows = {"key": [b"%06d" % n for n in range(5000)], "value": [bytes(500)] * 5000}
    writer.write(pa.record_batch(rows, schema=pa.schema(dict.fromkeys(rows, pa.binary()))))
    calls: Calls = {
        "tasks.insert": lambda: tasks.insert("queue"),
        "tasks.claim": lambda: tasks.claim(["queue"]),
        "tasks.renew": lambda: tasks.renew(claimed),
        "worker": lambda: Worker(tasks, {"queue": lambda _: None}).run_one(),
        "journal.append": lambda: journal.append(b"child"),
        "journal.sync": lambda: journal.sync(),
        "writer.put": lambda: writer.put(b"zz", b"v"),
        "writer.write": lambda: writer.write(pa.record_batch({"key": [b"zz"], "value": [b"v"]})),
        "writer.finish": lambda: writer.finish(),
    }
    return {**calls, **on_collection(place, held)}


def on_collection(place: Path, held: ExitStack) -> Calls:
    """Calls on a collection that holds a lease, and on a store opened to be read."""
    with kvstore.open(place / "source") as source:
        for number in range(50):
            source.put(b"%04d" % number, b"v")
        collection = Collection(place / "collection")
        collection.backup(source)
    shard, leased = held.enter_context(collection.snapshot(None))
    reader = held.enter_context(kvstore.open_read_only(place / "source"))
    parallel = held.enter_context(kvstore.open_read_only(place / "source"))
    scan = reader.scan()
    next(scan)
    labels = pa.table({"id": [b"0001"]})
    begun, of_store = collection.join(labels, at=None), reader.join(labels, at=None)
    return {
        "collection.join": lambda: collection.join(labels, at=None),
        "a begun join of a collection": lambda: begun.read_all(),
        "a begun join": lambda: of_store.read_all(),
        "collection.list": lambda: collection.list(),
        "collection.upper": lambda: collection.upper,
        "collection.restore": lambda: collection.restore(place / "restored"),
        "shard.refresh": lambda: shard.refresh(),
        "shard.snapshot": lambda: shard.snapshot(0),
        "leased.read": lambda: list(leased.read()),
        "reader.get": lambda: reader.get(b"k"),
        "reader.scan": lambda: list(scan) and list(reader.scan()),
        "another reader": lambda: parallel.get_many([b"k"]),
    }


if __name__ == "__main__":
    main()
