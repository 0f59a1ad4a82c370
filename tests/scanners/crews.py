"""Workers of a parallel scan: start them, listen to them, and check that no file and no process is
left."""

from __future__ import annotations

import pyarrow as pa

import kvstore
from kvstore.mvcc import parallel_scan
from kvstore.mvcc.parallel_scan import SCANS_DIRECTORY
from tests.harness.parts import parts_of

ROWS = 20_000


def key(number: int) -> bytes:
    return b"k\x00%06d" % number


def nothing_is_left(store: kvstore.Store) -> bool:
    assert store.path is not None
    scans = store.path / SCANS_DIRECTORY
    left = [str(file) for file in scans.rglob("*")] if scans.exists() else []
    assert not left
    return True


def have_started(store: kvstore.Store, *, workers: int, prefix: bytes = b"") -> None:
    """Have `workers` processes ready for the next scan, the store's own process included."""
    store.scan_batches(prefix=prefix, workers=workers).read_all()
    for worker in parts_of(store).scanners.idle:
        assert worker.asks or worker.pipe.poll(60)


def crew_of(store: kvstore.Store) -> list[int]:
    """The processes that wait for the next scan."""
    return [worker.process.pid for worker in parts_of(store).scanners.idle]


def crew_at_work(store: kvstore.Store) -> parallel_scan.Crew:
    """The crew of the one scan under way."""
    (running,) = parts_of(store).scanners.scans
    return running.crew


def listened(beside: parallel_scan.Crew) -> bool:
    """Wait until each worker asks for a piece, or has written as many parts ahead as it may."""
    for worker in beside.workers:
        while not (worker.asks or beside.ahead[worker] == parallel_scan.SCAN_PARTS_AHEAD_MAX):
            assert worker.pipe.poll(60)
            beside.listen()
    return True


def read_beside(store: kvstore.Store, *, workers: int) -> pa.Table:
    """Scan so slowly that the workers do as much as they can."""
    scan = store.scan_batches(batch_rows=100, workers=workers)
    beside = crew_at_work(store)
    batches = [batch for batch in scan if listened(beside)]
    return pa.Table.from_batches(batches, scan.schema)
