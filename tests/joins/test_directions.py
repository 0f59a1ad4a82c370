"""Joins in every direction: each label gets what the history of its key says, at every door."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import Join, ManualClock, Store, backup
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from tests.harness.bounds import TINY, bounds
from tests.harness.seeds import seed_of
from tests.joins.histories import KEYS, NS, pairs, table, write_at_random

SEED = "KVSTORE_DIRECTION_SEED"
WAYS = [
    {"direction": direction, "allow_exact": exact}
    for direction in ("backward", "forward", "nearest")
    for exact in (True, False)
]

Answer = tuple[bytes | None, int | None]


def expected(
    versions: list[tuple[int, bytes | None]],
    at: int,
    age: int | None,
    *,
    direction: str,
    allow_exact: bool,
) -> Answer:
    """The answer to a label by the versions of its key."""
    least = 0 if allow_exact else 1
    before = max((v for v in versions if at - v[0] >= least), default=None, key=lambda v: v[0])
    behind = min((v for v in versions if v[0] - at >= least), default=None, key=lambda v: v[0])
    chosen = {"backward": [before], "forward": [behind], "nearest": [before, behind]}[direction]
    fitting = [
        (abs(version[0] - at), version)
        for version in chosen
        if version is not None and version[1] is not None
        if age is None or abs(version[0] - at) <= age
    ]
    if not fitting:
        return None, None
    _, (time, value) = min(fitting, key=lambda each: each[0])  # the first is before the label
    return value, time


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", clock=clock, durability="async") as store:
        yield store


@pytest.mark.parametrize("tiny", [{}, TINY], ids=["whole", "tiny"])
def test_every_door_answers_as_the_history_of_each_key_says(
    store: Store, clock: ManualClock, tmp_path: Path, tiny: dict[str, int]
) -> None:
    pick = random.Random(seed_of(SEED, None))
    collection = backup.Collection(tmp_path / "collection", clock=clock)

    def back_up() -> None:
        if pick.random() < 0.15:
            collection.backup(store)

    collection.backup(store)
    moments = write_at_random(store, clock, tmp_path, pick, back_up)
    collection.backup(store)
    keys = [*KEYS, b"zz"]
    history = {key: [(int(v.timestamp), v.value) for v in store.history(key)] for key in keys}
    near = [each for at in moments for each in (at - 1, at, at + 1)]
    times = [at for at in near if store.since < at < store.upper]
    with ExitStack() as opened:
        opened.enter_context(bounds(tiny))
        doors: list[Any] = [store, collection]
        if not tiny:  # a request of a few bytes takes as long as a large one
            running = opened.enter_context(serving(app(store), ListenAddress("127.0.0.1", 0)))
            client = opened.enter_context(kvstore.connect(running.url))
            doors += [client, opened.enter_context(client.snapshot())]
            doors += [opened.enter_context(each) for each in (store.snapshot(), collection.open())]
            doors.append(opened.enter_context(kvstore.follow(tmp_path / "store")))
        for number, way in enumerate(WAYS):
            labels = [(pick.choice(keys), pick.choice(times)) for _ in range(20)]
            age = pick.choice([None, 0, 10_000, 30_000])
            bound = None if age is None else timedelta(microseconds=age // 1000)
            how: dict[str, Any] = {("tolerance", "max_age")[number % 2]: bound, **way}
            answers = [expected(history[key], at, age, **way) for key, at in labels]
            for door in doors:
                assert pairs(door.join(table(labels), **how)) == answers, (door, how)


def test_a_label_above_the_newest_time_takes_the_newest_and_the_result_tells_as_of_when(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    clock.advance(1_000)
    written = int(store.put(b"a", b"1"))
    collection = backup.Collection(tmp_path / "collection", clock=clock)
    collection.backup(store)
    late = written + 10_000
    labels = table([(b"a", written), (b"a", late), (b"b", late)])
    with pytest.raises(NotYetWrittenError, match="row 1"):
        store.join(labels).read_all()
    with store.snapshot() as snapshot, collection.open() as reader:
        for source in (store, snapshot, reader, collection):
            found = source.join(labels, on_future="newest").read_all()
            assert found.schema.names[-1] == "as_of", source
            as_of = found["as_of"].cast(pa.int64()).to_pylist()
            assert found["value"].to_pylist() == [b"1", b"1", None]
            assert as_of[0] == written
            assert as_of[1] == as_of[2] < late
            near = source.join(labels, on_future="newest", max_age=timedelta(microseconds=9))
            assert near.read_all()["value"].to_pylist() == [b"1", None, None]
            ahead = source.join(labels, on_future="newest", direction="forward").read_all()
            assert ahead["value"].to_pylist() == [b"1", None, None]
            strict = source.join(labels, on_future="newest", allow_exact=False).read_all()
            assert strict["value"].to_pylist() == [None, b"1", None]
    with pytest.raises(UsageError, match="'as_of'"):
        store.join(labels.rename_columns(["id", "ts", "as_of"]), on_future="newest")


@pytest.mark.parametrize("tiny", [{}, TINY], ids=["whole", "tiny"])
def test_a_null_key_and_a_null_time_have_null_on_request(
    store: Store, tiny: dict[str, int]
) -> None:
    at = int(store.put(b"a", b"1"))
    keys = [None, b"a", None, b"a", b"b", b"a", None]
    times = [at, at, None, None, at, at, at]
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.string()):
        column = pa.array(keys, pa.binary()).cast(pa.string() if kind == pa.string() else kind)
        labels = pa.table({"id": column, "ts": pa.array(times, pa.int64()).cast(NS)})
        with pytest.raises(UsageError, match="null in row"):
            store.join(labels).read_all()
        with bounds(tiny):
            for cut in (1, 2, 100):
                batches = labels.to_batches(max_chunksize=cut)
                given = pa.RecordBatchReader.from_batches(labels.schema, batches)
                found = store.join(given, on_null="null").read_all()
                assert found["value"].to_pylist() == [None, b"1", None, None, None, b"1", None]
                assert found.select(["id", "ts"]).equals(labels)
    coded = pa.DictionaryArray.from_arrays([0, 1, None], pa.array([b"a", None], pa.binary()))
    labels = pa.table({"id": coded, "ts": pa.array([at] * 3, pa.int64())})
    assert store.join(labels, on_null="null").read_all()["value"].to_pylist() == [b"1", None, None]
    nothing = pa.table({"id": pa.nulls(2), "ts": pa.nulls(2)})
    found = store.join(nothing, on_null="null", on_future="newest").read_all()
    assert found["value"].to_pylist() == found["as_of"].to_pylist() == [None, None]


def test_a_label_behind_nulls_is_named_by_its_own_row(store: Store, clock: ManualClock) -> None:
    clock.advance(10_000)
    at = int(store.put(b"a", b"1"))
    labels = pa.table({"id": [None, b"a", None, b"a"], "ts": [at, at, at, at + 10_000_000]})
    with pytest.raises(NotYetWrittenError, match="row 3"):
        store.join(labels, on_null="null").read_all()
    newest = int(store.put(b"a", b"2"))
    store.gc(before=store.upper)
    labels = pa.table({"id": [None, b"a", b"a"], "ts": [at, newest, at]})
    for direction in ("backward", "forward", "nearest"):
        how: dict[str, Any] = {"direction": direction, "on_null": "null"}
        with pytest.raises(HistoryGoneError, match="row 2"):
            store.join(labels, **how).read_all()
        found = store.join(labels, on_gone="null", **how).read_all()
        assert found["value"].to_pylist() == [None, b"2", None]


def test_sources_of_one_join_have_directions_of_their_own(store: Store, clock: ManualClock) -> None:
    first = int(store.put(b"a", b"1"))
    clock.advance(10_000)
    second = int(store.put(b"a", b"2"))
    sides = [
        Join(store, prefix="past_"),
        Join(store, prefix="next_", direction="forward", tolerance=timedelta(microseconds=9)),
        Join(store, prefix="near_", direction="nearest", allow_exact=False),
    ]
    labels = table([(b"a", first), (b"a", second - 1), (b"a", second)])
    found = kvstore.join(labels, sides, on_future="newest").read_all()
    assert found["past_value"].to_pylist() == [b"1", b"1", b"2"]
    assert found["next_value"].to_pylist() == [b"1", b"2", b"2"]
    assert found["near_value"].to_pylist() == [b"2", b"2", b"1"]
    assert found["as_of"].cast(pa.int64()).to_pylist() == [first, second - 1, second]


@pytest.mark.parametrize(
    "wrong",
    [
        {"direction": "sideways"},
        {"allow_exact": "no"},
        {"max_age": timedelta(1), "tolerance": timedelta(1)},
        {"tolerance": 5},
        {"tolerance": timedelta(-1)},
        {"on_future": "null"},
        {"on_null": "newest"},
    ],
    ids=str,
)
def test_a_word_that_is_none_is_refused_by_its_name(store: Store, wrong: dict[str, Any]) -> None:
    labels = table([(b"a", int(store.put(b"a", b"1")))])
    with pytest.raises(UsageError, match=list(wrong)[-1]):
        store.join(labels, **wrong)
