"""Writes at explicit timestamps: what they are refused by, and what reads say of deletions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock, Span
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import UsageError, WriteTooOldError
from kvstore.mvcc import Lifetime, Versions, WriteSet
from kvstore.timestamp import TIMESTAMP_MAX

pytestmark = pytest.mark.usefixtures("each_engine")


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[Versions]:
    engine = RocksEngine(tmp_path / "db")
    yield Versions(engine)
    engine.close()


Write = Callable[[Versions, int], None]

PUT: Write = lambda v, at: v.put(b"k", b"v", at=at)  # noqa: E731
DELETE: Write = lambda v, at: v.delete(b"k", at=at)  # noqa: E731
OVER: Write = lambda v, at: v.delete_range(b"a", b"z", at=at)  # noqa: E731


@pytest.mark.parametrize("below", [PUT, DELETE, OVER])
@pytest.mark.parametrize("write", [PUT, DELETE, OVER])
@pytest.mark.parametrize("at", [4, 5])
def test_write_at_or_below_what_is_there_is_refused_and_writes_nothing(
    versions: Versions, below: Write, write: Write, at: int
) -> None:
    below(versions, 5)
    before = versions.history(b"k"), versions.view.fragments
    with pytest.raises(WriteTooOldError) as caught:
        write(versions, at)
    assert caught.value.least == 6
    assert caught.value.timestamp == at
    assert (versions.history(b"k"), versions.view.fragments) == before
    write(versions, caught.value.least)


def test_refusal_names_the_first_key_in_the_way_clamped_to_the_span(versions: Versions) -> None:
    versions.delete_range(b"a", b"e", at=5)
    versions.put(b"f", b"v", at=9)
    with pytest.raises(WriteTooOldError) as caught:
        versions.delete_range(b"c", b"z", at=5)
    assert (caught.value.key, caught.value.least) == (b"c", 10)


def test_refusal_of_a_set_names_a_time_that_is_legal_for_all_of_it(versions: Versions) -> None:
    versions.put(b"a", b"v", at=9)
    versions.put(b"b", b"v", at=5)
    writes = WriteSet()
    writes.put(b"b", b"w")
    writes.put(b"a", b"w")
    writes.delete_range(b"x", b"y")
    with pytest.raises(WriteTooOldError) as caught:
        versions.apply(writes, at=3)
    assert (caught.value.key, caught.value.least) == (b"a", 10)
    versions.apply(writes, at=10)


def test_row_of_an_import_refuses_writes_at_or_below_its_stamp(versions: Versions) -> None:
    from kvstore.codec.keys import VALUE, encode_reference
    from kvstore.codec.ordered import frame
    from kvstore.engine.api import DATA

    batch = versions.engine.batch()
    row = frame(b"k") + encode_reference(7) + VALUE
    batch.put(row, b"row", versions.engine.families[DATA])
    versions.engine.write(batch)
    versions.put(b"k", b"before it was added", at=1)
    versions.publish_stamps({encode_reference(7): Lifetime(5)})
    for write in (PUT, DELETE, OVER):
        with pytest.raises(WriteTooOldError):
            write(versions, 5)
    versions.put(b"k", b"v", at=6)


def test_timestamps_that_cannot_be_written_are_refused(versions: Versions) -> None:
    for at in (0, -1, TIMESTAMP_MAX + 1):
        with pytest.raises(UsageError):
            versions.put(b"k", b"v", at=at)
    with pytest.raises(UsageError):
        versions.delete_range(b"k", b"k", at=1)


def test_read_of_deletions_tells_one_under_a_bare_range_tombstone(versions: Versions) -> None:
    versions.delete_range(b"a", b"z", at=2)
    assert versions.version_at(b"k", 1) is None
    assert versions.version_at(b"k", 2) == (b"k", 2, None)
    versions.delete(b"k", at=3)
    assert versions.version_at(b"k", 3) == (b"k", 3, None)
    assert versions.version_at(b"k", 2) == (b"k", 2, None)


def test_scan_of_deletions_tells_only_of_keys_that_were_written(versions: Versions) -> None:
    versions.put(b"b", b"v", at=1)
    versions.delete(b"c", at=1)
    versions.delete_range(b"a", b"z", at=2)
    versions.put(b"d", b"v", at=3)
    assert list(versions.versions_at(Span(), 2)) == [(b"b", 2, None), (b"c", 2, None)]
    assert list(versions.versions_at(Span(b"c"), 3)) == [(b"c", 2, None), (b"d", 3, b"v")]
    assert list(versions.versions_at(Span(), 1)) == [(b"b", 1, b"v"), (b"c", 1, None)]


def test_batch_of_many_range_deletes_and_deletes_is_not_quadratic(tmp_path: Path) -> None:
    writes = WriteSet()
    for number in range(3000):
        writes.delete_range(b"r%06d" % (2 * number), b"r%06d" % (2 * number + 1))
    for number in range(6000):
        writes.delete(b"r%06d" % number)
    writes.seal()
    assert (len(writes.ranges), len(writes.points)) == (3000, 3000)
    with kvstore.open(tmp_path / "db", clock=ManualClock()) as store:
        store._committer.commit(writes)
        assert len(store._versions.view.fragments) == 6000
        store._versions.view.fragments._check()
        assert store.verify().problems == ()
