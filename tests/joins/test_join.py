"""Point-in-time joins: each label gets the value known at its time, by steps and by seeks alike."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import ManualClock, Store, backup
from kvstore.errors import (
    ClosedError,
    HistoryGoneError,
    HistoryHeldError,
    NotYetWrittenError,
    UsageError,
)
from tests.harness.bounds import TINY, bounds
from tests.harness.seeds import seed_of
from tests.joins.histories import KEYS, NS, known, pairs, table, write_at_random

pytestmark = pytest.mark.usefixtures("each_engine")

SEED = "KVSTORE_JOIN_SEED"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", clock=clock, durability="async") as store:
        yield store


SPARSE = {"JOIN_PASS_LABELS_MIN": 1 << 62}
DENSE = {"JOIN_PASS_LABELS_MIN": 1, "JOIN_PASS_BYTES_MAX": 1 << 50, "COLUMNS_FLUSH_BYTES_MIN": 0}
"""Whether joins read the sorted files themselves."""


@pytest.mark.parametrize(
    "way",
    [
        *({**SPARSE, "STEPS_BEFORE_SEEK": steps} for steps in (0, 1, 8, 1 << 62)),
        DENSE,
        {**DENSE, "STEP_ENTRIES": 1},
    ],
    ids=["seek", "one", "default", "merge", "files", "files by steps"],
)
@pytest.mark.parametrize("tiny", [{}, TINY], ids=["whole", "tiny"])
def test_a_join_is_what_the_history_of_each_key_says(
    store: Store, clock: ManualClock, tmp_path: Path, way: dict[str, int], tiny: dict[str, int]
) -> None:
    pick = random.Random(seed_of(SEED, None))
    moments = write_at_random(store, clock, tmp_path, pick)
    times = [near for at in moments for near in (at - 1, at, at + 1)]
    times = [at for at in times if store.since <= at < store.upper]
    with bounds({**tiny, **way}):
        for count in (0, 1, 7, 400):
            labels = [(pick.choice([*KEYS, b"zz"]), pick.choice(times)) for _ in range(count)]
            age = pick.choice([None, 0, 30, 1000])
            max_age = None if age is None else timedelta(microseconds=age)
            expected = [
                known(store, *label, None if age is None else age * 1000) for label in labels
            ]
            cut = table(labels).to_batches(max_chunksize=pick.choice([1, 5, 1000]))
            source = pa.RecordBatchReader.from_batches(table(labels).schema, cut)
            joined = store.join(source, max_age=max_age).read_all()
            assert joined.drop_columns(["value", "value_timestamp"]).equals(table(labels))
            assert pairs(joined.to_reader()) == expected
            with store.snapshot() as snapshot:
                assert pairs(snapshot.join(table(labels), max_age=max_age)) == expected


def test_a_value_as_old_as_max_age_is_given_and_an_older_one_is_not(
    store: Store, clock: ManualClock
) -> None:
    written = store.put(b"a", b"1")
    clock.advance(10_000)
    store.put(b"b", b"")
    labels = table([(b"a", written), (b"a", written + 2_000), (b"a", written + 2_001)])
    joined = store.join(labels, max_age=timedelta(microseconds=2))
    assert joined.read_all()["value"].to_pylist() == [b"1", b"1", None]
    with pytest.raises(UsageError, match="max_age"):
        store.join(labels, max_age=timedelta(-1))


@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.binary(1),
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.uint32(), pa.string_view()),
        pa.dictionary(pa.uint32(), pa.binary_view()),
    ],
    ids=str,
)
def test_keys_are_binary_or_text_of_every_layout(store: Store, kind: pa.DataType) -> None:
    at = store.put(b"a", b"1")
    labels = table([(b"a", at), (b"b", at)])
    keys = labels["id"] if pa.types.is_fixed_size_binary(kind) else labels["id"].cast(pa.string())
    if pa.types.is_dictionary(kind):
        values = keys.combine_chunks().cast(pa.binary()).cast(kind.value_type)
        keys = pa.DictionaryArray.from_arrays(pa.array([0, 1], kind.index_type), values)
    labels = labels.set_column(0, "id", keys.cast(kind))
    assert store.join(labels).read_all()["value"].to_pylist() == [b"1", None]


def test_labels_keep_columns_of_every_type(store: Store) -> None:
    """Frames of Polars have text as views, also in their dictionaries."""
    at = store.put(b"a", b"1")
    index, numbers = pa.array([0, 1], pa.int32()), pa.array([1, 2])
    columns = [
        pa.DictionaryArray.from_arrays(index, pa.array(["x", "y"], pa.string_view())),
        pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), index, [numbers]),
        pa.array([["x"], None], pa.list_(pa.string_view())),
        pa.array([{"x": "y"}, None], pa.struct([("x", pa.string_view())])),
        pa.array([[("x", 1)], None], pa.map_(pa.string(), pa.int64())),
        pa.array([None, None]),
        pa.array([b"0" * 16] * 2, pa.uuid()),
        pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), numbers[:1]),
    ]
    for column in columns:
        labels = table([(b"a", at), (b"b", at)], more=column)
        joined = store.join(labels).read_all()
        assert joined["more"].combine_chunks().to_pylist() == column.to_pylist()
        assert joined["value"].to_pylist() == [b"1", None]


@pytest.mark.parametrize("side", ["store", "collection"])
def test_columns_whose_rows_share_their_bytes_are_not_cut_row_by_row(
    store: Store, tmp_path: Path, side: str
) -> None:
    at = store.put(b"a" * 40, b"1")
    collection = backup.Collection(tmp_path / "collection")
    collection.backup(store)
    labels = table([(b"a" * 40, at)] * 1000)
    text = labels["id"].cast(pa.string())
    large = pa.DictionaryArray.from_arrays([0] * 1000, ["x" * 20_000])
    views = labels.set_column(0, "id", text.cast(pa.string_view()))
    nested = pa.array([["x" * 30]] * 1000, pa.list_(pa.string_view()))
    for shared in (views, labels.append_column("more", large), views.append_column("more", nested)):
        with bounds(JOIN_LABEL_BYTES_MAX=10_000):
            batches = list((store if side == "store" else collection).join(shared))
        assert 5 <= len(batches) < 30
        assert pa.Table.from_batches(batches)["value"].null_count == 0


def test_keys_that_rows_share_are_gathered_in_bounded_memory(store: Store) -> None:
    """A dictionary of one long key would become as many copies as there are labels."""
    at = store.put(b"a" * 60_000, b"1")
    labels = pa.table(
        {
            "id": pa.DictionaryArray.from_arrays([0] * 500, [b"a" * 60_000]),
            "ts": pa.array([at] * 500, pa.int64()),
        }
    )
    before = most = pa.total_allocated_bytes()
    with bounds(JOIN_LABEL_BYTES_MAX=1 << 20):
        for batch in store.join(labels):
            assert batch.column("value").null_count == 0
            most = max(most, pa.total_allocated_bytes())
    assert most - before < 8 << 20


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns", None])
def test_times_are_instants_of_every_unit_or_nanoseconds(tmp_path: Path, unit: str | None) -> None:
    clock = ManualClock(5 * 10**9)
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        store.put(b"a", b"1")
        clock.advance(10**9)
        store.put(b"a", b"2")
        clock.advance(10**9)
        kind = pa.int64() if unit is None else pa.timestamp(unit, "Europe/Paris")
        times = pa.array([5 * 10**9, 6 * 10**9], pa.int64()).cast(NS).cast(kind)
        labels = pa.table({"key": ["a", "a"], "when": times})
        joined = store.join(labels, key="key", at="when", columns=("known", "since")).read_all()
        assert joined.column_names == ["key", "when", "known", "since"]
        assert joined["known"].to_pylist() == [b"1", b"2"]


def test_frames_of_other_libraries_are_labels(store: Store) -> None:
    at = store.put(b"a", b"1")
    labels = table([(b"a", at), (b"b", at)])
    labels = labels.set_column(0, "id", labels["id"].cast(pa.string()))
    frames: list[Any] = [labels, labels.to_batches()[0], labels.to_reader()]
    for name in ("pandas", "polars", "duckdb"):
        try:
            module: Any = __import__(name)
        except ImportError:
            continue
        if name == "pandas":
            frames.append(labels.to_pandas())
        elif name == "polars":
            frames.append(module.from_arrow(labels))
        else:
            frames.append(module.from_arrow(labels))
    for frame in frames:
        assert store.join(frame).read_all()["value"].to_pylist() == [b"1", None]


@pytest.mark.parametrize("side", ["store", "collection"])
def test_no_labels_give_no_rows(store: Store, tmp_path: Path, side: str) -> None:
    """A column of an empty frame may have no type: pandas knows it as object."""
    at = store.put(b"a", b"1")
    collection = backup.Collection(tmp_path / "collection")
    collection.backup(store)
    for labels in (
        table([(b"a", at)]).slice(1),
        table([(b"a", at)]).slice(1).to_pandas(),
        pa.table({"id": pa.nulls(0), "ts": pa.nulls(0)}),
        pa.table({"id": pa.array([], pa.string()), "ts": pa.array([], NS)}).schema.empty_table(),
    ):
        joined = (store if side == "store" else collection).join(labels).read_all()
        assert joined.num_rows == 0
        assert joined.column_names[-2:] == ["value", "value_timestamp"]


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no key": ({"ts": pa.array([1], NS)}, {}, "no column 'id'"),
    "no time": ({"id": [b"a"]}, {}, "no column 'ts'"),
    "keys are numbers": ({"id": [1], "ts": pa.array([1], NS)}, {}, "'id' has keys of type int64"),
    "naive times": ({"id": [b"a"], "ts": pa.array([1], pa.timestamp("us"))}, {}, "'ts' has times"),
    "dates": ({"id": [b"a"], "ts": pa.array([1], pa.date32())}, {}, "'ts' has times of type"),
    "text times": ({"id": [b"a"], "ts": ["2026-01-01"]}, {}, "'ts' has times of type string"),
    "float times": ({"id": [b"a"], "ts": [1.5]}, {}, "'ts' has times of type double"),
    "a clash": (
        {"id": [b"a"], "ts": pa.array([1], NS), "value": [1]},
        {},
        "a column 'value' already",
    ),
    "one name twice": (
        {"id": [b"a"], "ts": pa.array([1], NS)},
        {"columns": ("v", "v")},
        "two names",
    ),
    "one name": ({"id": [b"a"], "ts": pa.array([1], NS)}, {"columns": "vt"}, "two names"),
    "key is no name": (
        {"id": [b"a"], "ts": pa.array([1], NS)},
        {"key": 1},
        "key=1; pass the name of a column",
    ),
    "on_gone": ({"id": [b"a"], "ts": pa.array([1], NS)}, {"on_gone": "drop"}, "on_gone"),
}


@pytest.mark.parametrize(("columns", "options", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_labels_are_refused_before_a_row_is_read(
    store: Store, columns: Any, options: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        store.join(pa.table(columns), **options)


def test_two_columns_of_one_name_and_what_is_no_table_are_refused(store: Store) -> None:
    twice = pa.Table.from_arrays([pa.array([b"a"]), pa.array([b"b"])], names=["id", "id"])
    with pytest.raises(UsageError, match="2 columns 'id'"):
        store.join(twice, at=None)
    for labels in (None, [b"a"], {"id": [b"a"]}, pa.array([b"a"]), pa.array([1])):
        with pytest.raises(UsageError, match="labels"):
            store.join(labels)


BAD_ROWS: dict[str, tuple[pa.Array, pa.Array, str]] = {
    "a null key": (pa.array([b"a", None]), pa.array([1, 1]), "'id' has a null in row 1"),
    "nulls without a type": (pa.nulls(2), pa.array([1, 1]), "'id' has a null in row 0"),
    "a dictionary without a type": (
        pa.DictionaryArray.from_arrays([0, 0], pa.nulls(1)),
        pa.array([1, 1]),
        "'id' has a null in row 0",
    ),
    "a null in a dictionary": (
        pa.DictionaryArray.from_arrays([0, 1], [b"a", None]),
        pa.array([1, 1]),
        "'id' has a null in row 1",
    ),
    "a null time": (pa.array([b"a", b"b"]), pa.array([1, None]), "'ts' has a null in row 1"),
    "times without a type": (pa.array([b"a"]), pa.nulls(1), "'ts' has a null in row 0"),
    "a negative time": (pa.array([b"a", b"b"]), pa.array([1, -7]), "'ts' has -7 in row 1"),
    "a time too far": (
        pa.array([b"a", b"b"]),
        pa.array([1, (1 << 63) + 5], pa.uint64()),
        "column 'ts'",
    ),
    "a time too far in seconds": (
        pa.array([b"a", b"b"]),
        pa.array([0, 1 << 62], pa.timestamp("s", "UTC")),
        "column 'ts'",
    ),
    "a long key": (pa.array([b"a", b"k" * 70_000]), pa.array([1, 1]), "70000 bytes in row 1"),
}


@pytest.mark.parametrize(("keys", "times", "says"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
@pytest.mark.parametrize("rows_max", [1, 100])
def test_bad_rows_are_named_by_column_and_row(
    store: Store, keys: Any, times: Any, says: str, rows_max: int
) -> None:
    store.put(b"a", b"1")
    with bounds(JOIN_ROWS_MAX=rows_max), pytest.raises(UsageError, match=says):
        store.join(pa.table({"id": keys, "ts": times}), on_gone="null").read_all()


@pytest.mark.parametrize("unit", [1, 1000, 10**6], ids=["seconds", "milliseconds", "microseconds"])
def test_integers_that_count_no_nanoseconds_are_refused(tmp_path: Path, unit: int) -> None:
    """Such integers would be times of 1970, at which no key has a value."""
    clock = ManualClock(1_800_000_000 * 10**9)
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        at = int(store.put(b"a", b"1"))
        backup.Collection(tmp_path / "collection", clock=clock).backup(store)
        labels = pa.table({"id": [b"a", b"a"], "ts": [at, 1_700_000_000 * unit]})
        for source in (store, backup.Collection(tmp_path / "collection", clock=clock)):
            with pytest.raises(UsageError, match=r"'ts' has .* in row 1, which looks like"):
                source.join(labels).read_all()
        early = labels.set_column(1, "ts", labels["ts"].cast(NS))
        assert pairs(store.join(early)) == [(b"1", at), (None, None)]


def test_the_first_label_above_upper_or_below_since_is_named(
    store: Store, clock: ManualClock
) -> None:
    first = store.put(b"a", b"1")
    clock.advance(100)
    second = store.put(b"a", b"2")
    late = table([(b"a", second), (b"b", second + 10**6), (b"a", second + 10**7)])
    with pytest.raises(NotYetWrittenError, match="row 1, key b'b'") as unwritten:
        store.join(late).read_all()
    assert unwritten.value.as_of == second + 10**6
    store.gc(before=second)
    early = table([(b"a", second), (b"c", first), (b"a", first - 1)])
    with pytest.raises(HistoryGoneError, match="row 1, key b'c'") as gone:
        store.join(early).read_all()
    assert (gone.value.as_of, gone.value.since) == (first, second)
    assert pairs(store.join(early, on_gone="null")) == [(b"2", second), (None, None), (None, None)]


def test_labels_under_a_clear_are_gone_and_no_others(store: Store, clock: ManualClock) -> None:
    written = store.put(b"a", b"1")
    store.put(b"c", b"2")
    clock.advance(100)
    cleared = store.clear_range(b"b", b"d")
    labels = table([(b"a", written), (b"c", written), (b"c", cleared)])
    with pytest.raises(HistoryGoneError, match="row 1, key b'c'"):
        store.join(labels).read_all()
    expected = [(b"1", written), (None, None), (None, None)]
    assert pairs(store.join(labels, on_gone="null")) == expected


def test_an_open_join_keeps_its_history_until_it_ends_or_is_dropped(
    store: Store, clock: ManualClock
) -> None:
    written = store.put(b"a", b"1")
    clock.advance(100)
    store.put(b"a", b"2")
    with bounds(JOIN_ROWS_MAX=1):
        reader = store.join(table([(b"a", written)] * 3))
        reader.read_next_batch()
        store.gc(before=store.upper - 1)
        with pytest.raises(HistoryHeldError):
            store.clear_range(b"a", b"b")
        assert reader.read_all()["value"].to_pylist() == [b"1", b"1"]
        half = store.join(table([(b"a", store.since)] * 3))
        half.read_next_batch()
        del half, reader
        gc.collect()
        store.gc(before=store.upper - 1)
        store.clear_range(b"a", b"b")


def test_without_times_all_labels_have_the_time_of_the_read(store: Store) -> None:
    store.put(b"a", b"1")
    labels = pa.table({"id": ["a", "b"]})
    with store.snapshot() as snapshot:
        store.put(b"a", b"2")
        assert snapshot.join(labels, at=None).read_all()["value"].to_pylist() == [b"1", None]
        joined = store.join(labels, at=None)
        store.put(b"b", b"3")
        assert joined.read_all()["value"].to_pylist() == [b"2", None]
        late = table([(b"a", snapshot.as_of), (b"a", snapshot.as_of + 1)])
        with pytest.raises(NotYetWrittenError, match=r"row 1.*snapshot ends"):
            snapshot.join(late).read_all()
    with pytest.raises(ClosedError):
        snapshot.join(labels, at=None)


def test_a_closed_store_ends_an_open_join_with_an_error(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store, bounds(JOIN_ROWS_MAX=1):
        at = store.put(b"a", b"1")
        reader = store.join(table([(b"a", at)] * 3))
        reader.read_next_batch()
    with pytest.raises(ClosedError):
        reader.read_all()
    with pytest.raises(ClosedError):
        store.join(table([(b"a", at)]))


def test_large_values_come_in_pieces_of_bounded_bytes(store: Store) -> None:
    at = store.put(b"a", b"v" * 1000)
    labels = [(b"a", at)] * 500 + [(b"b", at)] * 500
    with bounds(JOIN_VALUE_BYTES_MAX=10_000):
        batches = list(store.join(table(labels)))
    assert all(batch.column("value").nbytes < 20_000 for batch in batches)
    joined = pa.Table.from_batches(batches)
    assert joined["row"].to_pylist() == list(range(1000))
    assert joined["value"].to_pylist() == [b"v" * 1000] * 500 + [None] * 500


@pytest.mark.parametrize("side", ["store", "collection"])
def test_labels_stream_in_bounded_memory(store: Store, tmp_path: Path, side: str) -> None:
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, pa.total_allocated_bytes() - before)

    source = source_with_a_hot_key(store, tmp_path, side)
    labels = hot_labels(store, 100_000)
    before = pa.total_allocated_bytes()
    with bounds(JOIN_ROWS_MAX=1 << 16, JOIN_COLUMNS_ROWS_MAX=1 << 16):
        join_hot_labels(source, [labels] * 6, look)
    assert most < 30 << 20


@pytest.mark.soak
@pytest.mark.parametrize("rows_a_batch", [100_000, 10_000_000])
@pytest.mark.parametrize("side", ["store", "collection"])
def test_ten_million_labels_take_bounded_memory_of_the_process(
    store: Store, tmp_path: Path, side: str, rows_a_batch: int
) -> None:
    source = source_with_a_hot_key(store, tmp_path, side)
    labels = hot_labels(store, rows_a_batch)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = peak_bytes()
    join_hot_labels(source, [labels] * (10_000_000 // rows_a_batch), lambda: None)
    assert peak_bytes() - before < 300 << 20


def source_with_a_hot_key(store: Store, tmp_path: Path, side: str) -> Any:
    """The store or its collection. It has a key `a` and a thousand keys from `b0` on."""
    store.put(b"a", b"1")
    with store.transaction() as txn:
        for number in range(1000):
            txn.put(b"b%d" % number, b"2")
    collection = backup.Collection(tmp_path / "collection")
    collection.backup(store)
    return store if side == "store" else collection


def hot_labels(store: Store, rows: int) -> pa.RecordBatch:
    """Labels of which half have the key `a`, and one in a hundred another key of the store."""
    late = store.upper - 1
    made = table([pair for n in range(50_000) for pair in ((b"a", late), (b"b%d" % n, late))])
    [batch] = pa.concat_tables([made] * (rows // made.num_rows)).combine_chunks().to_batches()
    return batch


def join_hot_labels(
    source: Any, batches: Sequence[pa.RecordBatch], look: Callable[[], None]
) -> None:
    """Join the labels of all batches. `look` is called for each."""
    taken = found = 0

    def arriving() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            look()
            yield batch

    for batch in source.join(pa.RecordBatchReader.from_batches(batches[0].schema, arriving())):
        taken += batch.num_rows
        found += batch.num_rows - batch.column("value").null_count
    assert taken == sum(batch.num_rows for batch in batches)
    assert found == taken // 2 + taken // 100


def peak_bytes() -> int:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(kilobytes) * 1024
