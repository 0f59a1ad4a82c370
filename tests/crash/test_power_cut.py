"""Power cut: unsynced writes are gone, from any byte of the log on.

The store's directory is copied while it is at work, as a kill would leave it, and its live log is
cut anywhere behind the bytes of the last sync.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.store import Store
from kvstore.testing.model import state_after
from tests.crash.children import stage
from tests.harness.seeds import seeded


def live_log(path: Path) -> Path:
    return max(path.glob("*.log"), key=lambda log: int(log.stem))


@pytest.fixture
def cut(tmp_path: Path) -> tuple[Path, int, list[int]]:
    """A store's directory, the bytes of its log that were synced, and its commits: 40 synced
    commits, then 40 unsynced ones."""
    with kvstore.open(tmp_path / "live", durability="async") as store:
        moments = [write(store, number) for number in range(40)]
        store.sync()
        synced = live_log(tmp_path / "live").stat().st_size
        moments += [write(store, number) for number in range(40, 80)]
        shutil.copytree(tmp_path / "live", tmp_path / "cut")
    return tmp_path / "cut", synced, moments


def write(store: Store, number: int) -> int:
    with store.batch() as batch:
        if number % 5 == 0:
            batch.delete_range(b"a", b"b")
        for index in range(3):
            batch.put(b"a%d" % index, b"%d" % number)
            batch.put(b"z%03d/%d" % (number, index), b"v" * 100)
    assert batch.timestamp is not None
    return batch.timestamp


@pytest.mark.parametrize("how", ["cut", "zeros", "garbage"])
def test_what_was_synced_stands_and_the_rest_is_lost_from_its_end(
    cut: tuple[Path, int, list[int]], tmp_path: Path, how: str
) -> None:
    path, synced, moments = cut
    rng = seeded("KVSTORE_POWER_CUT_SEED")
    whole = live_log(path).read_bytes()
    for trial in range(8):
        copy = tmp_path / f"trial-{trial}"
        shutil.copytree(path, copy)
        at = rng.randint(synced, len(whole))
        tail = {"cut": b"", "zeros": bytes(len(whole) - at), "garbage": rng.randbytes(40_000)}
        live_log(copy).write_bytes(whole[:at] + tail[how])
        with kvstore.open(copy) as store:
            rows = [tuple(row) for row in store.changes(0, order="time")]
            kept = sorted({row[0] for row in rows})
            assert kept == moments[: len(kept)]
            assert len(kept) >= 40
            assert state_after({}, rows) == dict(store.scan())
            assert store.upper > kept[-1]
            assert write(store, 99) > kept[-1]


def test_an_import_that_was_acknowledged_survives_unsynced_neighbours(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "live", durability="async") as store:
        write(store, 1)
        stamp = bulk.ingest(store, stage(tmp_path / "staged", b"x", 2).staging)
        synced = live_log(tmp_path / "live").stat().st_size
        write(store, 2)
        shutil.copytree(tmp_path / "live", tmp_path / "cut")
    log = live_log(tmp_path / "cut")
    log.write_bytes(log.read_bytes()[:synced])
    with kvstore.open(tmp_path / "cut") as store:
        assert store.get(b"import/x/000000", as_of=stamp) is not None
        assert store.get(b"z001/0") is not None  # it was written before, so it is there too
        assert store.get(b"z002/0") is None
