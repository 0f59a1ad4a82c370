"""Collections: windows join, instants restore exactly, damage is found, one writer at a time."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import backup
import bulk
import kvstore
from backup.chain import LocalChain
from kvstore.errors import (
    CorruptionError,
    FormatVersionError,
    HistoryGoneError,
    LockedError,
    NotAStoreError,
    NotYetWrittenError,
    UsageError,
)

Instants = list[kvstore.Timestamp]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", durability="async") as opened:
        yield opened


@pytest.fixture
def collection(tmp_path: Path) -> backup.Collection:
    return backup.Collection(tmp_path / "collection")


def live_through(
    store: kvstore.Store, collection: backup.Collection, staging: Path, *, seed: int
) -> Instants:
    """Four windows of every kind of change, a backup after each; returns instants in between."""
    pick = random.Random(seed)
    instants: Instants = []
    staged = bulk.Import.create(staging)
    with staged.writer() as writer:
        for number in range(0, 60, 3):
            writer.put(b"k%02d" % number, b"import")
    staged.seal()
    for window in range(4):
        if window == 1:
            bulk.ingest(store, staging)
        if window == 3:
            store.revert_import(staged.import_id)
        for _ in range(40):
            key = b"k%02d" % pick.randrange(60)
            action = pick.random()
            if action < 0.6:
                store.put(key, pick.randbytes(4))
            elif action < 0.8:
                store.delete(key)
            else:
                store.delete_range(key, b"k%02d" % (int(key[1:]) + pick.randrange(1, 20)))
            instants.append(kvstore.Timestamp(store.upper - 1))
        collection.backup(store)
    return instants


def versions(store: kvstore.Store, upto: int) -> list[kvstore.Change]:
    return list(store.versions(since=None, upto=upto))


def test_windows_join_without_gap_or_overlap(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    live_through(store, collection, tmp_path / "staging", seed=1)
    infos = collection.list()
    assert infos[0].lower == 0
    assert all(a.upper == b.lower for a, b in pairwise(infos))
    assert collection.upper == infos[-1].upper == store.upper
    assert sum(info.rows for info in infos) == len(versions(store, collection.upper - 1))


@pytest.mark.parametrize("seed", range(3))
def test_any_instant_restores_version_for_version(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path, seed: int
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=seed)
    for number, at in enumerate([*random.Random(seed).sample(instants, 4), None]):
        instant = collection.restore(tmp_path / f"restored-{number}", as_of=at)
        with kvstore.open(tmp_path / f"restored-{number}") as restored:
            assert versions(restored, instant) == versions(store, instant)
            assert dict(restored.scan()) == dict(store.scan(as_of=instant))
            later = restored.put(b"new", b"life")
            assert later > instant
            assert list(restored.changes(instant)) == [
                kvstore.Change(later, "put", b"new", None, b"life")
            ]


def test_a_prefix_restores_alone_with_ranges_cut_to_it(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    live_through(store, collection, tmp_path / "staging", seed=5)
    at = collection.restore(tmp_path / "restored", prefix=b"k2")
    with kvstore.open(tmp_path / "restored") as restored:
        assert list(restored.changes(0, at)) == list(store.changes(0, at, prefix=b"k2"))


def test_state_only_restores_what_was_alive(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=6)
    collection.restore(tmp_path / "restored", as_of=instants[70], history=False)
    with kvstore.open(tmp_path / "restored") as restored:
        assert restored.since == instants[70]
        assert dict(restored.scan()) == dict(store.scan(as_of=instants[70]))
        with pytest.raises(HistoryGoneError):
            restored.get(b"k00", as_of=instants[69])


def test_an_import_built_before_a_backup_and_added_after_it_is_in_the_next_increment(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    staged = bulk.Import.create(tmp_path / "staging")
    with staged.writer() as writer:
        writer.put(b"b", b"2")
    staged.seal()
    full = collection.backup(store)
    stamp = bulk.ingest(store, tmp_path / "staging")
    increment = collection.backup(store)
    assert full.upper <= stamp < increment.upper
    assert increment.rows == 1


def test_an_idle_store_makes_empty_increments(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    first = collection.backup(store)
    second = collection.backup(store)
    assert (second.rows, second.parts) == (0, 0)
    assert second.lower == first.upper < second.upper


def test_the_source_holds_its_history_for_the_next_window(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    info = collection.backup(store)
    assert [hold.timestamp for hold in store.holds()] == [info.upper - 1]


def test_only_the_window_can_be_restored(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no backup"):
        collection.restore(tmp_path / "restored")
    store.put(b"a", b"1")
    info = collection.backup(store)
    with pytest.raises(NotYetWrittenError):
        collection.restore(tmp_path / "restored", as_of=info.upper)
    assert not (tmp_path / "restored").exists()
    (tmp_path / "restored").mkdir()
    with pytest.raises(UsageError, match="exists"):
        collection.restore(tmp_path / "restored")


def test_a_collection_takes_one_store(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    with (
        kvstore.open(tmp_path / "other") as other,
        pytest.raises(UsageError, match="holds the backups of store"),
    ):
        collection.backup(other)


def test_a_directory_that_another_backup_is_writing_is_refused(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    with LocalChain(tmp_path / "collection").writing(), pytest.raises(LockedError):
        collection.backup(store)
    collection.backup(store)


def test_a_directory_of_other_files_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear all")
    with pytest.raises(NotAStoreError):
        backup.Collection(tmp_path)


# -- damage -----------------------------------------------------------------------------------


@pytest.fixture
def backed_up(store: kvstore.Store, collection: backup.Collection, tmp_path: Path) -> Path:
    live_through(store, collection, tmp_path / "staging", seed=9)
    assert collection.verify().backups == 4
    return tmp_path / "collection"


def test_a_flipped_bit_in_any_part_is_named_by_verify_and_refused_by_restore(
    backed_up: Path, collection: backup.Collection, tmp_path: Path
) -> None:
    for part in sorted((backed_up / "parts").iterdir()):
        whole = part.read_bytes()
        damaged = bytearray(whole)
        damaged[len(damaged) // 2] ^= 0x10
        part.write_bytes(damaged)
        with pytest.raises(CorruptionError, match=part.name):
            collection.verify()
        with pytest.raises(CorruptionError, match=part.name):
            collection.restore(tmp_path / "restored")
        assert sorted(path.name for path in tmp_path.iterdir() if "restor" in path.name) == []
        part.write_bytes(whole)


def test_missing_and_truncated_parts_are_all_named(
    backed_up: Path, collection: backup.Collection
) -> None:
    first, second = sorted((backed_up / "parts").iterdir())[:2]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-3])
    with pytest.raises(CorruptionError) as caught:
        collection.verify()
    assert first.name in str(caught.value)
    assert second.name in str(caught.value)


def test_an_edited_or_missing_manifest_breaks_the_chain_loudly(
    backed_up: Path, collection: backup.Collection
) -> None:
    manifest = backed_up / "batches" / "00000001.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"lower": ', '"lower": 1'))
    with pytest.raises(CorruptionError, match="altered"):
        collection.list()
    manifest.unlink()
    with pytest.raises(CorruptionError, match="chain"):
        collection.list()


def test_a_newer_format_is_refused(backed_up: Path, collection: backup.Collection) -> None:
    manifest = backed_up / "batches" / "00000000.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(FormatVersionError):
        collection.list()


def test_what_an_unfinished_backup_left_is_removed_by_the_next(
    store: kvstore.Store, collection: backup.Collection, backed_up: Path
) -> None:
    kept = {path.name for path in (backed_up / "parts").iterdir()}
    part = next((backed_up / "parts").iterdir())
    shutil.copy(part, backed_up / "parts" / "0123.parquet")
    collection.backup(store)
    assert {path.name for path in (backed_up / "parts").iterdir()} == kept
    assert collection.verify().backups == 5
