"""ZODB's own tests of storages, and of what they see in a store."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import transaction
import ZODB
from persistent.mapping import PersistentMapping
from persistent.TimeStamp import TimeStamp
from ZODB.Connection import TransactionMetaData
from ZODB.FileStorage import FileStorage
from ZODB.FileStorage.fspack import PackError
from ZODB.POSException import POSKeyError, UndoError
from ZODB.serialize import referencesf
from ZODB.tests import (
    BasicStorage,
    ConflictResolution,
    HistoryStorage,
    IteratorStorage,
    MTStorage,
    PackableStorage,
    PersistentStorage,
    ReadOnlyStorage,
    RecoveryStorage,
    RevisionStorage,
    StorageTestBase,
    Synchronization,
    TransactionalUndoStorage,
    testMVCCMappingStorage,
)
from ZODB.tests.MinPO import MinPO
from ZODB.tests.StorageTestBase import zodb_pickle
from ZODB.utils import maxtid, z64

import kvstore
from kvstore.adapters.zodb import ZODBStorage
from kvstore.errors import UsageError


class TestStorage(
    StorageTestBase.StorageTestBase,
    BasicStorage.BasicStorage,
    TransactionalUndoStorage.TransactionalUndoStorage,
    RevisionStorage.RevisionStorage,
    PackableStorage.PackableStorageWithOptionalGC,
    PackableStorage.PackableUndoStorage,
    Synchronization.SynchronizedStorage,
    ConflictResolution.ConflictResolvingStorage,
    ConflictResolution.ConflictResolvingTransUndoStorage,
    HistoryStorage.HistoryStorage,
    IteratorStorage.IteratorStorage,
    IteratorStorage.ExtendedIteratorStorage,
    PersistentStorage.PersistentStorage,
    MTStorage.MTStorage,
    ReadOnlyStorage.ReadOnlyStorage,
    testMVCCMappingStorage.MVCCTests,
):
    """All mixins by which ZODB tests its FileStorage, but those of blobs and of its files."""

    use_extension_bytes = True

    def setUp(self) -> None:
        super().setUp()
        self.open()

    def open(self, **options: Any) -> None:
        self._storage = ZODBStorage("store", **options)  # in the directory of the test


class TestCopies(StorageTestBase.StorageTestBase, RecoveryStorage.RecoveryStorage):
    """Storages copied to one another, by `copyTransactionsFrom`."""

    def setUp(self) -> None:
        super().setUp()
        self._storage = ZODBStorage("source")
        self._dst = ZODBStorage("target")

    def tearDown(self) -> None:
        self._dst.close()
        super().tearDown()

    def new_dest(self) -> ZODBStorage:
        return ZODBStorage("another")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_the_past_is_a_connection_at_a_time(place: Path) -> None:
    db = ZODB.DB(ZODBStorage(place))
    with db.transaction() as connection:
        connection.root()["trip"] = PersistentMapping({"gate": "A1"})
    between = datetime.now(timezone.utc).replace(tzinfo=None)  # as ZODB takes times
    with db.transaction() as connection:
        connection.root()["trip"]["gate"] = "B7"
    past = db.open(at=between)
    assert past.root()["trip"]["gate"] == "A1"
    past.close()
    with db.transaction() as connection:
        assert connection.root()["trip"]["gate"] == "B7"
    db.close()


def test_one_process_has_a_storage_and_others_read_what_was_there(place: Path) -> None:
    storage = ZODBStorage(place)
    db = ZODB.DB(storage)
    with db.transaction() as connection:
        connection.root()["n"] = 1
    code = "import sys; from kvstore.adapters.zodb import ZODBStorage as S; S(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, check=False)
    assert b"LockedError" in done.stderr
    reader = ZODB.DB(ZODBStorage(place, read_only=True))
    with db.transaction() as connection:
        connection.root()["n"] = 2
    with reader.transaction() as connection:
        assert connection.root()["n"] == 1
    reader.close()
    db.close()


def test_only_a_store_of_this_process_is_taken() -> None:
    with pytest.raises(UsageError, match="int is no store of this process"):
        ZODBStorage(1)  # type: ignore[arg-type]


def test_a_store_that_was_passed_stays_open_and_keeps_its_other_keys(place: Path) -> None:
    with kvstore.open(place) as store:
        store.put(b"mine", b"1")
        db = ZODB.DB(ZODBStorage(store))
        with db.transaction() as connection:
            connection.root()["n"] = 1
        db.pack()
        db.close()
        assert store.get(b"mine") == b"1"
        assert store.verify().problems == ()


def test_history_that_the_store_has_collected_by_itself_is_gone_and_no_more(place: Path) -> None:
    with kvstore.open(place) as store:
        storage = ZODBStorage(store)
        db = ZODB.DB(storage)
        for number in range(5):
            with db.transaction() as connection:
                connection.root()["n"] = number
        ids = [found["id"] for found in storage.undoLog()]
        store.gc(before=store.upper - 1)  # as `keep=` does
        assert [len(list(found)) for found in storage.iterator()] == [1]
        db.undo(ids[1])
        with pytest.raises(UndoError):
            transaction.commit()
        transaction.abort()
        with db.transaction() as connection:
            assert connection.root()["n"] == 4
            connection.root()["n"] = 5
        db.undo(storage.undoLog()[0]["id"])
        transaction.commit()
        with db.transaction() as connection:
            assert connection.root()["n"] == 4
        db.close()


def test_the_numbers_of_objects_are_not_given_twice(place: Path) -> None:
    """The newest object is garbage, a pack removes it, and the storage is opened again."""
    storage = ZODBStorage(place)
    db = ZODB.DB(storage)
    with db.transaction() as connection:
        connection.root()["gone"] = PersistentMapping()
    oid = max(record.oid for each in storage.iterator() for record in each)
    assert oid > z64
    with db.transaction() as connection:
        del connection.root()["gone"]
    db.pack()
    assert len(db.storage) == 1
    db.close()
    storage = ZODBStorage(place)
    assert storage.new_oid() > oid
    storage.close()


def test_a_pack_below_a_hold_leaves_what_others_leave(place: Path) -> None:
    """A backup keeps the history of the store. The storage shows none that was packed."""
    with kvstore.open(place) as store:
        storage = ZODBStorage(store)
        db = ZODB.DB(storage)
        store.hold("a backup")
        tids, times = [], []
        for number in range(4):
            with db.transaction() as connection:
                connection.root()["n"] = number
            tids.append(storage.lastTransaction())
            times.append(store.upper - 1)
        storage.pack(TimeStamp(tids[2]).timeTime() + 1e-6, referencesf)
        assert store.since < times[0]
        assert storage.loadBefore(z64, tids[2]) is None
        assert storage.loadBefore(z64, tids[3])[1:] == (tids[2], tids[3])
        with pytest.raises(POSKeyError):
            storage.loadSerial(z64, tids[1])
        assert [each["id"] for each in storage.undoLog()] == [tids[3]]
        assert [each.tid for each in storage.iterator()] == tids[2:]
        db.close()


WRITER = """
import sys, ZODB
from kvstore.adapters.zodb import ZODBStorage
db = ZODB.DB(ZODBStorage(sys.argv[1]))
for number in range(100000):
    with db.transaction() as connection:
        connection.root()["n"] = connection.root()["twice"] = number
    print(number, flush=True)
"""


def test_a_process_that_is_killed_loses_no_transaction_and_tears_none(place: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(30)]
        writer.kill()
        told += map(int, writer.stdout.read().split())
    db = ZODB.DB(ZODBStorage(place))
    with db.transaction() as connection:
        assert connection.root()["n"] == connection.root()["twice"] >= told[-1]
    db.close()


def test_packs_bound_the_bytes_of_an_object_that_changes(place: Path) -> None:
    with kvstore.open(place, durability="async") as store:
        db = ZODB.DB(ZODBStorage(store))
        sizes = []
        for _ in range(4):
            for number in range(200):
                with db.transaction() as connection:
                    connection.root()["text"] = random.Random(number).randbytes(10_000)
            db.pack()
            store.gc(before=store.upper - 1, compact=True)
            sizes.append(sum(store.stats()[f"{f}_bytes"] for f in ("data", "changes")))
        assert max(sizes) < 200_000  # 2 MB were written between two packs
        db.close()


def test_random_histories_are_those_of_a_file_storage(tmp_path: Path) -> None:
    """Stores, undos and packs of the same transactions: each state, what can be undone, and the
    transactions that are left are those of ZODB's own storage. Some packs behind undos fail there,
    in an assertion or by a `PackError`: a history ends before them."""
    compared = Counter[str]()
    for seed in range(25):
        place = tmp_path / str(seed)
        place.mkdir()
        compared.update(compared_history(place, random.Random(seed)))
    assert min(compared[kind] for kind in ("store", "undone", "refused", "pack", "reopen")) > 10


def compared_history(tmp_path: Path, draw: random.Random) -> Iterator[str]:
    """One history of both storages. Yields what was done and found to be alike."""
    theirs = FileStorage(str(tmp_path / "theirs.fs"))
    ours = ZODBStorage(tmp_path / "ours")
    oids = [ours.new_oid() for _ in range(4)]
    tids: list[bytes] = []
    packed = z64
    for number in range(30):
        tid = TimeStamp(2026, 1, 1, 0, 0, number).raw()
        kind = draw.choices(("store", "undo", "pack", "reopen"), (12, 5, 1, 1))[0]
        if kind == "store":
            chosen = {oid: zodb_pickle(MinPO(draw.randrange(9))) for oid in draw.sample(oids, 2)}
            for storage in (theirs, ours):
                txn = TransactionMetaData("user", f"n{number}", {"n": number})
                storage.tpc_begin(txn, tid)
                for oid, data in chosen.items():
                    storage.restore(oid, tid, data, "", None, txn)
                storage.tpc_vote(txn)
                storage.tpc_finish(txn)
            tids.append(tid)
        elif kind == "undo":
            # A pack that finds nothing to remove ends no undo there.
            logs = [storage.undoLog(0, 99) for storage in (theirs, ours)]
            logs[0] = [log for log in logs[0] if log["time"] > TimeStamp(packed).timeTime()]
            told = [[(log["description"], log["time"]) for log in each] for each in logs]
            assert told[0] == told[1]
            if not logs[0]:
                continue
            nth, outcomes = draw.randrange(min(len(logs[0]), 4)), []
            for storage, log in zip((theirs, ours), logs, strict=True):
                txn = TransactionMetaData("user", f"undo {number}")
                storage.tpc_begin(txn, tid)
                try:
                    storage.undo(log[nth]["id"], txn)
                except UndoError:
                    storage.tpc_abort(txn)
                    outcomes.append(False)
                else:
                    storage.tpc_vote(txn)
                    storage.tpc_finish(txn)
                    outcomes.append(True)
            assert outcomes[0] == outcomes[1]
            tids += [tid] * outcomes[0]
            kind = "undone" if outcomes[0] else "refused"
        elif kind == "pack":
            packed = max(packed, draw.choice(tids or [z64]))
            at = TimeStamp(packed).timeTime() + 0.5
            try:
                theirs.pack(at, referencesf, gc=False)
            except (PackError, AssertionError):
                break
            ours.pack(at, referencesf, gc=False)
        elif kind == "reopen":
            ours.close()
            ours = ZODBStorage(tmp_path / "ours")
        check_alike(theirs, ours, oids, tids, packed)
        yield kind
    theirs.close()
    ours.close()


def check_alike(
    theirs: Any, ours: Any, oids: list[bytes], tids: list[bytes], packed: bytes
) -> None:
    for oid in oids:
        for tid in [*tids, maxtid]:
            assert answer(ours, oid, tid) == answer(theirs, oid, tid), (oid, tid)
    assert ours.lastTransaction() == theirs.lastTransaction()
    told = [
        [
            (each.tid, each.user, each.description, each.extension, sorted(records))
            for each in storage.iterator()
            if (
                records := [
                    (record.oid, record.data or b"")
                    for record in each
                    if record.data or each.tid > packed
                ]
            )
        ]
        for storage in (ours, theirs)
    ]
    assert told[0] == told[1]


def answer(storage: Any, oid: bytes, tid: bytes) -> Any:
    try:
        return storage.loadBefore(oid, tid)
    except POSKeyError:
        return None
