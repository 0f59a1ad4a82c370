"""A scan by several processes has the rows and the order of a scan by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.mvcc import parallel_scan
from kvstore.mvcc.parallel_scan import SCANS_DIRECTORY
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
    batches = list(beside)  # the snapshot is closed: the scan that it began continues
    assert pa.Table.from_batches(batches, beside.schema).equals(expected)
    assert len(batches) > 1
    assert max(batch.num_rows for batch in batches) <= 100
    assert nothing_is_left(store)


def test_workers_stay_for_the_next_scan(store: kvstore.Store) -> None:
    store.scan_batches(workers=2).read_all()
    crew = crew_of(store)
    store.scan_batches(workers=2).read_all()
    assert set(crew_of(store)) == set(crew)


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


_FEW_DESCRIPTORS = """
import resource
import sys
import kvstore
from kvstore.mvcc import parallel_scan
parallel_scan.SCAN_WORKERS_BYTES_MIN = 0
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
        assert len(parts_of(store).engine.files()) >= 150
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", _FEW_DESCRIPTORS, str(tmp_path / "store")]
    subprocess.run(command, cwd=root, check=True, timeout=1200)


def test_workers_import_nothing_from_the_working_directory(
    fresh: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts do not import from the working directory either, because they lie elsewhere or are
    commands."""
    (tmp_path / "secrets.py").write_text("raise ImportError('of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    have_started(fresh, workers=2)
    assert parts_of(fresh).scanners.idle[0].is_alive()
    assert read_beside(fresh, workers=2) == fresh.scan_batches().read_all()


def test_a_read_only_store_is_read_where_it_is(store: kvstore.Store, tmp_path: Path) -> None:
    store.checkpoint(tmp_path / "copy")
    expected = store.scan_batches().read_all()
    with kvstore.open_read_only(tmp_path / "copy") as copy:
        have_started(copy, workers=2)
        assert read_beside(copy, workers=2).equals(expected)
    assert not (tmp_path / "copy" / SCANS_DIRECTORY).exists()


@pytest.mark.parametrize("flushed", [True, False])
def test_a_reader_beside_a_writer_scans_its_own_moment(tmp_path: Path, flushed: bool) -> None:
    """Workers open the files that the reader opened. If a file was removed meanwhile, the reader
    scans alone."""
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(ROWS):
                batch.put(key(number), b"first %d " % number * 5)
        if flushed:
            parts_of(store).engine.compact("data")
        store.put(key(0), b"second")
        with kvstore.open_read_only(tmp_path / "store") as reader:
            expected = reader.scan_batches().read_all()
            have_started(reader, workers=2)
            store.delete_range(key(0), key(ROWS))
            store.gc(before=store.upper - 1, compact=True)
            for family in ("data", "changes", "ranges", "meta"):
                parts_of(store).engine.compact(family)
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
            parts_of(store).engine.compact("data")
        expected = store.scan_batches().read_all()
        for least, crew in ((10_000_000, 0), (100_000, 1)):
            monkeypatch.setattr(parallel_scan, "SCAN_WORKERS_BYTES_MIN", least)
            assert store.scan_batches(workers=2).read_all().equals(expected)
            assert len(crew_of(store)) == crew
