"""Every end of a scan by several processes leaves no process and no file."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore.base import worker_process
from kvstore.errors import ClosedError, CorruptionError, StorageError
from kvstore.mvcc import parallel_scan
from kvstore.mvcc.parallel_scan import SCANS_DIRECTORY, ScanSource
from tests.harness.parts import parts_of
from tests.scanners.crews import (
    ROWS,
    crew_at_work,
    crew_of,
    have_started,
    key,
    listened,
    nothing_is_left,
    read_beside,
)


def test_a_scan_does_not_wait_for_workers_that_are_being_started(
    fresh: kvstore.Store, taken: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    program = worker_process.PROGRAM
    monkeypatch.setattr(worker_process, "PROGRAM", f"open({str(gate)!r}).read()\n{program}")
    alone = fresh.scan_batches().read_all()
    assert fresh.scan_batches(workers=2).read_all().equals(alone)
    assert not taken
    assert nothing_is_left(fresh)
    gate.write_bytes(b"")
    assert read_beside(fresh, workers=2).equals(alone)
    assert taken


@pytest.mark.parametrize("taken", [0, 1])
def test_letting_go_of_it_leaves_nothing(store: kvstore.Store, taken: int) -> None:
    have_started(store, workers=2)
    store.scan_batches(workers=2).read_all()
    scan = store.scan_batches(batch_rows=100, workers=2)
    held = [scan.read_next_batch() for _ in range(taken)]
    (worker,) = crew_at_work(store).at_work()
    del scan
    assert worker.process.poll() == -signal.SIGKILL
    assert worker not in parts_of(store).scanners.idle
    assert nothing_is_left(store)
    for batch in held:  # batches that were handed out stay readable
        assert batch.column("key")[0].as_py() == next(store.scan())[0]


def test_a_worker_that_is_killed_is_an_error_and_leaves_nothing(store: kvstore.Store) -> None:
    have_started(store, workers=2)
    store.scan_batches(workers=2).read_all()
    scan = store.scan_batches(batch_rows=100, workers=2)
    scan.read_next_batch()
    (worker,) = crew_at_work(store).at_work()  # a scan needs nothing of one that is being started
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(StorageError, match="worker process"):
        scan.read_all()
    assert nothing_is_left(store)
    assert store.scan_batches(workers=2).read_all().equals(store.scan_batches().read_all())


def test_an_interrupt_where_a_scan_ends_leaves_nothing(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: ScanSource) -> None:
        close(source)
        raise KeyboardInterrupt

    close = ScanSource.close
    monkeypatch.setattr(ScanSource, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.scan_batches(workers=2).read_all()
    assert nothing_is_left(store)


def test_workers_that_are_being_started_outlive_their_scan(fresh: kvstore.Store) -> None:
    fresh.scan_batches(batch_rows=100, workers=3)  # the scan is dropped at once
    started = set(crew_of(fresh))
    assert len(started) == 2
    have_started(fresh, workers=3)
    assert set(crew_of(fresh)) == started


def test_a_worker_killed_while_it_waits_is_replaced(store: kvstore.Store) -> None:
    store.scan_batches(workers=2).read_all()
    worker = parts_of(store).scanners.idle[-1]
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    assert store.scan_batches(workers=2).read_all().equals(store.scan_batches().read_all())


@pytest.mark.damages_store
def test_damage_is_raised_here_and_leaves_nothing(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(2_000):
                batch.put(key(number), os.urandom(2_000))  # too large for the change index
        parts_of(store).engine.compact("data")
    largest = max((tmp_path / "store").glob("*.sst"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)
    with kvstore.open(tmp_path / "store") as store:
        with pytest.raises(CorruptionError):
            store.scan_batches(workers=2).read_all()
        assert nothing_is_left(store)
    with kvstore.open(tmp_path / "store") as store:  # now a worker finds the damage
        have_started(store, workers=2, prefix=key(0))
        rows = store.scan_batches(batch_rows=100, workers=2)
        rows.read_next_batch()
        with pytest.raises(CorruptionError):
            listened(crew_at_work(store))
        del rows
        assert nothing_is_left(store)


@pytest.mark.parametrize("place", ["head", "offsets", "tail", "gone"])
def test_a_part_that_the_disk_damages_is_an_error_that_says_to_scan_again(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    damaged: list[Path] = []
    written = parallel_scan.batches_of

    def damage(file: Path) -> Iterator[pa.RecordBatch]:
        damaged.append(file)
        content = bytearray(file.read_bytes())
        if place == "offsets":
            batches = pa.ipc.open_file(pa.py_buffer(bytes(content)))
            found = batches.get_batch(0).column(1).buffers()[1].to_pybytes()[:64]
            at = bytes(content).index(found)
            content[at + 4 : at + 8] = (1 << 30).to_bytes(4, "little")
        else:
            at = {"head": 300, "tail": len(content) - 200, "gone": 0}[place]
            content[at : at + 100] = b"\xff" * 100
        file.write_bytes(content)
        if place == "gone":
            file.unlink()
        return written(file)

    def scan_until_damaged() -> None:
        while True:  # a scan that is faster than its workers reads no part of theirs
            store.scan_batches(batch_rows=100, workers=3).read_all()

    monkeypatch.setattr(parallel_scan, "batches_of", damage)
    have_started(store, workers=3, prefix=b"nothing")
    with pytest.raises(StorageError, match="scan again"):
        scan_until_damaged()
    assert damaged
    assert nothing_is_left(store)


def test_closing_the_store_ends_its_scans_and_processes(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(ROWS):
                batch.put(key(number), b"")
        store.scan_batches(workers=2).read_all()
        running = store.scan_batches(batch_rows=100, workers=3)
        running.read_next_batch()
        processes = [worker.process for worker in crew_at_work(store).workers]
    assert all(process.poll() is not None for process in processes)
    assert nothing_is_left(store)
    with pytest.raises(ClosedError):
        running.read_all()


_SCANNING = """
import sys
import kvstore
from kvstore.mvcc import parallel_scan
from tests.scanners.crews import crew_at_work, have_started, listened
parallel_scan.SCAN_WORKERS_BYTES_MIN = 0
with kvstore.open(sys.argv[1]) as store:
    have_started(store, workers=2)
    store.scan_batches(workers=2).read_all()
    rows = store.scan_batches(batch_rows=10, workers=2)
    rows.read_next_batch()
    if sys.argv[2] == "idle":
        listened(crew_at_work(store))
    print(*(worker.process.pid for worker in crew_at_work(store).workers), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("workers", ["busy", "idle"])
def test_killing_the_process_that_scans_leaves_nothing(tmp_path: Path, workers: str) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(ROWS):
                batch.put(key(number), b"x" * (2_000 if workers == "busy" else 20))
        parts_of(store).engine.compact("data")
    scanning = subprocess.Popen(
        [sys.executable, "-c", _SCANNING, str(tmp_path / "store"), workers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert scanning.stdout is not None
    pids = [int(pid) for pid in scanning.stdout.readline().split()]
    assert pids
    processes = [os.pidfd_open(pid) for pid in pids]
    assert len(list((tmp_path / "store" / SCANS_DIRECTORY).iterdir())) == 1
    scanning.kill()
    scanning.communicate()
    for process in processes:  # the pipe becomes readable when the process ends
        assert select.select([process], [], [], 60)[0]
        os.close(process)
    assert not list((tmp_path / "store" / SCANS_DIRECTORY).iterdir())


def test_opening_removes_what_a_dead_machine_left(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"k", b"v")
        store.checkpoint(tmp_path / "copy")
    (tmp_path / "store" / SCANS_DIRECTORY).mkdir()
    os.rename(tmp_path / "copy", tmp_path / "store" / SCANS_DIRECTORY / "0123")
    with kvstore.open(tmp_path / "store") as store:
        assert nothing_is_left(store)
        assert store.get(b"k") == b"v"
