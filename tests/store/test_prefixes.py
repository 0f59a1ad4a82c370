"""What deletes by prefix, through every handle that writes: range deletes, and `trim`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.errors import UsageError
from kvstore.remote.control import reach

KEYS = [b"", b"a", b"a\xff", b"a\xff\xff", b"b", b"\xfe\xff", b"\xff", b"\xff\x01", b"\xff" * 8]


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvstore.Store]:
    path = tmp_path_factory.mktemp("prefixes") / "s"
    with kvstore.open(path, durability="async", control=True) as store:
        yield store


def by_batch(store: Any, prefix: bytes) -> None:
    with store.batch() as batch:
        batch.put(prefix + b"!", b"dropped with the rest")
        batch.delete_range(prefix=prefix)


def by_transaction(store: Any, prefix: bytes) -> None:
    with store.transaction() as txn:
        txn.delete_range(prefix=prefix)
        assert list(txn.scan(prefix=prefix)) == []


def by_store(store: Any, prefix: bytes) -> None:
    store.delete_range(prefix=prefix)


def by_mapping(store: Any, prefix: bytes) -> None:
    store.mapping(prefix=prefix).clear()


def through_a_client(delete: Callable[[Any, bytes], None]) -> Callable[[Any, bytes], None]:
    def run(store: Any, prefix: bytes) -> None:
        with kvstore.connect(store.path) as client:
            delete(client, prefix)

    return run


def by_coroutine(store: Any, prefix: bytes) -> None:
    async def run() -> None:
        async with await kvstore.connect_async(store.path) as client:
            await client.delete_range(prefix=prefix)

    asyncio.run(run())


def beside(store: Any, prefix: bytes) -> None:
    with reach(store.path) as found:
        found.delete_range(prefix=prefix)


@pytest.mark.parametrize(
    "delete",
    [
        by_store,
        by_batch,
        by_transaction,
        by_mapping,
        through_a_client(by_store),
        through_a_client(by_batch),
        through_a_client(by_transaction),
        by_coroutine,
        beside,
    ],
)
def test_a_prefix_deletes_what_a_scan_of_the_prefix_shows(
    listening: kvstore.Store, delete: Callable[[Any, bytes], None]
) -> None:
    for prefix in KEYS:
        listening.put_many([(key, b"v") for key in KEYS])
        delete(listening, prefix)
        assert list(listening.keys()) == [key for key in KEYS if not key.startswith(prefix)]


def test_a_prefix_leaves_tables_and_needs_no_end(store: kvstore.Store) -> None:
    import pyarrow as pa

    table = store.table("gates", pa.schema([("number", pa.int64())]), "number")
    table.put({"number": 7})
    store.put_many({b"a": b"1", b"\xff": b"2"})
    assert store.delete_range(prefix=b"x", idempotent=True) is None
    store.delete_range(prefix=b"")
    assert list(store.keys()) == []
    assert table.get(7) == {"number": 7}
    for arguments in ({}, {"start": b"a"}, {"prefix": b"a", "end": b"b"}, {"prefix": "a"}):
        with pytest.raises(UsageError):
            store.delete_range(**arguments)  # type: ignore[arg-type]  # refused
    with pytest.raises(UsageError, match="needs an end"):
        store.delete_range(prefix=b"\xff" * 9)


@given(
    st.sets(st.tuples(st.sampled_from(b"abc"), st.integers(0, 9))),
    st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=3),
    st.integers(0, 4),
)
def test_trim_keeps_the_last_keys_of_each_prefix(
    runs: set[tuple[int, int]], prefixes: list[bytes], keep: int
) -> None:
    """The model sorts the keys of a prefix and drops all but the last ones."""
    keys = sorted(bytes([first]) + b"%d" % number for first, number in runs)
    with kvstore.open(None, engine="memory") as store:
        store.put_many([(key, b"v") for key in keys])
        before = store.upper
        stamp = store.trim(prefixes, keep)
        dropped = {
            key
            for prefix in prefixes
            for key in [key for key in keys if key.startswith(prefix)][: -keep or None]
        }
        assert list(store.keys()) == [key for key in keys if key not in dropped]
        assert (stamp is None) is not bool(dropped)
        assert store.upper == (before if stamp is None else stamp + 1)  # one commit


def test_a_client_trims_as_its_store_does(listening: kvstore.Store, tmp_path: Path) -> None:
    async def by_coroutine() -> None:
        async with await kvstore.connect_async(listening.path) as client:
            await client.trim([b"run/"], keep=1)

    listening.delete_range(prefix=b"")
    with kvstore.connect(listening.path) as client:
        client.put_many([(b"run/%d" % n, b"") for n in range(5)])
        client.trim(b"run/", keep=3)
        assert list(client.keys()) == [b"run/2", b"run/3", b"run/4"]
    with reach(listening.path) as found:
        found.trim([b"run/"], keep=2)
    assert list(listening.keys()) == [b"run/3", b"run/4"]
    asyncio.run(by_coroutine())
    assert list(listening.keys()) == [b"run/4"]
    with pytest.raises(UsageError, match="keep"):
        listening.trim(b"run/", keep=-1)
    with pytest.raises(UsageError, match="prefix"):
        listening.trim(["run/"], keep=1)  # type: ignore[list-item]  # refused
