"""Drills: an instant is proved by a restore, and nothing else counts as a proof."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore import backup
from kvstore.backup.chains import Drill, newest_proof, with_drill
from kvstore.backup.shard import MemoryBlob, MemoryConsensus, Storage
from kvstore.errors import (
    CorruptionError,
    HistoryGoneError,
    NotYetWrittenError,
    StorageError,
    UsageError,
)
from kvstore.limits import DRILLS_KEPT
from tests.backup.histories import flip_a_bit, live_through, parts_of
from tests.harness.storage_faults import FaultRates, FaultyBlob, FaultyConsensus, Weather


def test_random_instants_are_proved_against_the_source_and_recorded(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    instants = live_through(store, collection, tmp_path / "staging", seed=11)
    assert collection.show().proof_age_seconds == math.inf
    assert store.metrics()["kvstore_backup_proof_age_seconds"].values == {}
    reports = [
        collection.drill(depth="contents", store=store, scratch=tmp_path / "scratch")
        for _ in range(5)
    ]
    for report in reports:
        assert instants[0] <= report.at < collection.upper
        assert report.compared > 0
        assert report.recorded
    assert len({report.at for report in reports}) > 1
    assert list((tmp_path / "scratch").iterdir()) == []
    shown = backup.Collection(tmp_path / "collection").show()
    (proof,) = shown.proofs
    newest = reports[-1]
    assert (proof.chain, proof.proven, proof.proven_at, proof.problem) == (
        newest.chain,
        newest.at,
        newest.drilled_at,
        "",
    )
    assert 0 <= shown.proof_age_seconds == proof.age_seconds < math.inf
    (info,) = (i for i in collection.list() if i.lower <= newest.at < i.upper)
    assert info.proven_at == newest.drilled_at
    (age,) = store.metrics()["kvstore_backup_proof_age_seconds"].values.values()
    assert age >= 0


def test_the_metrics_tell_how_far_a_backup_is_behind_and_when_it_was_proved(
    tmp_path: Path,
) -> None:
    clock = kvstore.ManualClock(1_700_000_000_000_000_000)
    address = str(tmp_path / "c")

    def told(name: str) -> object:
        return store.metrics()[f"kvstore_backup_{name}"].values.get((address,))

    with kvstore.open(tmp_path / "s", clock=clock) as store:
        collection = backup.Collection(address, clock=clock)
        store.put(b"a", b"1")
        assert told("behind_seconds") is None
        collection.backup(store)
        clock.advance(5_000_000_000)
        assert told("behind_seconds") == 0.0
        assert told("proof_age_seconds") is None
        store.put(b"a", b"2")
        clock.advance(2_000_000_000)
        assert told("behind_seconds") == pytest.approx(7, abs=0.01)
        collection.drill(depth="contents", store=store)
        clock.advance(3_000_000_000)
        assert told("proof_age_seconds") == pytest.approx(3, abs=0.01)
    with kvstore.open(tmp_path / "s", clock=clock) as store:
        assert told("proof_age_seconds") is None
        collection.backup(store)
        assert told("behind_seconds") == 0.0
        assert told("proof_age_seconds") == pytest.approx(3, abs=0.01)


def test_a_given_instant_is_restored_with_the_rows_that_it_had(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    first = store.put(b"a", b"1")
    store.put(b"a", b"2")
    store.put(b"b", b"3", expires=timedelta(days=1))
    collection.backup(store)
    report = collection.drill(at=first)
    assert (report.at, report.depth, report.rows, report.compared) == (first, "open", 1, 0)
    assert collection.drill(collection.upper - 1, "contents", store).compared > 3


def test_a_part_that_is_damaged_or_missing_fails_the_drill_and_is_recorded(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", bytes(300_000))
    collection.backup(store)
    proof = collection.drill()
    (part,) = parts_of(tmp_path)
    whole = part.read_bytes()
    flip_a_bit(part)
    with pytest.raises(CorruptionError, match="fail the checksum"):
        collection.drill()
    part.unlink()
    with pytest.raises(CorruptionError, match="its blob is gone"):
        collection.drill()
    (told,) = collection.show().proofs
    assert told.proven_at == proof.drilled_at
    assert "its blob is gone" in told.problem
    part.write_bytes(whole)
    assert collection.drill().drilled_at > proof.drilled_at
    assert collection.show().proofs[0].problem == ""


def test_a_source_that_disagrees_fails_the_drill(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    at = store.put(b"a", b"1")
    store.checkpoint(tmp_path / "older")
    store.put(b"a", b"2")
    collection.backup(store)
    with kvstore.open(tmp_path / "older") as older:
        older.put(b"a", b"another")
        assert collection.drill(at, "contents", older).compared == 1
        assert older.upper > collection.upper
        with pytest.raises(CorruptionError, match="differ from the store's"):
            collection.drill(collection.upper - 1, "contents", older)
    assert "differ from the store's" in collection.show().proofs[0].problem
    assert collection.drill(collection.upper - 1, "contents", store).compared == 2


def test_times_and_stores_that_cannot_be_drilled_are_refused_and_not_recorded(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no backup"):
        collection.drill()
    first = store.put(b"a", b"1")
    second = store.put(b"a", b"2")
    collection.backup(store)
    with pytest.raises(NotYetWrittenError):
        collection.drill(store.put(b"a", b"3"))
    with pytest.raises(UsageError, match="pass store"):
        collection.drill(depth="contents")
    with pytest.raises(UsageError, match="pass one of open, contents"):
        collection.drill(depth="files")  # type: ignore[arg-type]
    with (
        kvstore.open(tmp_path / "other") as other,
        pytest.raises(UsageError, match="pass the store that is backed up there"),
    ):
        collection.drill(depth="contents", store=other)
    store.gc(before=second)
    assert collection.drill(first).rows == 1
    with pytest.raises(HistoryGoneError):
        collection.drill(first, "contents", store)
    assert collection.drill("random", "contents", store).at >= second
    collection.expire(before=second)
    with pytest.raises(HistoryGoneError):
        collection.drill(first)
    assert collection.show().proofs[0].problem == ""


def test_a_bucket_that_fails_in_turn_neither_proves_nor_disproves(store: kvstore.Store) -> None:
    weather = Weather(31, FaultRates(stale=0.0))
    storage = Storage(
        FaultyBlob(MemoryBlob(), weather), FaultyConsensus(MemoryConsensus(), weather)
    )
    collection = backup.Collection("faulty", storage=storage)
    for number in range(3):
        store.put(b"%d" % number, bytes(300_000))
        collection.backup(store)
    assert all(collection.drill(depth="contents", store=store).recorded for _ in range(3))


def test_the_newest_drills_and_the_newest_proof_of_each_chain_are_kept() -> None:
    drills: tuple[Drill, ...] = ()
    for number in range(3 * DRILLS_KEPT):
        problem = "" if number < 3 else "gone"
        drills = with_drill(drills, Drill("a", number, number, "open", problem), ["a", "b"])
    assert len(drills) == DRILLS_KEPT
    assert newest_proof(drills, "a") == Drill("a", 2, 2, "open", "")
    assert newest_proof(drills, "a", lower=3) is None
    drills = with_drill(drills, Drill("b", 1, 1, "open"), ["b"])
    assert drills == (Drill("b", 1, 1, "open"),)


def test_a_chain_has_a_proof_of_its_own(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    old = collection.drill(collection.upper - 1)
    store.put(b"a", b"2")
    collection.backup(store, full=True)
    assert [proof.proven_at for proof in collection.show().proofs] == [old.drilled_at, None]
    new = collection.drill(collection.upper - 1)
    assert new.chain != old.chain
    assert [proof.proven_at for proof in collection.show().proofs] == [
        old.drilled_at,
        new.drilled_at,
    ]


def test_a_drill_takes_a_label(store: kvstore.Store, collection: backup.Collection) -> None:
    at = store.put(b"a", b"1")
    collection.backup(store, label="before-migration")
    store.put(b"a", b"2")
    collection.backup(store)
    assert at <= collection.drill("before-migration").at == collection.labels()["before-migration"]
    with pytest.raises(UsageError, match="at='none' is no time, and no label"):
        collection.drill("none")


def test_a_scratch_space_that_cannot_be_made_is_told(
    store: kvstore.Store, collection: backup.Collection, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="the scratch space"):
        collection.drill(scratch=tmp_path / "file")
    with pytest.raises(UsageError, match="scratch s3://bucket/scratch is a URL"):
        collection.drill(scratch="s3://bucket/scratch")
