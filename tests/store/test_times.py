"""Times in words, and numbers that are surely no nanoseconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import kvstore
from kvstore.backup import Collection
from kvstore.base.timestamp import Timestamp, to_timestamp
from kvstore.errors import HistoryGoneError, NotYetWrittenError, PreconditionError, UsageError
from kvstore.mvcc.arrow import to_microseconds

US = pa.timestamp("us", "UTC")

HOUR = 3_600 * 10**9
TODAY = 1_790_000_000 * 10**9


@pytest.fixture
def clock() -> kvstore.ManualClock:
    return kvstore.ManualClock(TODAY)


@pytest.fixture
def store(clock: kvstore.ManualClock) -> Iterator[kvstore.Store]:
    with kvstore.open(None, engine="memory", clock=clock) as opened:
        opened.put(b"k", b"two hours ago")
        clock.advance(2 * HOUR)
        opened.put(b"k", b"now")
        yield opened


@pytest.mark.parametrize("time", ["-1h", " -60m ", "-3600s", timedelta(hours=1), "-3600000ms"])
def test_an_age_is_a_time_for_every_verb(store: kvstore.Store, time: str | timedelta) -> None:
    assert store.get(b"k", time) == b"two hours ago"
    assert store.get_many([b"k"], time) == [b"two hours ago"]
    assert store.get_many([b"k", b"k"], [time, "now"]) == [b"two hours ago", b"now"]
    assert list(store.scan(as_of=time)) == [(b"k", b"two hours ago")]
    assert [change.value for change in store.changes(time)] == [b"now"]
    assert [event.value for event in store.events(time)] == [b"now"]
    assert store.hold("h", at=time).timestamp == TODAY + HOUR
    with store.snapshot(time) as snapshot:
        assert snapshot.get(b"k") == b"two hours ago"
    assert [e.value for b in store.feed("f", start=time) for e in b.events] == [b"now"]
    store.revert_range(b"a", b"z", to=time)
    assert store.get(b"k", "now") == b"two hours ago"


def test_ages_count_from_the_clock_of_the_store(
    store: kvstore.Store, clock: kvstore.ManualClock
) -> None:
    clock.advance(HOUR)
    assert store.get(b"k", "-2h") == b"two hours ago"
    assert store.get(b"k", timedelta(minutes=59)) == b"now"
    with pytest.raises(NotYetWrittenError):
        store.get(b"k", clock.wall_ns() + 1)


def test_history_that_is_gone_is_no_approximation(store: kvstore.Store) -> None:
    store.gc(before="-1h")
    with pytest.raises(HistoryGoneError):
        store.get(b"k", "-90m")
    assert store.get(b"k", "-30m") == b"two hours ago"


@pytest.mark.parametrize(
    ("number", "unit"),
    [
        (1_700_000_000, "seconds"),
        (1_700_000_000_123, "milliseconds"),
        (1_700_000_000_123_456, "microseconds"),
        (253_402_214_400, "seconds"),  # 9999-12-31
        (253_402_214_400_000, "milliseconds"),
        (253_402_214_400_000_000, "microseconds"),
    ],
)
def test_a_number_that_is_surely_no_nanoseconds_is_refused(
    store: kvstore.Store, tmp_path: Path, number: int, unit: str
) -> None:
    for call in (
        lambda: store.get(b"k", number),
        lambda: store.get(b"k", as_of=number),
        lambda: store.get_many([b"k"], [number]),
        lambda: list(store.scan(as_of=number)),
        lambda: list(store.changes(number)),
        lambda: store.feed("f", start=number),
        lambda: store.hold("h", at=number),
        lambda: store.gc(number),
        lambda: Collection(tmp_path / "c").expire(number),
    ):
        with pytest.raises(UsageError, match=f"looks like {unit}; pass .* an aware datetime"):
            call()
    assert store.get(b"k", kvstore.Timestamp(number)) is None  # the caller says that 1970 is meant


@pytest.mark.parametrize("number", [0, 1, 999_999_999, 3 * 10**17, TODAY + 1])
def test_other_numbers_are_nanoseconds(store: kvstore.Store, number: int) -> None:
    expected = b"two hours ago" if number > TODAY else None
    assert store.get(b"k", number) == expected
    assert store.get_many([b"k"], [number]) == [expected]


def test_a_timeline_of_a_test_takes_small_numbers() -> None:
    with kvstore.open(None, engine="memory", clock=kvstore.ManualClock()) as store:
        at = store.put(b"k", b"v")
        # a time of today in seconds would look like this
        assert 1_000_000_000 <= at < 2_000_000_000
        assert store.get(b"k", int(at)) == b"v"


@pytest.mark.parametrize("word", ["-1x", "--1h", "-h", "- 1h", "+1h", "-1.5h", "-1M", "tomorrow"])
def test_other_words_are_refused(store: kvstore.Store, word: str) -> None:
    with pytest.raises(UsageError):
        store.get(b"k", word)


@pytest.mark.parametrize("age", [timedelta(seconds=-1), "-99999999w", timedelta.max])
def test_an_age_beyond_the_timeline_is_refused(store: kvstore.Store, age: str | timedelta) -> None:
    with pytest.raises(UsageError):
        store.get(b"k", age)


def test_numbers_of_numpy_are_times_and_a_missing_time_of_pandas_is_none(
    store: kvstore.Store,
) -> None:
    number = np.int64(TODAY + HOUR)
    assert store.get(b"k", number) == b"two hours ago"
    assert [change.value for change in store.changes(number)] == [b"now"]
    with pytest.raises(UsageError, match="looks like seconds"):
        store.get(b"k", np.int64(1_700_000_000))
    with pytest.raises(UsageError, match="not bool"):
        store.get(b"k", np.bool_(True))
    with pytest.raises(UsageError, match="NaT is no time; pass an aware datetime"):
        store.get(b"k", pd.NaT)


def test_without_a_clock_a_word_is_refused() -> None:
    with pytest.raises(UsageError, match="counts from now"):
        to_timestamp("-1h")


def test_a_store_that_stands_still_counts_from_its_newest_time(
    store: kvstore.Store, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "s") as opened:
        opened.put(b"k", b"v")
        opened.checkpoint(tmp_path / "copy")
    with kvstore.open_read_only(tmp_path / "copy") as copy:
        assert copy.get(b"k", "now") == b"v"
        assert copy.get(b"k", "-1d") is None


def test_a_collection_takes_words(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as opened:
        opened.put(b"k", b"v")
        collection = Collection(tmp_path / "c")
        collection.backup(opened)
        assert collection.restore(tmp_path / "r", as_of=opened.upper - 1)
    assert collection.expire("-1d") == collection.since
    with pytest.raises(NotYetWrittenError):  # newer versions are not in the collection
        collection.restore(tmp_path / "later", as_of=datetime.now(timezone.utc))


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_buffers_are_keys_and_values(kind: type) -> None:
    with kvstore.open(None, engine="memory") as store:
        key, value = bytearray(b"k\0"), bytearray(b"v\xff")
        store.put(kind(key), kind(value))
        with store.batch() as batch:
            batch.put(kind(b"b"), kind(b"1"))
            batch.delete(kind(b"c"))
        with store.transaction() as txn:
            assert txn.get(kind(key)) == b"v\xff"
            txn.put(kind(b"t"), kind(b"2"))
        key[0:1] = value[0:1] = b"!"  # the store keeps a copy
        assert dict(store.scan()) == {b"k\0": b"v\xff", b"b": b"1", b"t": b"2"}
        assert store.get(kind(b"k\0")) == b"v\xff"
        assert store.get_many([kind(b"b"), b"t"]) == [b"1", b"2"]
        assert store.floor(kind(b"bb")) == (b"b", b"1")
        assert list(store.scan(kind(b"b"), kind(b"c"))) == [(b"b", b"1")]
        assert list(store.scan(prefix=kind(b"t"))) == [(b"t", b"2")]
        store.put_if(kind(b"b"), kind(b"3"), expected=kind(b"1"))
        assert store.pop(kind(b"b")) == b"3"
        store.delete_range(kind(b"k"), kind(b"l"))
        assert [key for key, _ in store.scan()] == [b"t"]
        assert all(type(change.key) is bytes for change in store.changes(0))


def test_a_buffer_of_wide_items_is_measured_in_bytes() -> None:
    with kvstore.open(None, engine="memory") as store:
        wide = memoryview(bytearray(8)).cast("Q")
        store.put(wide, wide)
        assert store.get(bytes(8)) == bytes(8)


# -- coarser clocks ---------------------------------------------------------------------------

LATE = TODAY + 3 * HOUR + 123_456_789
"""A time that no microsecond has."""


def _commits(clock: kvstore.ManualClock, store: kvstore.Store) -> tuple[datetime, datetime]:
    """Two commits of one key, the last of all, and their times in microseconds."""
    clock.set(LATE)
    first = store.put(b"k", b"first")
    clock.advance(5000)
    return first.to_datetime(), store.put(b"k", b"second").to_datetime()


@pytest.mark.parametrize("copy", ["owner", "closed", "snapshot", "collection", "reader", "table"])
def test_a_commits_time_in_microseconds_is_its_time(tmp_path: Path, copy: str) -> None:
    """It was cut: a read as of it missed the commit, and changes since it had the commit again."""
    clock = kvstore.ManualClock(TODAY)
    with ExitStack() as stack:
        store = stack.enter_context(kvstore.open(tmp_path / "s", engine="memory", clock=clock))
        first, second = _commits(clock, store)
        read: Any = store
        if copy == "closed":
            store.close()
            read = stack.enter_context(kvstore.open_read_only(tmp_path / "s"))
        if copy == "snapshot":
            read = stack.enter_context(store.snapshot())
        if copy in ("collection", "reader"):
            collection = Collection(tmp_path / "c", clock=clock)
            collection.backup(store)
            assert collection.restore(tmp_path / "r", second) == collection.upper - 1
            read = collection if copy == "collection" else stack.enter_context(collection.open())
        labels = pa.table({"id": [b"k", b"k"], "ts": pa.array([first, second], US)})
        joined = read.join(labels).read_all() if copy != "table" else labels
        if copy != "table":
            assert joined.column("value").to_pylist() == [b"first", b"second"]
            again = labels.set_column(
                1, "ts", [to_microseconds(joined["value_timestamp"].chunk(0))]
            )
            assert again.equals(labels)
        if copy in ("owner", "closed", "reader"):
            assert read.get_many([b"k", b"k"], [first, second]) == [b"first", b"second"]
            assert [change.value for change in read.changes(first, second)] == [b"second"]
            assert list(read.changes(second)) == []
            assert [list(read.scan(as_of=at)) for at in (first, second)] == [
                [(b"k", b"first")],
                [(b"k", b"second")],
            ]
        if copy == "table":
            table = store.table("t", pa.schema({"a": pa.int64(), "b": pa.int64()}), key="a")
            for value in (1, 2):
                table.put({"a": 0, "b": value})
                clock.advance(3001)
            (at, former), *_ = _changed(table)
            assert table.get(0, as_of=at) == {"a": 0, "b": former}
            assert [value for _, value in _changed(table, at)] == [1, 2]  # the images of the last
            frozen = stack.enter_context(store.snapshot()).table("t")
            assert [row["b"] for row in _rows(frozen, 0, _changed(table)[-1][0])] == [1, 1, 2]


def _rows(table: Any, since: Any, upto: Any = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.changes(since, upto).read_all().to_pylist()
    return rows


def _changed(table: Any, since: Any = 0) -> list[tuple[datetime, int]]:
    return [(row["_commit_timestamp"], row["b"]) for row in _rows(table, since)]


def test_a_time_that_was_read_at_stays_as_it_was(
    store: kvstore.Store, clock: kvstore.ManualClock
) -> None:
    """The microsecond of the newest commit ends a nanosecond's time after it: a store that follows
    the clock closes it, so that no later commit changes what was read."""
    _, second = _commits(clock, store)
    assert store.get(b"k", second) == b"second"
    later = store.put(b"k", b"later")
    assert store.get(b"k", second) == b"second"
    assert later > Timestamp.from_datetime(second)
    with pytest.raises(NotYetWrittenError):
        store.get(b"k", second + timedelta(microseconds=2))


@pytest.mark.parametrize("verb", ["hold", "gc", "revert", "feed", "unchanged_since"])
def test_verbs_take_a_commits_time_in_microseconds(
    store: kvstore.Store, clock: kvstore.ManualClock, verb: str
) -> None:
    first, second = _commits(clock, store)
    if verb == "hold":
        with store.hold("h", at=second) as hold:
            assert store.get(b"k", hold.timestamp) == b"second"
    elif verb == "gc":
        store.gc(before=first)
        assert store.get(b"k", first) == b"first"
    elif verb == "revert":
        store.revert_range(b"a", b"z", to=first)
        assert store.get(b"k") == b"first"
    elif verb == "feed":
        assert [e.value for b in store.feed("f", start=first) for e in b.events] == [b"second"]
    else:
        store.put_if(b"k", b"third", unchanged_since=second)
        with pytest.raises(PreconditionError):
            store.put_if(b"k", b"fourth", unchanged_since=second)


@pytest.mark.parametrize("seconds", [60, 60.0, "60", 0, 86_400])
def test_seconds_from_now_are_refused_with_the_way_to_write_them(
    store: kvstore.Store, seconds: object
) -> None:
    """Other stores take `expires=60` for a minute from now."""
    with pytest.raises(UsageError) as caught:
        store.put(b"k", b"v", expires=seconds)  # type: ignore[arg-type]  # what a user may pass
    assert f"timedelta(seconds={seconds})" in caught.value.remedy
    assert "nanoseconds since 1970" in caught.value.remedy


def test_a_date_is_its_midnight_in_utc_and_a_refusal_lists_the_forms(store: kvstore.Store) -> None:
    assert store.to_time(date(2026, 11, 22)) == store.to_time("2026-11-22T00:00Z")
    assert store.get_many([b"k"], as_of=[date(2001, 1, 1)]) == [None]
    forms = r"a day .*yesterday, an age .*nanoseconds since 1970"
    for wrong in (datetime(2026, 1, 1), "noon", 1.5, "2026-01-01T10:00"):  # noqa: DTZ001  # naive
        with pytest.raises(UsageError, match=forms):
            store.get(b"k", as_of=wrong)  # type: ignore[arg-type]  # what a user may pass
