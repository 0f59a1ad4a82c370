"""One scenario on local files, S3, Azure, a storage that fails at random; clear and sealed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from obstore.store import ObjectStore

import kvstore
from kvstore import backup, bulk
from kvstore.backup.shard import MemoryBlob, MemoryConsensus, Storage
from tests.backup.histories import change, staged_import, versions
from tests.harness.storage_faults import FaultRates, FaultyBlob, FaultyConsensus, Weather
from tests.shard import azurite
from tests.shard.conftest import azure_container, azure_server, s3_bucket, s3_options, s3_server

__all__ = ["azure_container", "azure_server", "s3_bucket", "s3_server"]

Opener = Callable[[], backup.Collection]


@pytest.fixture
def on_files(tmp_path: Path) -> Callable[..., backup.Collection]:
    return lambda **secret: backup.Collection(tmp_path / "collection", **secret)


@pytest.fixture
def on_s3(s3_server: str, s3_bucket: Callable[[], ObjectStore]) -> Callable[..., backup.Collection]:
    bucket = s3_bucket().config["bucket"]  # type: ignore[attr-defined]
    options = {**s3_options(s3_server), "client_options": {"allow_http": True}}
    url = f"s3://{bucket}/some/place"
    return lambda **secret: backup.Collection(url, options=options, **secret)


@pytest.fixture
def on_azure(azure_server: str, azure_container: str) -> Callable[..., backup.Collection]:
    url, options = f"az://{azure_container}/some/place", azurite.options(azure_server)
    return lambda **secret: backup.Collection(url, options=options, **secret)


@pytest.fixture
def on_faults() -> Callable[..., backup.Collection]:
    # A stale head would rightly show the past of a collection. Each step of this test needs the
    # newest state.
    weather = Weather(7, FaultRates(stale=0.0))
    storage = Storage(
        FaultyBlob(MemoryBlob(), weather), FaultyConsensus(MemoryConsensus(), weather)
    )
    return lambda **secret: backup.Collection("faulty", storage=storage, **secret)


@pytest.fixture(params=["files", "s3", pytest.param("azure", marks=pytest.mark.azure), "faults"])
def place(request: pytest.FixtureRequest) -> Callable[..., backup.Collection]:
    opener: Callable[..., backup.Collection] = request.getfixturevalue(f"on_{request.param}")
    return opener


@pytest.fixture(params=[{}, {"passphrase": "correct horse"}], ids=["clear", "sealed"])
def opened(request: pytest.FixtureRequest, place: Callable[..., backup.Collection]) -> Opener:
    return lambda: place(**request.param)


def restores(collection: backup.Collection, store: kvstore.Store, at: int, place: Path) -> None:
    collection.restore(place, as_of=kvstore.Timestamp(at))
    with kvstore.open(place) as restored:
        since = restored.since  # a storage that fails may show an older `since` of the collection
        assert list(restored.scan()) == list(store.scan(as_of=kvstore.Timestamp(at)))
        assert list(restored.changes(since, at)) == list(store.changes(since, at))


def test_a_collection_lives_its_life(opened: Opener, store: kvstore.Store, tmp_path: Path) -> None:
    pick = random.Random(1)
    staged_import(tmp_path / "staging")
    for window in range(4):
        change(store, pick, 40)
        if window == 1:
            bulk.ingest(store, tmp_path / "staging")
        info = opened().backup(store, token=f"t{window}")
        # A script that heard no answer makes the backup again, and it is done once.
        assert opened().backup(store, token=f"t{window}")[:3] == info[:3]
    collection = opened()
    assert len(collection.list()) == 4
    assert collection.list()[0].lower == 0
    collection.verify(depth="contents", store=store)
    first, upto = collection.list()[0].upper - 1, collection.upper - 1
    restores(collection, store, pick.randrange(first, upto), tmp_path / "one")
    rows = [pair for rows in collection.scan_batches() for pair in _pairs(rows)]
    assert rows == list(store.scan(as_of=kvstore.Timestamp(upto)))

    collection.compact()
    assert len(opened().list()) == 1
    restores(collection, store, pick.randrange(first, upto), tmp_path / "two")

    middle = (collection.since + upto) // 2
    assert opened().expire(before=kvstore.Timestamp(middle)) == middle
    collection = opened()
    restores(collection, store, upto, tmp_path / "three")
    collection.verify(depth="contents", store=store)
    collection.scrub(delete_orphans_older_than=timedelta(0))
    collection.verify(depth="checksums")
    backup.replicate(opened(), tmp_path / "standby")
    with kvstore.open(tmp_path / "standby") as standby:
        assert list(standby.scan()) == list(store.scan(as_of=kvstore.Timestamp(upto)))
        standby.replication.promote()


def test_histories_are_kept_whole(opened: Opener, store: kvstore.Store, tmp_path: Path) -> None:
    pick = random.Random(2)
    for _ in range(3):
        change(store, pick, 30)
        opened().backup(store)
    at = opened().restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as restored:
        assert versions(restored, at) == versions(store, at)


def _pairs(rows: Any) -> Iterator[tuple[bytes, bytes]]:
    yield from zip(rows.column("key").to_pylist(), rows.column("value").to_pylist(), strict=True)
