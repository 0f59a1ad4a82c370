"""Seeds: a new store of versions that carry their own times."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import ManualClock, backup, bulk
from kvstore.errors import HistoryGoneError, KVStoreError, LockedError, UsageError
from tests.harness.bounds import TINY, bounds
from tests.harness.kills import run_until_killed
from tests.harness.seeds import seed_of

SEED = "KVSTORE_SEED_SEED"
KEYS = [b"", b"a", b"a\x00", b"a\x00\x01", b"b", b"b\xff"]
NS = pa.timestamp("ns", "UTC")
NOW = 10_000
Event = tuple[bytes, int, bytes | None]


def batch(events: list[Event], *, op: bool = True) -> pa.RecordBatch:
    columns = {
        "key": pa.array([key for key, _, _ in events], pa.binary()),
        "value": pa.array([value for _, _, value in events], pa.binary()),
        "ts": pa.array([time for _, time, _ in events], pa.int64()).cast(NS),
    }
    if op:
        columns["op"] = pa.array(["delete" if v is None else "put" for _, _, v in events])
    return pa.RecordBatch.from_pydict(columns)


@pytest.mark.parametrize("tiny", [{}, TINY], ids=["whole", "tiny"])
def test_a_seeded_store_has_each_version_at_its_time(tmp_path: Path, tiny: dict[str, int]) -> None:
    pick = random.Random(seed_of(SEED, None))
    events: dict[tuple[bytes, int], bytes | None] = {}
    for number in range(200):
        value = None if pick.random() < 0.2 else b"%d" % number
        events[pick.choice(KEYS), pick.randrange(1, NOW)] = value
    rows = [(key, time, value) for (key, time), value in events.items()]
    batches = [batch(rows[at : at + 17]) for at in range(0, len(rows), 17)]
    clock = ManualClock(NOW)
    with bounds(tiny):
        newest = bulk.seed(tmp_path / "store", iter(batches), op="op", clock=clock)
    assert newest == max(time for _, time, _ in rows)
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        for key in KEYS:
            expected = sorted(((t, v) for k, t, v in rows if k == key), reverse=True)
            assert [(each.timestamp, each.value) for each in store.history(key)] == expected
        for at in (0, 1, int(newest) // 2, int(newest)):
            alive = {k: v for k, t, v in sorted(rows, key=lambda row: row[1]) if t <= at}
            expected_rows = sorted((k, v) for k, v in alive.items() if v is not None)
            assert list(store.scan(as_of=at)) == expected_rows
        assert store.put(b"later", b"1") > newest
        collection = backup.Collection(tmp_path / "collection", clock=clock)
        collection.backup(store)
        labels = pa.table({"id": [key for key, _, _ in rows], "ts": [time for _, time, _ in rows]})
        joined = collection.join(labels).read_all()
        assert joined["value"].to_pylist() == [value for _, _, value in rows]


def test_rows_come_as_text_in_frames_and_with_names_of_their_own(tmp_path: Path) -> None:
    table = pa.table(
        {
            "user": pa.array(["a", "b"]).dictionary_encode(),
            "score": ["1", "2"],
            "seen": pa.array([1, 2], pa.timestamp("s", "Europe/Paris")),
        }
    )
    names = {"key": "user", "value": "score", "at": "seen"}
    assert bulk.seed(tmp_path / "one", table, **names) == 2 * 10**9  # type: ignore[arg-type]
    with kvstore.open(tmp_path / "one") as store:
        assert list(store.scan()) == [(b"a", b"1"), (b"b", b"2")]
        assert store.get(b"b", as_of=kvstore.Timestamp(10**9)) is None
    assert bulk.seed(tmp_path / "none", []) == 0
    with kvstore.open(tmp_path / "none") as store:
        assert list(store.scan()) == []


def test_columns_of_views_are_read_also_in_dictionaries(tmp_path: Path) -> None:
    """Frames of Polars have such columns."""
    index = pa.array([0, 1, 0], pa.uint32())
    values = pa.array(["1", None, "3"], pa.string_view())
    ops = pa.array(["put", "delete", "put"], pa.string_view())
    for number, (key, op) in enumerate([(pa.string_view(), ops), (pa.binary_view(), None)]):
        keys = pa.DictionaryArray.from_arrays(index, pa.array([b"a", b"b"]).cast(key))
        kinds = pa.DictionaryArray.from_arrays(index, ops[:2]) if op is None else op
        table = pa.table({"key": keys, "value": values, "ts": [1, 2, 3], "op": kinds})
        bulk.seed(tmp_path / str(number), table, op="op")
        with kvstore.open(tmp_path / str(number)) as store:
            assert list(store.scan()) == [(b"a", b"3")]
            assert store.get(b"a", as_of=1) == b"1"


def test_rows_that_all_delete_have_values_of_no_type(tmp_path: Path) -> None:
    rows = pa.table({"key": ["a"], "value": pa.nulls(1), "ts": [5], "op": ["delete"]})
    assert bulk.seed(tmp_path / "s", rows, op="op") == 5
    with kvstore.open(tmp_path / "s", create=False) as store:
        assert [(v.timestamp, v.value) for v in store.history(b"a")] == [(5, None)]
    with pytest.raises(UsageError, match="column 'value' has a null in row 0"):
        bulk.seed(tmp_path / "t", rows)


def test_history_begins_at_since(tmp_path: Path) -> None:
    bulk.seed(tmp_path / "store", [batch([(b"a", 50, b"1")], op=False)], since=40)
    with kvstore.open(tmp_path / "store") as store:
        assert store.get(b"a", as_of=40) is None
        with pytest.raises(HistoryGoneError):
            store.get(b"a", as_of=39)


def test_two_versions_of_one_time_are_refused_or_the_later_row_counts(tmp_path: Path) -> None:
    twice = batch([(b"a", 5, b"1"), (b"b", 5, b"2"), (b"a", 5, None)])
    for limits in ({}, TINY):
        with bounds(limits), pytest.raises(UsageError, match=r"b'a' has two versions at"):
            bulk.seed(tmp_path / "store", [twice], op="op")
        assert list(tmp_path.iterdir()) == []
    bulk.seed(tmp_path / "store", [twice], op="op", duplicates="last")
    with kvstore.open(tmp_path / "store") as store:
        assert list(store.scan()) == [(b"b", b"2")]


GOOD: dict[str, Any] = {"key": [b"a", b"b"], "value": [b"1", b"2"], "ts": pa.array([1, 2], NS)}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no key": ({"key": None}, {}, "no column 'key'"),
    "no time": ({}, {"at": "when"}, "no column 'when'"),
    "no op": ({}, {"op": "kind"}, "no column 'kind'"),
    "numbers as keys": ({"key": [1, 2]}, {}, "'key' has keys of type int64"),
    "numbers as values": ({"value": [1, 2]}, {}, "'value' has values of type int64"),
    "naive times": ({"ts": pa.array([1, 2], pa.timestamp("us"))}, {}, "'ts' has times without"),
    "a null key": ({"key": [b"a", None]}, {}, "'key' has a null in row 3"),
    "a null value": ({"value": [b"a", None]}, {}, "'value' has a null in row 3"),
    "a null time": ({"ts": pa.array([1, None], NS)}, {}, "'ts' has a null in row 3"),
    "a negative time": ({"ts": pa.array([1, -1], NS)}, {}, "'ts' has -1 in row 3"),
    "the future": ({"ts": pa.array([1, NOW + 1], NS)}, {}, "row 3, in the future"),
    "before since": ({}, {"since": 2}, "row 0, below since"),
    "an unknown op": ({"op": ["put", "upsert"]}, {"op": "op"}, "'upsert' in row 3"),
    "a null op": ({"op": ["put", None]}, {"op": "op"}, "None in row 3"),
    "ops as numbers": ({"op": [1, 0]}, {"op": "op"}, "'op' is of type int64"),
    "duplicates": ({}, {"duplicates": "first"}, "duplicates='first'"),
}


@pytest.mark.parametrize(("columns", "options", "says"), BAD.values(), ids=BAD.keys())
def test_bad_rows_are_named_and_leave_nothing(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    good = {**GOOD, **({"op": ["put", "put"]} if "op" in columns else {})}
    wrong = {name: column for name, column in {**good, **columns}.items() if column is not None}
    batches = [pa.RecordBatch.from_pydict(each) for each in (good, wrong)]
    with pytest.raises(UsageError, match=says):
        bulk.seed(tmp_path / "store", batches, clock=ManualClock(NOW), **options)
    assert list(tmp_path.iterdir()) == []


def test_integers_that_count_no_nanoseconds_are_refused(tmp_path: Path) -> None:
    rows = pa.table({"key": [b"a"], "value": [b"1"], "ts": [1_700_000_000_000]})
    with pytest.raises(UsageError, match="row 0, which looks like milliseconds"):
        bulk.seed(tmp_path / "store", rows)
    bulk.seed(tmp_path / "store", rows.set_column(2, "ts", rows["ts"].cast(NS)))


@pytest.mark.parametrize(
    "rows",
    [None, "path.parquet", {"key": [b"a"]}, [1], pa.array([1])],
    ids=lambda rows: type(rows).__name__,
)
def test_rows_of_no_table_are_refused(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(UsageError, match=r"rows|batch"):
        bulk.seed(tmp_path / "store", rows)


def test_a_seed_rewrites_no_history(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("store", "dangling", "empty"):
        with pytest.raises(UsageError, match="exists"):
            bulk.seed(tmp_path / name, [batch([(b"a", 1, b"2")], op=False)])
    with kvstore.open(tmp_path / "store") as store:
        assert [version.value for version in store.history(b"a")] == [b"1"]


def test_two_seeds_of_one_path_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def rows() -> Iterator[pa.RecordBatch]:
        with pytest.raises(LockedError, match="another seed"):
            bulk.seed("store", [batch([(b"b", 1, b"2")], op=False)])
        yield batch([(b"a", 1, b"1")], op=False)

    bulk.seed("store", rows())
    assert os.listdir() == ["store"]


def seed_on(path: str, pipe: Connection) -> None:
    """A child that is killed."""

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(40):
            pipe.send(number)
            yield batch([(b"%d" % key, number, b"v" * 50) for key in range(200)], op=False)
        pipe.send(40)

    with bounds(LOAD_SORT_BYTES_MAX=50_000, RESTORE_FILE_BYTES=20_000):
        bulk.seed(path, rows())


def test_a_killed_seed_leaves_nothing_that_opens(tmp_path: Path, spawn: Any) -> None:
    pick = random.Random(seed_of("KVSTORE_SEED_KILLS_SEED", None))
    hits = 0
    for number in range(4):
        path = tmp_path / f"store-{number}"
        steps = pick.choice([3, 20, 40, 41])

        def is_time(said: list[int], steps: int = steps) -> bool:
            return len(said) >= steps

        run_until_killed(spawn, seed_on, (str(path),), is_time, pick.random() * 0.02)
        if path.exists():  # the store was complete by then
            with kvstore.open(path) as store:
                assert store.upper == 40
                assert sum(1 for _ in store.scan()) == 200
            continue
        hits += 1
        for left in tmp_path.glob(f".store-{number}.building-*"):
            with pytest.raises(KVStoreError):
                kvstore.open_read_only(left)
        bulk.seed(path, [batch([(b"a", 1, b"1")], op=False)])
        assert not list(tmp_path.glob(f".store-{number}.building-*"))
    assert hits
