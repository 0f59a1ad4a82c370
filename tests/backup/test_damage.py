"""Damage: a missing, altered or orphaned file is found and named."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.backup.verify import DEPTHS
from kvstore.errors import (
    CorruptionError,
    NotYetWrittenError,
    UsageError,
)
from tests.backup.histories import (
    flip_a_bit,
    live_through,
    parts_of,
    staged_import,
    versions,
)

pytestmark = pytest.mark.usefixtures("each_engine")


@pytest.fixture
def backed_up(store: kvstore.Store, collection: backup.Collection, tmp_path: Path) -> Path:
    live_through(store, collection, tmp_path / "staging", seed=9)
    assert collection.verify().backups == 4
    return tmp_path / "collection"


def test_a_flipped_bit_in_any_part_is_named_by_verify_and_refused_by_restore(
    backed_up: Path, collection: backup.Collection, tmp_path: Path
) -> None:
    parts = parts_of(backed_up)
    assert len(parts) > 0
    for part in parts:
        whole = part.read_bytes()
        flip_a_bit(part)
        with pytest.raises(CorruptionError, match=part.name):
            collection.verify()
        with pytest.raises(CorruptionError, match=part.name) as caught:
            collection.restore(tmp_path / "restored")
        assert "from a backup" not in caught.value.remedy
        assert "copy of the collection" in caught.value.remedy
        assert [path.name for path in tmp_path.iterdir() if "restor" in path.name] == []
        part.write_bytes(whole)


def test_a_verification_counts_each_row_once(
    store: kvstore.Store, collection: backup.Collection, backed_up: Path
) -> None:
    total = collection.show().rows
    for depth in DEPTHS[1:]:
        counts: list[int] = []
        source = store if depth == "contents" else None
        collection.verify(depth, source, progress=counts.append)
        assert counts == sorted(counts)
        assert counts[-1] == total > 0


def test_missing_and_truncated_parts_are_all_named(
    backed_up: Path, collection: backup.Collection
) -> None:
    first, second = parts_of(backed_up)[:2]
    first.unlink()
    with pytest.raises(CorruptionError, match=first.name):
        collection.verify("files")
    second.write_bytes(second.read_bytes()[:-3])
    for depth in DEPTHS[:2]:
        with pytest.raises(CorruptionError) as caught:
            collection.verify(depth)
        assert first.name in str(caught.value)
        assert second.name in str(caught.value)
    report = collection.scrub()
    assert [len(report.missing), len(report.altered), report.is_sound] == [1, 1, False]


@pytest.mark.parametrize("depth", ["checksums", "contents"])
def test_a_verification_beside_a_compaction_sees_no_damage_in_what_that_replaced(
    store: kvstore.Store,
    collection: backup.Collection,
    backed_up: Path,
    depth: Literal["checksums", "contents"],
) -> None:
    other = backup.Collection(backed_up)

    def compact(_rows: int) -> None:
        store.put(b"k", b"v")
        other.backup(store)
        other.compact()

    report = collection.verify(depth, store if depth == "contents" else None, progress=compact)
    assert report.parts
    for _ in range(2):
        store.put(b"k", b"v")
        collection.backup(store)

    def lose(_rows: int) -> None:
        parts_of(backed_up)[-1].unlink(missing_ok=True)

    with pytest.raises(CorruptionError, match="is missing"):
        collection.verify(progress=lose)


def test_an_import_that_was_reverted_before_all_that_is_kept_is_no_difference(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    """The covered value shows again. The backup has it at the time of the revert, the store at its
    old time."""
    store.put(b"k00", b"covered")
    imported = staged_import(tmp_path / "staging")
    bulk.ingest(store, tmp_path / "staging")
    reverted = store.revert_import(imported.import_id)
    collection.backup(store)
    store.gc(before=reverted)
    store.put(b"k01", b"1")
    collection.backup(store)
    assert store.since == reverted
    assert collection.verify("contents", store).rows == 2


def test_contents_that_differ_from_the_store_are_found(
    store: kvstore.Store, collection: backup.Collection, backed_up: Path
) -> None:
    report = collection.verify("contents", store)
    assert report.rows == len(versions(store, collection.upper - 1))
    stored = sum(info.rows for info in collection.list())
    assert collection.verify().rows == collection.verify("files").rows == stored > 0
    collection._chains.shard(collection._chains.read().chains[0]).writer().progress(  # type: ignore[union-attr]
        store.sync() + 10**9
    )
    with pytest.raises((CorruptionError, NotYetWrittenError)):
        collection.verify("contents", store)
    with pytest.raises(UsageError):
        collection.verify("contents")
    with pytest.raises(UsageError):
        collection.verify("deeply")  # type: ignore[arg-type]


def test_contents_of_an_older_chain_are_compared_too(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    store.put(b"b", b"2")
    collection.backup(store, full=True)
    assert collection.verify("contents", store).rows == 1 + 2
    record = collection._chains.read()
    assert record is not None
    # This claims that nothing was written at the time of b.
    collection._chains.shard(record.chains[0]).writer().progress(collection.upper)
    with pytest.raises(CorruptionError, match="differ"):
        collection.verify("contents", store)
    store.holds.drop(store.holds.all()[0].name)
    store.gc(before=store.sync() - 1)
    store.put(b"c", b"3")
    collection.backup(store, full=True)
    assert collection.verify("contents", store).rows == 3


def test_an_altered_manifest_is_an_error_that_names_the_place(
    backed_up: Path, collection: backup.Collection
) -> None:
    journal = next((backed_up / "consensus").glob("chain-*/*-journal*"))
    content = bytearray(journal.read_bytes())
    content[len(content) // 3] ^= 1
    journal.write_bytes(content)
    with pytest.raises(CorruptionError, match="journal"):
        backup.Collection(collection.url).list()


def test_what_an_unfinished_backup_left_is_found_by_a_scrub(
    store: kvstore.Store, collection: backup.Collection, backed_up: Path
) -> None:
    part = parts_of(backed_up)[0]
    orphan = part.with_name("00000000000000000001-00000000000000ff.parquet")
    shutil.copy(part, orphan)
    collection.backup(store)
    assert collection.scrub().orphans == (str(orphan.relative_to(backed_up / "blob")),)
    collection.scrub(delete_orphans_older_than=timedelta(days=1))
    assert not orphan.exists()
    assert collection.verify().backups == 5
