"""A store with data of every kind, which several processes scan although it is small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.mvcc import parallel_scan
from tests.harness.parts import parts_of
from tests.scanners.crews import ROWS, key


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvstore.Store]:
    """Commits, updates, deletes, range tombstones and an import, partly in the memtable."""
    path = tmp_path_factory.mktemp("scanners")
    with kvstore.open(path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(ROWS):
                batch.put(key(number), b"first %d " % number * 5)
        parts_of(store).engine.compact("data")
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


@pytest.fixture
def fresh(store: kvstore.Store, tmp_path: Path) -> Iterator[kvstore.Store]:
    """The same rows in a store that has started no worker yet."""
    store.checkpoint(tmp_path / "fresh")
    with kvstore.open_read_only(tmp_path / "fresh") as opened:
        yield opened


@pytest.fixture(autouse=True)
def _small_spans_are_worth_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_scan, "SCAN_WORKERS_BYTES_MIN", 0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the pieces that scans take from workers."""
    numbers = []
    parts = parallel_scan.Crew.parts

    def noted(crew: parallel_scan.Crew, number: int) -> Iterator[str]:
        numbers.append(number)
        return parts(crew, number)

    monkeypatch.setattr(parallel_scan.Crew, "parts", noted)
    return numbers
