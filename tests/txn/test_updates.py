"""Updates in place: read and written in one commit, without conflicts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import kvstore
from kvstore.base.span import RESERVED
from kvstore.errors import ConflictError, UsageError
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

ONE = b"\xff" * 8


@pytest.fixture(params=["rocksdb", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: object) -> Iterator[kvstore.Store]:
    with kvstore.open(f"{tmp_path}/s", engine=request.param, durability="async") as opened:
        yield opened


def test_an_update_gets_the_newest_value_and_its_change_is_in_the_feed(
    store: kvstore.Store,
) -> None:
    feed = store.feed("f", start="now")
    assert store.update(b"k", lambda old: (old or b"") + b"a") == b"a"
    assert store.update(b"k", lambda old: (old or b"") + b"b") == b"ab"
    assert store.increment(b"n") == 1
    assert store.increment(b"n", by=-5) == -4
    assert store.update(b"k", lambda old: None) is None
    assert store.update(b"none", lambda old: None) is None  # nothing is written
    assert [(e.key, e.value) for batch in feed for e in batch.events] == [
        (b"k", b"a"),
        (b"k", b"ab"),
        (b"n", b"1"),
        (b"n", b"-4"),
        (b"k", None),
    ]


def test_an_update_decides_whether_its_value_expires(tmp_path: Path) -> None:
    hour, clock = timedelta(hours=1), kvstore.ManualClock(10**18)
    with kvstore.open(tmp_path / "s", clock=clock, durability="async") as store:

        def lives() -> dict[str, int | None]:
            found = {key.decode(): store.ttl(key) for key, _ in store.scan()}
            return {key: life and round(life.total_seconds()) for key, life in found.items()}

        assert store.update(b"k", lambda old: b"a", expires=hour) == b"a"
        assert store.increment(b"n", 5, expires=hour) == 5
        assert store.transact(lambda txn: txn.increment(b"t", expires=hour)) == 1
        store.put(b"gone", b"v")
        assert store.update(b"gone", lambda old: None, expires=hour) is None
        assert lives() == {"k": 3600, "n": 3600, "t": 3600}
        clock.advance(60 * 10**9)
        assert store.increment(b"n", expires=hour) == 6  # the life of the counter begins anew
        assert store.update(b"k", lambda old: (old or b"") + b"b") == b"ab"
        with store.transaction() as txn:
            assert txn.update(b"u", lambda old: b"x", expires="+30m") == b"x"
            assert txn.increment(b"t") == 2
        assert lives() == {"k": None, "n": 3600, "t": None, "u": 1800}
        with pytest.raises(UsageError, match="ahead"):
            store.increment(b"n", expires=timedelta(0))
        with pytest.raises(UsageError, match="one that expires"):
            store.update(b"x" * KEY_BYTES_MAX, lambda old: b"v", expires=hour)
        clock.advance(3600 * 10**9)
        assert dict(store.scan()) == {b"k": b"ab", b"t": b"2"}
        assert store.history(b"n")[0].value is None
        assert store.increment(b"n") == 1


def test_threads_lose_no_update_beside_puts_and_transactions(store: kvstore.Store) -> None:
    def work(number: int) -> None:
        for _ in range(100):
            store.increment(b"n")
            store.update(b"k", lambda old: bytes([(old or b"\0")[0] ^ (1 << number)]))
            store.put(b"other", b"v")
            store.transact(lambda txn: txn.increment(b"n"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get(b"n") == b"800"
    assert store.get(b"k") == b"\0"  # each bit was turned a hundred times
    assert len(store.history(b"n")) == 800


def test_random_updates_agree_with_a_model(store: kvstore.Store) -> None:
    draw, model = seeded("KVSTORE_UPDATES"), dict[bytes, int]()
    for _ in range(300):
        key, by = bytes([draw.randrange(4)]), draw.randint(-9, 9)
        match draw.randrange(4):
            case 0:
                store.delete(key)
                model.pop(key, None)
            case 1:
                store.delete_range(b"\x01", b"\x03")
                model = {k: v for k, v in model.items() if not b"\x01" <= k < b"\x03"}
            case _:
                model[key] = model.get(key, 0) + by
                assert store.increment(key, by) == model[key]
    assert dict(store.scan()) == {key: b"%d" % value for key, value in model.items()}


def test_a_function_that_fails_or_writes_leaves_the_key_alone(store: kvstore.Store) -> None:
    store.put(b"k", b"v")

    def fail(old: bytes | None) -> bytes:
        raise ZeroDivisionError

    def write(old: bytes | None) -> bytes:
        store.put(b"k", b"written inside")
        return b"lost"

    upper = store.upper
    with pytest.raises(ZeroDivisionError):
        store.update(b"k", fail)
    assert store.upper == upper
    with pytest.raises(UsageError, match="has committed to the store; use a transaction"):
        store.update(b"k", write)
    assert store.get(b"k") == b"written inside"
    for wrong in ("text", 7, bytes(VALUE_BYTES_MAX + 1)):
        with pytest.raises(UsageError, match="value"):
            store.update(b"k", lambda old, wrong=wrong: wrong)
    for key in ("k", RESERVED + b"1", bytes(70_000)):
        with pytest.raises(UsageError):
            store.increment(key)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="change=b'v'; pass a function"):
        store.update(b"k", b"v")  # type: ignore[arg-type]
    with (
        store.transaction() as txn,
        pytest.raises(UsageError, match="change=b'v'; pass a function"),
    ):
        txn.update(b"k", b"v")  # type: ignore[arg-type]
    assert store.get(b"k") == b"written inside"


@pytest.mark.parametrize("value", [b"", b"-", b"1.5", b" 1", b"+1", b"1_0", b"x", b"9" * 20, ONE])
def test_a_value_that_is_no_counter_is_refused(store: kvstore.Store, value: bytes) -> None:
    store.put(b"n", value)
    with pytest.raises(UsageError, match="is no counter"):
        store.increment(b"n")
    assert store.get(b"n") == value


def test_a_counter_has_64_bits(store: kvstore.Store) -> None:
    assert store.increment(b"n", (1 << 63) - 1) == (1 << 63) - 1
    with pytest.raises(UsageError, match="more than 64 bits"):
        store.increment(b"n")
    assert store.increment(b"n", -(1 << 63)) == -1
    assert store.increment(b"n", np.int64(3)) == 2
    for by in (1.0, True, "1"):
        with pytest.raises(UsageError, match="by="):
            store.increment(b"n", by)  # type: ignore[arg-type]


def test_a_transaction_updates_its_own_writes_and_conflicts_as_for_reads(
    store: kvstore.Store,
) -> None:
    with store.transaction() as txn:
        assert [txn.increment(b"n"), txn.increment(b"n", 2)] == [1, 3]
        assert txn.update(b"k", lambda old: old) is None
        txn.put_many({b"a": b"1"})
    assert (txn.timestamp, store.get(b"n"), store.get(b"a")) == (store.upper - 1, b"3", b"1")
    txn = store.transaction()
    txn.increment(b"n")
    store.increment(b"n")
    with pytest.raises(ConflictError):
        txn.commit()
    assert store.get(b"n") == b"4"


@pytest.mark.parametrize(
    "rows",
    [
        {b"a": b"1", b"b": b"2"},
        [(b"b", b"0"), (b"a", b"1"), [b"b", b"2"]],
        iter([(bytearray(b"a"), b"1"), (b"b", memoryview(b"2"))]),
        pa.table({"key": [b"a", b"b"], "value": ["1", "2"], "more": [1, 2]}),
        pa.record_batch({"value": [b"1", b"2"], "key": [b"a", b"b"]}),
        pl.DataFrame({"key": ["a", "b"], "value": [b"1", b"2"]}),
    ],
    ids=["mapping", "pairs", "buffers", "table", "batch", "polars"],
)
def test_many_rows_are_one_commit(rows: object) -> None:
    with kvstore.open(None, engine="memory") as store:
        stamp = store.put_many(rows)
        assert dict(store.scan()) == {b"a": b"1", b"b": b"2"}
        assert {change.timestamp for change in store.changes(0)} == {stamp}
        assert store.put_many([]) is None


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (b"ab", "rows of type bytes"),
        (7, "rows of type int"),
        ([(b"a", b"1"), (b"b",)], "is no pair"),
        ([(b"a", b"1"), (b"b", None)], "use delete"),
        (pa.table({"key": [b"a"], "v": [b"1"]}), "no column 'value'"),
        (pa.table([[b"a"], [b"1"], [b"2"]], names=["key", "value", "value"]), "2 columns 'value'"),
        (pa.table({"key": [b"a", None], "value": [b"1", b"2"]}), "a null in row 1"),
        (pa.table({"key": [1], "value": [b"1"]}), "keys of type int64"),
    ],
)
def test_rows_that_are_no_rows_write_nothing(rows: object, told: str) -> None:
    with kvstore.open(None, engine="memory") as store:
        with pytest.raises(UsageError, match=told):
            store.put_many(rows)
        assert list(store.scan()) == []


def test_rows_beyond_a_batch_are_refused() -> None:
    with bounds(BATCH_BYTES_MAX=10), kvstore.open(None, engine="memory") as store:
        with pytest.raises(UsageError, match="commit smaller ones"):
            store.put_many((b"%d" % n, bytes(8)) for n in range(9))
        assert list(store.scan()) == []
