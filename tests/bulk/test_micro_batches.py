"""A micro-batch of a known number is a repetition, or of another stream, or has other rows."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.micro_batches import BatchOrigin
from kvstore.bulk.pushes.push_log import MicroBatch
from kvstore.errors import UsageError

FIRST, OTHER = BatchOrigin("q1", "offsets-1"), BatchOrigin("q2", "offsets-1")


@pytest.mark.parametrize(
    "unknown", [BatchOrigin(), BatchOrigin("q1"), BatchOrigin("", "rows-7"), FIRST]
)
def test_what_is_not_known_contradicts_nothing(unknown: BatchOrigin) -> None:
    assert BatchOrigin.of_text(unknown.text) == unknown
    unknown.require_repeated("n", 3, FIRST)
    FIRST.require_repeated("n", 3, unknown)


@pytest.mark.parametrize("other", [OTHER, BatchOrigin("q2"), BatchOrigin("q1", "offsets-2")])
def test_another_stream_and_other_offsets_are_told(other: BatchOrigin) -> None:
    for one, known in ((other, FIRST), (FIRST, other)):
        with pytest.raises(UsageError, match=r"micro-batch 3 of n .*checkpoint location"):
            one.require_repeated("n", 3, known)


def test_a_feed_of_pushes_takes_micro_batches_of_one_stream(tmp_path: Path) -> None:
    pushes = bulk.Pushes(tmp_path / "pushes")

    def change(number: int, origin: BatchOrigin) -> int:
        feed = MicroBatch(b"orders", number, origin)
        with pushes.begin_changes(feed=feed) as building:
            with building.writer() as writer:
                writer.put(b"k", b"v")
            return building.seal().number

    assert change(0, FIRST) == change(0, FIRST) == 1
    for number, origin in ((0, OTHER), (1, OTHER), (0, FIRST._replace(plan="offsets-2"))):
        with pytest.raises(UsageError, match="micro-batch"):
            change(number, origin)
        with pytest.raises(UsageError, match="micro-batch"):
            pushes.of_feed(MicroBatch(b"orders", number, origin))
    assert change(1, FIRST._replace(plan="offsets-2")) == 2
    assert [each.feed and each.feed.origin for each in pushes.list()] == [
        FIRST,
        FIRST._replace(plan="offsets-2"),
    ]


def test_the_record_of_an_import_keeps_its_origin_also_when_it_is_past(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        with bulk.Import.create(tmp_path / "staged", import_id=7) as staged:
            with staged.writer() as writer:
                writer.put(b"k", b"v")
            staged.seal()
        stamp = bulk.ingest(store, tmp_path / "staged", origin=FIRST.text)
        found = store.imports.get(7)
        assert found is not None
        assert found.origin == FIRST.text
        store.put(b"z", b"later")
        store.gc(before=store.upper - 1)
    with kvstore.open(tmp_path / "store") as store:
        past = store.imports.get(7)
        assert past is not None
        assert (past.origin, past.added, past.spans) == (FIRST.text, stamp, ())
