"""Events: codes, numbers, ends of batches, images; and the Arrow form of the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import Operation, Span, Store
from kvstore.changes import batches as arrow_changes
from kvstore.changes.batches import changes_schema, from_events
from kvstore.changes.events import IMAGES, Event
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from tests.feed.replica import add_import

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

UPDATE, ROW_DELETE, RANGE_DELETE = (
    Operation.PUT,
    Operation.DELETE,
    Operation.DELETE_RANGE,
)


def brief(events: Iterator[Event]) -> list[tuple[int, int, bytes, bytes | None, bool]]:
    return [(e.sequence, int(e.op), e.key, e.end_key or e.value, e.end_of_batch) for e in events]


def test_codes_are_those_of_the_format() -> None:
    assert {op.name: op.value for op in Operation} == {
        "PREIMAGE": 0,
        "PUT": 1,
        "DELETE": 3,
        "DELETE_RANGE": 5,
        "POSTIMAGE": 9,
        "IMPORT": 16,
        "REVERT": 17,
    }


@pytest.mark.parametrize("streams", [1, 3])
def test_events_of_a_commit_share_its_time_are_numbered_and_the_last_is_marked(
    store: Store, streams: int
) -> None:
    store.reshard(streams)
    with store.batch() as batch:
        batch.put(b"k1", b"1")
        batch.delete_range(b"a", b"c")
        batch.put(b"b", b"2")
        batch.delete(b"z")
    store.put(b"k1", b"3")
    events = list(store.events(0))
    assert {event.timestamp for event in events[:4]} == {batch.timestamp}
    assert brief(iter(events)) == [
        (0, RANGE_DELETE, b"a", b"c", False),
        (1, UPDATE, b"k1", b"1", False),
        (2, UPDATE, b"b", b"2", False),
        (3, ROW_DELETE, b"z", None, True),
        (0, UPDATE, b"k1", b"3", True),
    ]


def test_the_end_of_a_batch_is_marked_inside_a_span_too(store: Store) -> None:
    with store.batch() as batch:
        for key in (b"a", b"b", b"c"):
            batch.put(key, b"1")
    assert [e.end_of_batch for e in store.events(0, span=Span(b"a", b"c"))] == [False, True]


@pytest.mark.parametrize(
    ("images", "value", "pre", "post"),
    [
        ("none", None, None, None),
        ("delta", b"new", None, None),
        ("pre", b"new", b"old", None),
        ("post", b"new", None, b"new"),
        ("pre+post", b"new", b"old", b"new"),
    ],
)
def test_images_are_the_values_before_and_after(
    store: Store, images: str, value: bytes | None, pre: bytes | None, post: bytes | None
) -> None:
    since = store.put(b"k", b"old")
    store.put(b"k", b"new")
    store.delete(b"k")
    changed, deleted = store.events(since, images=images)  # type: ignore[arg-type]
    assert (changed.value, changed.pre, changed.post) == (value, pre, post)
    before = None if pre is None else b"new"
    assert (deleted.value, deleted.pre, deleted.post) == (None, before, None)
    assert deleted.op is ROW_DELETE


def test_rows_keep_a_keys_images_and_its_change_together(store: Store) -> None:
    since = store.put(b"k", b"1")
    with store.batch() as batch:
        batch.put(b"j", b"2")
        batch.put(b"k", b"3")
    laid_out = [row for event in store.events(since, images="pre+post") for row in event.rows()]
    assert laid_out == [
        (Operation.PUT, b"j", b"2"),
        (Operation.POSTIMAGE, b"j", b"2"),
        (Operation.PREIMAGE, b"k", b"1"),
        (Operation.PUT, b"k", b"3"),
        (Operation.POSTIMAGE, b"k", b"3"),
    ]


def test_images_are_exact_under_concurrent_writers(store: Store) -> None:
    """The image before each event equals the image after the key's previous event, without
    exception."""

    def write(worker: int) -> None:
        for number in range(100):
            key = b"%d" % (number % 5)
            if number % 9 == 8:
                store.delete(key)
            else:
                store.put(key, b"%d/%d" % (worker, number))

    writers = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    state: dict[bytes, bytes | None] = {}
    for event in store.events(0, images="pre+post"):
        assert event.pre == state.get(event.key)
        state[event.key] = event.post
    assert {k: v for k, v in state.items() if v is not None} == dict(store.scan())


def test_imports_and_reverts_come_whole_or_as_their_keys(store: Store, tmp_path: Path) -> None:
    since = store.put(b"b", b"live")
    import_id, added = add_import(store, tmp_path / "i", {b"a": b"1", b"b": b"2"})
    reverted = store.revert_import(import_id)
    whole = list(store.events(since, expand="none"))
    assert [(e.op, e.timestamp) for e in whole] == [
        (Operation.IMPORT, added),
        (Operation.REVERT, reverted),
    ]
    assert {int.from_bytes(e.key, "big") for e in whole} == {import_id}
    expanded = list(store.events(since, images="pre+post"))
    assert [(e.sequence, e.op, e.key, e.pre, e.post, e.end_of_batch) for e in expanded] == [
        (0, UPDATE, b"a", None, b"1", False),
        (1, UPDATE, b"b", b"live", b"2", True),
        (0, ROW_DELETE, b"a", b"1", None, False),
        (1, UPDATE, b"b", b"2", b"live", True),
    ]


def test_range_deletes_come_whole_or_as_the_keys_that_lived(store: Store) -> None:
    for key in (b"a", b"b", b"c"):
        store.put(key, b"1")
    since = store.delete(b"b")
    with store.batch() as batch:
        batch.delete_range(b"a", b"d")
        batch.put(b"c", b"2")
    assert [(e.op, e.key, e.end_key) for e in store.events(since)] == [
        (RANGE_DELETE, b"a", b"d"),
        (UPDATE, b"c", None),
    ]
    expanded = list(store.events(since, expand="all", images="pre+post"))
    assert [(e.sequence, e.op, e.key, e.pre, e.post) for e in expanded] == [
        (0, ROW_DELETE, b"a", b"1", None),
        (0, ROW_DELETE, b"c", b"1", b"2"),
        (1, UPDATE, b"c", b"1", b"2"),
    ]


def test_changes_carry_their_changeset_and_stream(store: Store) -> None:
    opened = store.reshard(2)
    with store.changeset() as cs:
        store.put(b"a", b"1")
        store.delete_range(b"x", b"y")
    put, erased = store.events(0)
    assert put.changeset == erased.changeset == cs.id
    assert (put.stream, erased.stream) == (opened.stream_of(b"a"), opened.control)


def test_bad_calls_are_refused(store: Store) -> None:
    since = store.put(b"a", b"1")
    for wrong in ({"images": "both"}, {"expand": "some"}):
        with pytest.raises(UsageError):
            store.events(since, **wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            store.changes_batches(since, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        store.events(since, since - 1)
    with pytest.raises(NotYetWrittenError):
        store.events(since, since + 10**15)


def test_images_are_refused_where_history_is_gone(store: Store) -> None:
    first = store.put(b"a", b"1")
    store.put(b"a", b"2")
    last = store.put(b"a", b"3")
    store.gc(before=last)
    with pytest.raises(HistoryGoneError):
        store.events(first, images="pre")
    store.put(b"a", b"4")
    (event,) = store.events(last, images="pre")
    assert event.pre == b"3"


# -- Arrow ----------------------------------------------------------------------------------

keys = st.one_of(st.binary(max_size=3), st.sampled_from([b"a", b"b", b"c"]))
writes = st.one_of(
    st.tuples(st.just("put"), keys, st.sampled_from([b"", b"v", b"large" * 300])),
    st.tuples(st.just("delete"), keys),
    st.tuples(st.just("delete_range"), st.just(b"b"), st.just(b"c")),
)


def as_rows(batches: pa.RecordBatchReader) -> list[dict[str, object]]:
    assert batches.schema == changes_schema()
    rows = []
    for batch in batches:
        batch.validate(full=True)
        rows += batch.to_pylist()
    return sorted(rows, key=lambda row: (row["timestamp"], row["seq"]))


@given(
    st.lists(st.lists(writes, min_size=1, max_size=12), max_size=8),
    st.sampled_from(IMAGES),
    st.sampled_from([Span(), Span(b"a", b"b\x01"), Span(b"b")]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 4, 512]),
)
def test_record_batches_say_what_events_say(
    commits: list[list[tuple[str, bytes, bytes]]],
    images: str,
    span: Span,
    streams: int,
    whole_rows_min: int,
) -> None:
    import tempfile

    with (
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as patch,
        kvstore.open(Path(directory) / "s", durability="async") as store,
    ):
        patch.setattr(arrow_changes, "WHOLE_ROWS_MIN", whole_rows_min)
        store.reshard(streams)
        for commit in commits:
            with store.batch() as batch:
                for op, *arguments in commit:
                    getattr(batch, op)(*arguments)
        asked = {"span": span, "images": images}
        events = list(store.events(0, **asked))  # type: ignore[arg-type]
        found = as_rows(store.changes_batches(0, **asked))  # type: ignore[arg-type]
        expected = from_events(events).to_pylist() if events else []
        assert found == expected


@pytest.mark.usual_limits
def test_a_large_entry_is_handed_out_without_a_copy(store: Store) -> None:
    with store.batch() as batch:
        for number in range(1000):
            batch.put(b"%06d" % number, b"v%d" % number)
    assert batch.timestamp is not None
    (found,) = list(store.changes_batches(batch.timestamp - 1))
    assert found.num_rows == 1000
    buffers = {found.column(name).buffers()[2].parent is None for name in ("key", "value")}
    addresses = [found.column(name).buffers()[2].address for name in ("key", "value")]
    assert buffers
    assert addresses[1] - addresses[0] == 6000, "keys and values lie behind each other, as stored"


def test_chunks_of_a_large_commit_are_numbered_through(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.changes.index.CHANGE_CHUNK_BYTES", 4000)
    for streams in (1, 2):
        store.reshard(streams)
        with store.batch() as batch:
            for number in range(2000):
                batch.put(b"%06d" % number, b"v" * (number % 7))
        assert batch.timestamp is not None
        rows = as_rows(store.changes_batches(batch.timestamp - 1))
        assert [row["seq"] for row in rows] == list(range(2000))
        assert [row["key"] for row in rows] == [b"%06d" % number for number in range(2000)]


def test_imports_are_expanded_in_record_batches(store: Store, tmp_path: Path) -> None:
    rows = {b"%05d" % number: b"v" * 10 for number in range(5000)}
    _, added = add_import(store, tmp_path / "i", rows)
    batches = list(store.changes_batches(added - 1))
    assert sum(batch.num_rows for batch in batches) == 5000
    (whole,) = store.changes_batches(added - 1, expand="none")
    assert whole.column("op").to_pylist() == [int(Operation.IMPORT)]
