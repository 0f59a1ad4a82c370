"""Each system call of journal, memory engine, tasks and local consensus fails, once or for good.

After each failure the caller gets an error of the tree, acknowledged work stands, the handle can be
closed, no descriptor and no lock stays behind, and the next opening finds a sound state.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.errors import ImportRefusedError, KVStoreError, OutOfSpaceError, StorageError
from kvstore.storage.contract import Cas, Versioned
from kvstore.storage.journal import Journal, Sync, compact, inspect, read
from kvstore.storage.journal.repair import salvage
from kvstore.storage.local_files import FileBlob, FileConsensus
from kvstore.tasks import Tasks, read_tasks
from tests.harness.seeds import seeded
from tests.harness.system_faults import ERRORS, faults
from tests.journal.folds import Payloads

Acknowledged = list[bytes]
_LOOKS = ("stat ", "lstat ", "listdir ", "scandir ")


def open_payloads(path: Path, fold: Payloads, sync: Sync | None = None) -> Journal:
    return Journal.open(
        path,
        apply=fold.apply,
        restore=fold.restore,
        snapshot=fold.records,
        content="test",
        sync=sync or Sync.always(),
        file_records=4,
        compact_bytes=200,
    )


def journal_work(path: Path, told: Acknowledged) -> None:
    for part in (b"a", b"b"):
        fold = Payloads()
        with open_payloads(path, fold) as journal:
            assert fold.items[: len(told)] == told
            said = list(fold.items)
            for number in range(6):
                said.append(part * (number + 1))
                journal.append(said[-1])
                told[:] = said
            journal.append_many([b"x", b"y"])
            told[:] = said = [*said, b"x", b"y"]
            *_, newest = read(path)
            assert newest.payload == b"y"
            journal.snapshot((0, item) for item in said)
        if journal.reopen():
            with journal:
                journal.append(b"again")
                told.append(b"again")
        compact(path, Payloads(), content="test")
        assert inspect(path).sound
        copied = path.with_name(f"{path.name}-{part.decode()}")
        salvage(path, copied)
    with open_payloads(path, Payloads()) as journal:
        journal.finalize()


def journal_check(path: Path, told: Acknowledged) -> None:
    fold = Payloads()
    with open_payloads(path, fold) as journal:
        assert fold.items[: len(told)] == told
        journal.append(b"goes on")
    assert inspect(path).sound


def memory_work(path: Path, told: Acknowledged) -> None:
    with kvstore.open(path, "memory", durability="sync") as store:
        for key in (b"a", b"b"):
            store.put(key, key)
            told.append(key)
        with store.batch() as batch:
            for number in range(30):
                batch.put(b"many/%02d" % number, b"x" * 100)
        told.append(b"many/00")
    with kvstore.open(path, "memory", durability="group") as store:
        staging = path.parent.parent / "staged"  # the calls of this block are not counted
        shutil.rmtree(staging, ignore_errors=True)
        made = bulk.Import.create(staging)
        with made.writer() as writer:
            writer.put(b"imported", b"1")
        made.seal()
        bulk.ingest(store, made.staging, move=True)
        told.append(b"imported")
        store.upkeep.compact()
        store.checkpoint(path.with_name(f"{path.name}-checkpoint"))
        store.put(b"c", b"c")
        told.append(b"c")
    with kvstore.open_read_only(path) as reading:
        assert reading.get(b"c") == b"c"


def memory_check(path: Path, told: Acknowledged) -> None:
    with kvstore.open(path, "memory", durability="sync") as store:
        for key in told:
            assert store.get(key) is not None, key
        assert store.verify().ok
        store.put(b"goes on", b"1")
    with kvstore.open_read_only(path) as reading:
        assert reading.get(b"goes on") == b"1"


def tasks_work(path: Path, told: Acknowledged) -> None:
    for part in ("a", "b"):
        with Tasks.open(path, compact_bytes=300) as tasks:
            for number in range(4):
                task = tasks.insert("queue", b"v" * 50, id=f"{part}{number}")
                told.append(task.id.encode())
            claimed = tasks.claim(["queue"])
            assert claimed is not None
            tasks.renew(claimed)
            tasks.compact()
        assert len(read_tasks(path)) >= 4


def tasks_check(path: Path, told: Acknowledged) -> None:
    with Tasks.open(path) as tasks:
        for task_id in told:
            assert tasks.get(task_id.decode()) is not None
        tasks.insert("queue")


def consensus_work(path: Path, told: Acknowledged) -> None:
    before, consensus = None, FileConsensus(path)
    for number in range(1, 7):
        if number == 4:
            consensus = FileConsensus(path)
        found = consensus.compare_and_set(
            "key", expected=before, new=Versioned(number, b"%d" % number)
        )
        assert found is Cas.COMMITTED
        told.append(b"%d" % number)
        before = number
        if number == 3:
            consensus.truncate("key", 2)
    head = consensus.head("key")
    assert head is not None
    assert head.seqno == 6


def consensus_check(path: Path, told: Acknowledged) -> None:
    consensus = FileConsensus(path)
    head = consensus.head("key")
    seqno = head.seqno if head else None
    assert (seqno or 0) >= (int(told[-1]) if told else 0)
    following = (seqno or 0) + 1
    found = consensus.compare_and_set("key", expected=seqno, new=Versioned(following, b""))
    assert found is Cas.COMMITTED


def blob_work(path: Path, told: Acknowledged) -> None:
    for number in range(5):
        blob, name = FileBlob(path), f"folder{number % 3}/name{number}"
        blob.put(name, b"%d" % number)
        told.append(name.encode())
        blob.put(name, b"%d" % number)
        assert blob.get(name) == blob.get_range(name, start=0, length=9) == b"%d" % number
        assert blob.size(name) == len(str(number))
    assert [each.name for each in blob.list("folder1/")] == ["folder1/name1", "folder1/name4"]
    del told[0]
    blob.delete("folder0/name0")
    blob.sweep(before_ns=0)


def blob_check(path: Path, told: Acknowledged) -> None:
    blob = FileBlob(path)
    assert set(told) <= {each.name.encode() for each in blob.list()}
    for name in told:
        assert blob.get(name.decode()) == name.rpartition(b"name")[2]
    assert blob.sweep(before_ns=1 << 62) <= 1


def staging_work(path: Path, told: Acknowledged) -> None:
    made = bulk.Import.create(path, import_id=7)
    for number in range(4):
        with made.writer() as writer:
            writer.put(b"%02d" % number, b"v")
    made.seal()
    told.append(b"sealed")
    with kvstore.open(None, "memory") as store:
        bulk.ingest(store, path)
        assert len(list(store.scan())) == 4
        bulk.ingest(store, path)


def staging_check(path: Path, told: Acknowledged) -> None:
    with kvstore.open(None, "memory") as store:
        try:
            bulk.ingest(store, path)
        except ImportRefusedError:
            assert not told
        assert len(list(store.scan())) in ((4,) if told else (0, 4))


Work = Callable[[Path, Acknowledged], None]
WORKS: dict[str, tuple[Work, Work]] = {
    "journal": (journal_work, journal_check),
    "memory": (memory_work, memory_check),
    "tasks": (tasks_work, tasks_check),
    "consensus": (consensus_work, consensus_check),
    "blob": (blob_work, blob_check),
    "staging": (staging_work, staging_check),
}


def open_below(place: Path) -> set[str]:
    """The files below a place that this process has open, by name."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith(str(place))}


def require_sound(place: Path, name: str, nth: int, error: int, *, sticky: bool) -> bool:
    """Let call number `nth` fail; returns whether the work made that call."""
    work, check = WORKS[name]
    path, told = place / "it", Acknowledged()
    raised: BaseException | None = None
    with faults(place, nth=nth, error=error, sticky=sticky) as calls:
        try:
            work(path, told)
        except (KVStoreError, OSError) as caught:
            raised = caught
    what = f"{os.strerror(error)} in call {nth}, {calls.failed[:1]}"
    if raised is not None and not isinstance(raised, KVStoreError):
        raise AssertionError(f"{what}: not of the tree") from raised
    del raised
    if open_below(place):
        gc.collect()
        assert not open_below(place), what
    try:
        check(path, told)
    except Exception as caught:
        raise AssertionError(f"after {what}") from caught
    return bool(calls.failed)


@pytest.mark.parametrize(
    "tried", [20, pytest.param(1 << 20, marks=pytest.mark.soak)], ids=["some", "every"]
)
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("name", WORKS)
def test_a_system_call_that_fails_ends_in_an_error_of_the_tree(
    tmp_path: Path, name: str, sticky: bool, tried: int
) -> None:
    """All calls, or `tried` of them, each with one of the errors."""
    rng = seeded()
    place = tmp_path / "place"
    place.mkdir()
    with faults(place) as calls:
        WORKS[name][0](place / "it", [])
    count = len(calls.names)
    assert count > 100
    failed = 0
    for nth in sorted(rng.sample(range(count), min(tried, count))):
        shutil.rmtree(place)
        place.mkdir()
        failed += require_sound(place, name, nth, rng.choice(ERRORS), sticky=sticky)
    assert failed > min(tried, count) // 2  # the number of calls differs a little


@pytest.mark.parametrize(
    "tried", [20, pytest.param(1 << 20, marks=pytest.mark.soak)], ids=["some", "every"]
)
@pytest.mark.parametrize("name", WORKS)
def test_a_look_at_a_name_that_fails_ends_in_an_error_of_the_tree(
    tmp_path: Path, name: str, tried: int
) -> None:
    """`Path.exists` raises a bare error in some releases of Python, and takes a failing disk for a
    missing file in others."""
    rng = seeded()
    place = tmp_path / "place"
    place.mkdir()
    with faults(place) as calls:
        WORKS[name][0](place / "it", [])
    looks = [nth for nth, each in enumerate(calls.names) if each.startswith(_LOOKS)]
    assert looks
    looks = sorted(rng.sample(looks, min(tried, len(looks))))
    failed = 0
    for nth in looks:
        shutil.rmtree(place)
        place.mkdir()
        failed += require_sound(place, name, nth, errno.EIO, sticky=False)
    assert failed > len(looks) // 2


def test_a_refused_lock_file_is_an_error_of_the_tree(tmp_path: Path) -> None:
    """The file is `COMPACTING`, on a full disk that has all other files already."""
    path = tmp_path / "it"
    open_payloads(path, Payloads()).close()
    (path / "COMPACTING").unlink()
    with faults(path) as calls:
        open_payloads(path, Payloads()).close()
    (path / "COMPACTING").unlink()
    nth = calls.names.index("open COMPACTING")
    with faults(path, nth=nth, error=errno.ENOSPC), pytest.raises(OutOfSpaceError):
        open_payloads(path, Payloads())
    open_payloads(path, Payloads()).close()


def test_a_file_that_cannot_be_removed_after_an_ingest_is_named_and_the_rows_are_there(
    tmp_path: Path,
) -> None:
    made = bulk.Import.create(tmp_path / "staged")
    with made.writer() as writer:
        writer.put(b"imported", b"1")
    made.seal()
    with kvstore.open(tmp_path / "it", "memory") as store:
        with faults(tmp_path / "it") as calls:
            bulk.ingest(store, shutil.copytree(made.staging, tmp_path / "copy"))
        nth = max(n for n, name in enumerate(calls.names) if name.startswith("unlink ingest"))
        store.revert_import(made.import_id)
    with kvstore.open(tmp_path / "it2", "memory") as store:
        with (
            faults(tmp_path / "it2", nth=nth, error=errno.EACCES) as calls,
            pytest.raises(StorageError, match="the rows are in the store"),
        ):
            bulk.ingest(store, made.staging)
        assert "part-" in calls.failed[0]
        bulk.ingest(store, made.staging)
        assert store.get(b"imported") == b"1"
