"""Scans by several processes: rows and order of a scan, and nothing left whatever ends it."""

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

import bulk
import kvstore
from kvstore.errors import ClosedError, CorruptionError, StorageError
from kvstore.scanners import SCANS_DIRECTORY, Scanners, crew, scan
from kvstore.scanners.source import Source
from kvstore.store.reading import Reading

ROWS = 20_000


def key(number: int) -> bytes:
    return b"k\x00%06d" % number


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvstore.Store]:
    """Commits, updates, deletes, range tombstones and an import, partly in the memtable."""
    path = tmp_path_factory.mktemp("scanners")
    with kvstore.open(path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(ROWS):
                batch.put(key(number), b"first %d " % number * 5)
        store._engine.compact("data")
        load = bulk.Import.create(path / "staging")
        with load.writer() as writer:
            for number in range(0, ROWS, 7):
                writer.put(key(number), b"imported")
        load.seal()
        bulk.ingest(store, path / "staging")
        store.delete_range(key(3_000), key(5_000))
        with store.batch() as batch:
            for number in range(0, ROWS, 3):
                batch.put(key(number), b"second")
            for number in range(1, ROWS, 3):
                batch.delete(key(number))
        yield store


@pytest.fixture(autouse=True)
def _small_spans_are_worth_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "SCAN_WORKERS_BYTES_MIN", 0)


def nothing_is_left(store: kvstore.Store) -> bool:
    assert store.path is not None
    scans = store.path / SCANS_DIRECTORY
    left = [str(file) for file in scans.rglob("*")] if scans.exists() else []
    assert not left
    return True


def have_started(store: Reading, *, workers: int, prefix: bytes = b"") -> None:
    """Have so many processes ready for the next scan, of which the store's own is one."""
    store.scan_batches(prefix=prefix, workers=workers).read_all()
    for worker in store._scanners._idle:
        assert worker.asks or worker.pipe.poll(60)


def crew_of(store: kvstore.Store) -> list[int]:
    """The processes that wait for the next scan."""
    return [worker._process.pid for worker in store._scanners._idle]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("batch_rows", [100, 4096])
def test_the_rows_are_those_of_a_scan_in_its_order(
    store: kvstore.Store, workers: int, batch_rows: int
) -> None:
    have_started(store, workers=workers)
    loaded = store.history(key(0))[-1].timestamp
    for bounds in ({}, {"prefix": b"k\x000001"}, {"start": key(2_500), "end": key(9_000)}):
        for as_of in (None, loaded):
            alone = store.scan_batches(**bounds, as_of=as_of).read_all()
            beside = store.scan_batches(
                **bounds, as_of=as_of, batch_rows=batch_rows, workers=workers
            )
            batches = list(beside)
            assert pa.Table.from_batches(batches, beside.schema).equals(alone)
            assert max(batch.num_rows for batch in batches) <= batch_rows
    assert nothing_is_left(store)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_snapshot_scans_as_the_store_does(store: kvstore.Store, workers: int) -> None:
    have_started(store, workers=workers)
    with store.snapshot() as snapshot:
        expected = store.scan_batches(prefix=b"k\x000001", as_of=snapshot.as_of).read_all()
        store.put(key(1_000), b"later")
        beside = snapshot.scan_batches(prefix=b"k\x000001", batch_rows=100, workers=workers)
        last = snapshot.scan_batches(reverse=True, limit=3, workers=workers).read_all()
        assert last["key"].to_pylist() == [k for k, _ in snapshot.scan(reverse=True, limit=3)]
    batches = list(beside)  # the snapshot has let its time go: what it began goes on
    assert pa.Table.from_batches(batches, beside.schema).equals(expected)
    assert len(batches) > 1
    assert max(batch.num_rows for batch in batches) <= 100
    assert nothing_is_left(store)


def test_workers_stay_for_the_next_scan(store: kvstore.Store) -> None:
    store.scan_batches(workers=2).read_all()
    crew = crew_of(store)
    store.scan_batches(workers=2).read_all()
    assert set(crew_of(store)) == set(crew)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the pieces that scans take from workers."""
    numbers = []
    parts = crew.Crew.parts

    def noted(crew: crew.Crew, number: int) -> Iterator[str]:
        numbers.append(number)
        return parts(crew, number)

    monkeypatch.setattr(crew.Crew, "parts", noted)
    return numbers


def crew_at_work(store: Reading) -> crew.Crew:
    """That of the one scan under way."""
    (running,) = store._scanners._scans
    return running._crew


def listened(beside: crew.Crew) -> bool:
    """Its workers have said what they have to say: they ask, or have written what they may."""
    for worker in beside._workers:
        while not (worker.asks or beside._ahead[worker] == crew.SCAN_PARTS_AHEAD_MAX):
            assert worker.pipe.poll(60)
            beside.listen()
    return True


def read_beside(store: Reading, *, workers: int) -> pa.Table:
    """A scan that takes its time."""
    scan = store.scan_batches(batch_rows=100, workers=workers)
    beside = crew_at_work(store)
    batches = [batch for batch in scan if listened(beside)]
    return pa.Table.from_batches(batches, scan.schema)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_scan_reads_with_its_workers(
    store: kvstore.Store, taken: list[int], workers: int
) -> None:
    have_started(store, workers=workers)
    taken.clear()
    assert read_beside(store, workers=workers).equals(store.scan_batches().read_all())
    assert taken
    assert 0 not in taken
    assert nothing_is_left(store)


def test_a_scan_does_not_wait_for_workers_that_are_being_started(
    store: kvstore.Store, taken: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setattr(crew, "_MAIN", f"open({str(gate)!r}).read()\n{crew._MAIN}")
    monkeypatch.setattr(store, "_scanners", Scanners())
    alone = store.scan_batches().read_all()
    try:
        assert store.scan_batches(workers=2).read_all().equals(alone)
        assert not taken
        assert nothing_is_left(store)
        gate.write_bytes(b"")
        assert read_beside(store, workers=2).equals(alone)
        assert taken
    finally:
        store._scanners.close()


def test_it_shows_the_moment_it_was_made(store: kvstore.Store) -> None:
    have_started(store, workers=2)
    alone = store.scan_batches().read_all()
    rows = store.scan_batches(batch_rows=100, workers=2)
    beside = crew_at_work(store)
    store.put(b"k\x00later", b"")
    store.delete_range(key(0), key(100))
    assert pa.Table.from_batches(batch for batch in rows if listened(beside)).equals(alone)
    assert store.scan_batches(workers=2).read_all().equals(store.scan_batches().read_all())


def test_an_empty_span_has_no_rows(store: kvstore.Store) -> None:
    assert store.scan_batches(prefix=b"nothing", workers=2).read_all().num_rows == 0
    assert nothing_is_left(store)


@pytest.mark.parametrize("taken", [0, 1])
def test_letting_go_of_it_leaves_nothing(store: kvstore.Store, taken: int) -> None:
    have_started(store, workers=2)
    store.scan_batches(workers=2).read_all()
    scan = store.scan_batches(batch_rows=100, workers=2)
    held = [scan.read_next_batch() for _ in range(taken)]
    (worker,) = crew_at_work(store).at_work()
    del scan
    assert worker._process.poll() == -signal.SIGKILL
    assert worker not in store._scanners._idle
    assert nothing_is_left(store)
    for batch in held:  # what was handed out stays readable
        assert batch.column("key")[0].as_py() == next(store.scan())[0]


def test_a_worker_that_is_killed_is_an_error_and_leaves_nothing(store: kvstore.Store) -> None:
    scan = store.scan_batches(batch_rows=100, workers=2)
    scan.read_next_batch()
    os.kill(crew_at_work(store)._workers[0]._process.pid, signal.SIGKILL)
    with pytest.raises(StorageError, match="worker process"):
        scan.read_all()
    assert nothing_is_left(store)
    assert store.scan_batches(workers=2).read_all().equals(store.scan_batches().read_all())


def test_an_interrupt_where_a_scan_ends_leaves_nothing(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Source) -> None:
        close(source)
        raise KeyboardInterrupt

    close = Source.close
    monkeypatch.setattr(Source, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.scan_batches(workers=2).read_all()
    assert nothing_is_left(store)


def test_workers_that_are_being_started_outlive_their_scan(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_scanners", Scanners())
    store.scan_batches(batch_rows=100, workers=3)  # and let go of
    started = set(crew_of(store))
    assert len(started) == 2
    have_started(store, workers=3)
    assert set(crew_of(store)) == started
    store._scanners.close()


_FEW_DESCRIPTORS = """
import resource
import sys
import kvstore
from tests.test_scanners import scan
scan.SCAN_WORKERS_BYTES_MIN = 0
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
with kvstore.open(sys.argv[1]) as store:
    scans = [store.scan_batches(workers=2) for _ in range(2)]
    for rows in scans:
        assert rows.read_all().num_rows == 150
    store.put(b"k", b"")
"""


def test_it_takes_few_descriptors_however_many_files_there_are(tmp_path: Path) -> None:
    load = bulk.Import.create(tmp_path / "staging")
    for number in range(150):
        with load.writer() as writer:
            writer.put(key(number), b"imported")
    load.seal()
    with kvstore.open(tmp_path / "store") as store:
        bulk.ingest(store, tmp_path / "staging")
        assert len(store._engine.files()) >= 150
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", _FEW_DESCRIPTORS, str(tmp_path / "store")]
    subprocess.run(command, cwd=root, check=True, timeout=300)


def test_a_worker_killed_while_it_waits_is_replaced(store: kvstore.Store) -> None:
    store.scan_batches(workers=2).read_all()
    worker = store._scanners._idle[-1]
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert store.scan_batches(workers=2).read_all().equals(store.scan_batches().read_all())


@pytest.mark.damages_store
def test_damage_is_raised_here_and_leaves_nothing(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(2_000):
                batch.put(key(number), os.urandom(2_000))  # not in the change index
        store._engine.compact("data")
    largest = max((tmp_path / "store").glob("*.sst"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)
    with kvstore.open(tmp_path / "store") as store:
        with pytest.raises(CorruptionError):
            store.scan_batches(workers=2).read_all()
        assert nothing_is_left(store)
    with kvstore.open(tmp_path / "store") as store:  # and where a worker finds it
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
    written = scan._written

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

    monkeypatch.setattr(scan, "_written", damage)
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
        processes = [worker._process for worker in crew_at_work(store)._workers]
    assert all(process.poll() is not None for process in processes)
    assert nothing_is_left(store)
    with pytest.raises(ClosedError):
        running.read_all()


_SCANNING = """
import sys
import kvstore
from tests.test_scanners import crew_at_work, have_started, listened, scan
scan.SCAN_WORKERS_BYTES_MIN = 0
with kvstore.open(sys.argv[1]) as store:
    have_started(store, workers=2)
    store.scan_batches(workers=2).read_all()
    rows = store.scan_batches(batch_rows=10, workers=2)
    rows.read_next_batch()
    if sys.argv[2] == "idle":
        listened(crew_at_work(store))
    print(*(worker._process.pid for worker in crew_at_work(store)._workers), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("workers", ["busy", "idle"])
def test_killing_the_process_that_scans_leaves_nothing(tmp_path: Path, workers: str) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(ROWS):
                batch.put(key(number), b"x" * (2_000 if workers == "busy" else 20))
        store._engine.compact("data")
    scanning = subprocess.Popen(
        [sys.executable, "-c", _SCANNING, str(tmp_path / "store"), workers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    assert scanning.stdout is not None
    pids = [int(pid) for pid in scanning.stdout.readline().split()]
    assert pids
    processes = [os.pidfd_open(pid) for pid in pids]
    assert len(list((tmp_path / "store" / SCANS_DIRECTORY).iterdir())) == 1
    scanning.kill()
    scanning.communicate()
    for process in processes:  # readable once the process has ended
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


def test_workers_import_nothing_from_the_working_directory(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the caller does not either: a script lies elsewhere, or is a command."""
    (tmp_path / "secrets.py").write_text("raise ImportError('of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(store, "_scanners", Scanners())
    try:
        have_started(store, workers=2)
        assert store._scanners._idle[0].is_alive()
        assert read_beside(store, workers=2) == store.scan_batches().read_all()
    finally:
        store._scanners.close()


def test_a_read_only_store_is_read_where_it_is(store: kvstore.Store, tmp_path: Path) -> None:
    store.checkpoint(tmp_path / "copy")
    expected = store.scan_batches().read_all()
    with kvstore.open_read_only(tmp_path / "copy") as copy:
        have_started(copy, workers=2)
        assert read_beside(copy, workers=2).equals(expected)
    assert not (tmp_path / "copy" / SCANS_DIRECTORY).exists()


@pytest.mark.parametrize("flushed", [True, False])
def test_a_reader_beside_a_writer_scans_its_own_moment(tmp_path: Path, flushed: bool) -> None:
    """Workers open what the reader opened; files that are gone by then it reads alone."""
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(ROWS):
                batch.put(key(number), b"first %d " % number * 5)
        if flushed:
            store._engine.compact("data")
        store.put(key(0), b"second")
        with kvstore.open_read_only(tmp_path / "store") as reader:
            expected = reader.scan_batches().read_all()
            have_started(reader, workers=2)
            store.delete_range(key(0), key(ROWS))
            store.gc(before=store.upper - 1, compact=True)
            for family in ("data", "changes", "ranges", "meta"):
                store._engine.compact(family)
            assert store.scan_batches().read_all().num_rows == 0
            for _ in range(2):
                assert reader.scan_batches(workers=2).read_all().equals(expected)
            assert reader.scan_batches().read_all().equals(expected)
            assert reader.get(key(0)) == b"second"


def test_a_store_in_memory_is_scanned_by_its_own_process(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", engine="memory") as store:
        store.put(b"k", b"v")
        assert store.scan_batches(workers=2).read_all().to_pydict() == {
            "key": [b"k"],
            "value": [b"v"],
        }
        assert not crew_of(store)


@pytest.mark.parametrize("on_file", [False, True])
def test_a_small_span_is_scanned_by_the_stores_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_file: bool
) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(100):
                batch.put(key(number), os.urandom(2_000))
        if on_file:
            store._engine.compact("data")
        expected = store.scan_batches().read_all()
        for least, crew in ((10_000_000, 0), (100_000, 1)):
            monkeypatch.setattr(scan, "SCAN_WORKERS_BYTES_MIN", least)
            assert store.scan_batches(workers=2).read_all().equals(expected)
            assert len(crew_of(store)) == crew
