"""The requests and bytes of a reader, counted by a proxy in front of an S3 server."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from obstore.store import ObjectStore

import kvstore
from kvstore import backup
from tests.harness.proxy import Proxy, Request
from tests.shard.conftest import s3_bucket, s3_options, s3_server

__all__ = ["s3_bucket", "s3_server"]

MIB = 1 << 20
ROWS = 24_000


def part_reads(proxy: Proxy) -> list[Request]:
    """The requests for parts since the last call."""
    return [request for request in proxy.taken() if "/part/" in request.path]


@pytest.fixture
def proxy(s3_server: str) -> Iterator[Proxy]:
    with Proxy(s3_server) as made:
        yield made


@pytest.fixture
def url(s3_bucket: Callable[[], ObjectStore]) -> str:
    return f"s3://{s3_bucket().config['bucket']}/place"  # type: ignore[attr-defined]


def opened(url: str, proxy: Proxy, passphrase: str | None) -> backup.Collection:
    options = s3_options(proxy.url)
    return backup.Collection(url, passphrase, options=options)


@pytest.mark.parametrize("passphrase", [None, "correct horse"], ids=["clear", "sealed"])
def test_a_cold_get_costs_three_ranges_a_warm_one_and_a_kept_one_none(
    store: kvstore.Store, proxy: Proxy, url: str, tmp_path: Path, passphrase: str | None
) -> None:
    pick = random.Random(1)
    keys = [b"key%08d" % number for number in range(ROWS)]
    for begin in range(0, ROWS, 4000):
        with store.batch() as batch:
            for key in keys[begin : begin + 4000]:
                batch.put(key, pick.randbytes(300))
    collection = opened(url, proxy, passphrase)
    collection.backup(store)
    with store.batch() as batch:
        for key in pick.sample(keys, 3000):  # a part of just below 1 MiB
            batch.put(key, pick.randbytes(300))
    collection.backup(store)
    assert [info.parts for info in collection.list()] == [1, 1]
    as_of = kvstore.Timestamp(collection.upper - 1)

    with collection.open(cache=tmp_path / "cache") as reader:
        part_reads(proxy)
        for key in (keys[5], keys[-6]):
            assert reader.get(key) == store.get(key, as_of)
            cold = [r for r in part_reads(proxy) if r.method == "GET"]
            assert len(cold) <= 3
            assert sum(r.size_bytes for r in cold) <= 2 * MIB
        counts: list[int] = []
        for key in pick.sample(keys, 30):
            assert reader.get(key) == store.get(key, as_of)
            found = part_reads(proxy)
            counts.append(len(found))
            assert sum(r.size_bytes for r in found) <= 2 * MIB
        assert max(counts) <= 2  # one, and one more where a filter is wrong
        assert sum(counts) <= len(counts) + 3
        again = pick.sample(keys, 100)
        reader.get_many(again)
        part_reads(proxy)
        for key in again:
            assert reader.get(key) == store.get(key, as_of)
        assert part_reads(proxy) == []
    collection.compact()
    with opened(url, proxy, passphrase).open(cache=tmp_path / "other") as reader:
        part_reads(proxy)
        assert reader.get(keys[7]) == store.get(keys[7], as_of)
        cold = part_reads(proxy)
        assert len([r for r in cold if r.method == "GET"]) <= 3
        assert sum(r.size_bytes for r in cold if r.method == "GET") <= 2 * MIB
        assert reader.get(b"key00000007x") is None
    with opened(url, proxy, passphrase).open(cache=tmp_path / "other") as reader:
        part_reads(proxy)
        assert reader.get(keys[7]) == store.get(keys[7], as_of)
        assert part_reads(proxy) == []  # another process has the same cache
    if passphrase is not None:
        entries = [path.read_bytes() for path in (tmp_path / "other").rglob("*-*")]
        assert entries
        assert not any(b"key0" in entry for entry in entries)
