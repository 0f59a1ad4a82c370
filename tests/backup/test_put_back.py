"""A collection that was put back from an older copy, whole or in part: each detectable case is
detected."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import backup
from kvstore.backup.shard import BatchDesc, MemoryBlob, MemoryConsensus, Shard, Versioned
from kvstore.backup.shard.state import witness
from kvstore.backup.shard.state.codec import decode_diff
from kvstore.errors import CorruptionError, StatesLostError
from kvstore.limits import ROLLUP_EVERY
from tests.shard.rows import put, versions


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", engine="memory") as opened:
        yield opened


def some_backups(store: kvstore.Store, place: Path, secret: str | None, count: int) -> None:
    for number in range(count):
        store.put(b"k%03d" % number, b"v")
        backup.Collection(place, secret).backup(store)


def put_back(place: Path, copy: Path) -> None:
    """The folder of the consensus from an older copy; the parts stay."""
    shutil.rmtree(place / "consensus")
    shutil.copytree(copy, place / "consensus")


@pytest.mark.parametrize("secret", [None, "secret"])
def test_a_consensus_put_back_from_an_older_copy_is_told(
    store: kvstore.Store, tmp_path: Path, secret: str | None
) -> None:
    place, copy = tmp_path / "collection", tmp_path / "copy"
    some_backups(store, place, secret, 2)
    older = backup.Collection(place, secret).upper
    shutil.copytree(place / "consensus", copy)
    some_backups(store, place, secret, 2)
    newer = backup.Collection(place, secret)
    put_back(place, copy)
    uses: list[Callable[[backup.Collection], object]] = [
        lambda c: c.verify(),
        lambda c: c.verify("files"),
        lambda c: c.backup(store),
        lambda c: c.restore(tmp_path / "restored"),
        lambda c: c.scan_batches(),
    ]
    for use in uses:
        with pytest.raises(StatesLostError, match="older copy"):
            use(backup.Collection(place, secret))
    with pytest.raises(StatesLostError):
        newer.backup(store)  # this handle has seen the newer states itself
    report = backup.Collection(place, secret).scrub()
    assert not report.is_sound
    assert "older copy" in report.missing[0]
    collection = backup.Collection(place, secret)
    assert collection.upper == older  # reads as of a time that the copy has succeed
    collection.restore(tmp_path / "restored", as_of=older - 1)
    collection.backup(store, full=True)
    fresh = backup.Collection(place, secret)
    assert fresh.verify("contents", store).chains == 2
    assert fresh.scrub().is_sound
    fresh.backup(store)


@pytest.mark.parametrize("secret", [None, "secret"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "torn", [lambda data: b"", lambda data: bytes(len(data)), lambda data: data[:20]]
)
def test_witnesses_without_their_bytes_refuse_nothing_and_tell_by_their_names(
    store: kvstore.Store,
    tmp_path: Path,
    secret: str | None,
    count: int,
    torn: Callable[[bytes], bytes],
) -> None:
    """A power cut may keep the name of a file that was not synced, and lose the bytes."""
    place, copy = tmp_path / "collection", tmp_path / "copy"
    some_backups(store, place, secret, 2)
    shutil.copytree(place / "consensus", copy)
    some_backups(store, place, secret, 2)
    for path in sorted(place.glob(f"blob/chain-*/{witness.FOLDER}/v*"))[-count:]:
        path.write_bytes(torn(path.read_bytes()))
    backup.Collection(place, secret).verify("contents", store)
    assert backup.Collection(place, secret).scrub().is_sound
    backup.Collection(place, secret).restore(tmp_path / "restored")
    put_back(place, copy)
    with pytest.raises(StatesLostError):
        backup.Collection(place, secret).verify()
    shutil.rmtree(copy)
    assert not backup.Collection(place, secret).scrub().is_sound


@pytest.mark.parametrize("secret", [None, "secret"])
def test_a_backup_goes_on_beside_a_torn_witness(
    store: kvstore.Store, tmp_path: Path, secret: str | None
) -> None:
    place = tmp_path / "collection"
    some_backups(store, place, secret, 2)
    max(place.glob(f"blob/chain-*/{witness.FOLDER}/v*")).write_bytes(b"")
    some_backups(store, place, secret, 2)
    assert backup.Collection(place, secret).verify("contents", store).chains == 1


def test_states_that_were_appended_to_an_older_copy_are_told(
    store: kvstore.Store, tmp_path: Path
) -> None:
    """The appender did not have the newer parts, or ran a release that did not compare them."""
    place, copy = tmp_path / "collection", tmp_path / "copy"
    some_backups(store, place, None, 2)
    shutil.copytree(place / "consensus", copy)
    some_backups(store, place, None, 2)
    put_back(place, copy)
    (chain,) = place.glob("blob/chain-*")
    shutil.move(chain / witness.FOLDER, tmp_path / "kept")
    store.drop_hold(store.holds.all()[0].name)
    some_backups(store, place, None, 4)
    shutil.copytree(tmp_path / "kept", chain / witness.FOLDER, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "kept")
    newest = max(int(path.name[1:]) for path in (chain / witness.FOLDER).iterdir())
    for path in (chain / witness.FOLDER).iterdir():
        if int(path.name[1:]) in (newest, newest - 1):
            path.unlink()
    with pytest.raises(StatesLostError):
        backup.Collection(place).verify()


def test_a_record_of_chains_put_back_from_an_older_copy_is_told(
    store: kvstore.Store, tmp_path: Path
) -> None:
    place, copy = tmp_path / "collection", tmp_path / "copy"
    some_backups(store, place, None, 2)
    shutil.copytree(place / "consensus", copy)
    store.put(b"a", b"1")
    backup.Collection(place).backup(store, full=True)
    put_back(place, copy)
    for check in (backup.Collection(place).verify, lambda: lost(place)):
        with pytest.raises(StatesLostError, match="record of the collection"):
            check()
    backup.Collection(place).backup(store, full=True)
    assert backup.Collection(place).verify("contents", store).chains == 2


def lost(place: Path) -> None:
    report = backup.Collection(place).scrub()
    raise StatesLostError(report.missing[0], found=0, known=0)


def test_expired_chains_and_collected_states_leave_no_witness(
    store: kvstore.Store, tmp_path: Path
) -> None:
    place = tmp_path / "collection"
    collection = backup.Collection(place)
    for number in range(2 * ROLLUP_EVERY):
        store.put(b"k", b"%d" % number)
        collection.backup(store)
    (chain,) = place.glob("blob/chain-*")
    assert 0 < len(list((chain / witness.FOLDER).iterdir())) <= ROLLUP_EVERY + 8
    collection.verify()
    store.put(b"k", b"new")
    collection.backup(store, full=True)
    collection.expire(before=collection.upper)
    assert not list(place.glob(f"blob/{chain.name}/{witness.FOLDER}/*"))
    backup.Collection(place).verify("contents", store)


# -- the source's knowledge-----------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, "secret"])
def test_the_source_knows_how_far_a_collection_was(
    store: kvstore.Store, tmp_path: Path, secret: str | None
) -> None:
    """The whole place is an older copy, so nothing in it shows that."""
    place, copy = tmp_path / "collection", tmp_path / "copy"
    some_backups(store, place, secret, 2)
    shutil.copytree(place, copy)
    some_backups(store, place, secret, 2)
    shutil.rmtree(place)
    shutil.copytree(copy, place)
    backup.Collection(place, secret).verify()
    with pytest.raises(StatesLostError, match="full=True"):
        backup.Collection(place, secret).verify("contents", store)
    with pytest.raises(StatesLostError, match="full=True"):
        backup.Collection(place, secret).backup(store)
    collection = backup.Collection(place, secret)
    collection.backup(store, full=True)
    store.put(b"x", b"1")
    collection.backup(store)
    assert collection.verify("contents", store).chains == 2


def test_a_collection_that_is_gone_is_not_begun_again_in_silence(
    store: kvstore.Store, tmp_path: Path
) -> None:
    place = tmp_path / "collection"
    some_backups(store, place, None, 2)
    (hold,) = store.holds.all()
    shutil.rmtree(place)  # or its disk is not mounted
    with pytest.raises(StatesLostError, match="mounted"):
        backup.Collection(place).backup(store)
    assert backup.Collection(place).list() == []
    backup.Collection(place).backup(store, full=True)
    (fresh,) = store.holds.all()
    assert fresh.name != hold.name
    backup.Collection(tmp_path / "other").backup(store)
    assert len(store.holds.all()) == 2


def test_a_first_backup_that_was_killed_is_no_loss(store: kvstore.Store, tmp_path: Path) -> None:
    def kill(_rows: int) -> None:
        raise KeyboardInterrupt

    store.put(b"a", b"1")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            backup.Collection(tmp_path / "collection").backup(store, progress=kill)
    backup.Collection(tmp_path / "collection").backup(store)


def test_the_source_remembers_over_restarts(tmp_path: Path) -> None:
    place, copy = tmp_path / "collection", tmp_path / "copy"
    for number in range(3):
        with kvstore.open(tmp_path / "store") as store:
            some_backups(store, place, None, 1)
        if not number:
            shutil.copytree(place, copy)
    shutil.rmtree(place)
    shutil.copytree(copy, place)
    with kvstore.open(tmp_path / "store") as store, pytest.raises(StatesLostError):
        backup.Collection(place).backup(store)


# -- the chain of digests ---------------------------------------------------------------------


def shard_with_history() -> tuple[MemoryBlob, MemoryConsensus]:
    blob, consensus = MemoryBlob(), MemoryConsensus()
    shard = Shard.open(blob, consensus, "s")
    for upper in range(1, 6):
        rows = versions([put(b"k", upper - 1, b"v%d" % upper)])
        shard.writer("w").compare_and_append(
            shard.write_batch(BatchDesc(upper - 1, upper), rows), token=str(upper)
        )
    return blob, consensus


def test_each_state_names_the_one_before() -> None:
    _, consensus = shard_with_history()
    found = [decode_diff(v.data, where="x") for v in consensus.scan("s", start=0, limit=99)]
    assert found[0].link == ""
    assert [diff.link for diff in found[1:]] == [diff.digest for diff in found[:-1]]


@pytest.mark.parametrize("changed", [2, 3, 4, 5, 6])
def test_a_state_out_of_another_history_is_told(changed: int) -> None:
    """Each diff is whole by itself. Only its neighbours show that it belongs to another history."""
    blob, consensus = shard_with_history()
    _, other = shard_with_history()
    mixed = MemoryConsensus()
    expected = None
    for mine, theirs in zip(
        *(c.scan("s", start=0, limit=99) for c in (consensus, other)), strict=True
    ):
        version = theirs if mine.seqno == changed else mine
        mixed.compare_and_set("s", expected=expected, new=Versioned(mine.seqno, version.data))
        expected = mine.seqno
    shard = Shard.open(blob, consensus, "s")
    shard.require_newest()
    shard.leave_witness()
    with pytest.raises(CorruptionError):
        Shard.open(blob, mixed, "s").require_newest()
