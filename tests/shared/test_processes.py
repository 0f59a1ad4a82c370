"""A shared store in pools, in forked children, in scripts, and behind owners that go."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore.errors import (
    ClosedError,
    ConflictError,
    KVStoreError,
    LockedError,
    NotAStoreError,
    NotListeningError,
    OwnerAwayError,
    UsageError,
)
from kvstore.remote.control_socket import TURN_NAME, dial
from kvstore.remote.presence import read_owner, require_local
from tests.harness.parts import is_resting
from tests.shared.programs import own, put_mine, put_one, until

WORLD = "tests.shared.programs"
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


@contextmanager
def owner_of(path: Path) -> Iterator[Any]:
    """A process that owns the store, with the pipe by which it is told to close."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=own, args=(path, theirs))
    process.start()
    try:
        assert ours.recv() == (process.pid, "owner")
        yield process, ours
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_handle_that_is_sent_to_a_process_joins_there(tmp_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    with kvstore.open(tmp_path / "store", shared=True) as store:
        store.put(b"k", b"v")
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            assert list(pool.map(put_mine, [store] * 4)) == [("guest", b"v")] * 4
        assert store.count(prefix=b"pid/") in (1, 2)


def test_a_pool_inherits_the_handle_by_a_fork(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", shared=True) as store:
        store.put(b"k", b"v")
        found = store.get  # bound before the fork
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            told = b"failed"
            try:
                role, value = put_mine(store)
                told = role.encode() + b" " + value
                store.close()
            finally:
                os.write(writing, told)
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 100) == b"guest v"
        assert store.get(b"pid/%d" % child) == b"1"
        assert found(b"k") == b"v"
        os.close(reading)
        os.close(writing)


def test_a_handle_that_is_not_shared_says_what_can_be_sent(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(UsageError, match=r"shared=True.*follow.*connect"):
                copied(store)
    with kvstore.open(tmp_path / "store", shared=True) as shared:
        assert copy.deepcopy({"store": shared})["store"] is shared
        again = pickle.loads(pickle.dumps(shared))
        assert again is pickle.loads(pickle.dumps(shared))
        assert again.role == "guest"
        again.close()


def test_scripts_come_and_go(tmp_path: Path) -> None:
    run = [sys.executable, "-m", WORLD, str(tmp_path / "store")]
    assert [subprocess.check_output(run) for _ in range(2)] == [b"1\n", b"2\n"]
    with kvstore.open(tmp_path / "store", shared=True) as store:
        assert subprocess.check_output(run) == b"3\n"
        assert store.get(b"runs") == b"3"


def test_many_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    spawn = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(4, mp_context=spawn) as pool:
        roles = list(pool.map(put_one, [path] * 8, range(8)))
    assert "owner" in roles
    with kvstore.open(path) as store:
        assert store.count(prefix=b"one/") == 8


def test_what_a_guest_has_open_when_the_owner_closes(tmp_path: Path) -> None:
    path = tmp_path / "store"
    owner = kvstore.open(path, shared=True)
    with kvstore.open(path, shared=True) as guest:
        guest.put_many([(b"k/%05d" % n, b"v" * 100) for n in range(5000)])
        scan = guest.scan(prefix=b"k/")
        next(scan)
        snapshot = guest.snapshot()
        hold = guest.hold("mine")
        feed = guest.feed("mine too", start=0)
        read = guest.transaction()
        assert read.get(b"k/00001") == b"v" * 100
        read.put(b"moved", b"1")
        bound, table = guest.get, guest.table("t", SCHEMA, key="id")
        table.put({"id": "a", "n": 1})
        changeset = guest.changeset()
        changeset.__enter__()
        guest.put(b"grouped", b"1")
        owner.close()
        with pytest.raises(ClosedError):  # the changeset has ended with its owner
            guest.put(b"grouped", b"2")
        changeset.__exit__(None, None, None)
        guest.delete_range(prefix=b"k/0")
        assert guest.role == "owner"
        assert len(list(scan)) == 4999  # of its own time
        assert snapshot.get(b"k/00001") == b"v" * 100
        assert bound(b"k/00001") is None  # bound before the role changed
        assert hold.timestamp < guest.upper
        assert sum(len(batch.events) for batch in feed.batches()) > 5000
        with pytest.raises(ConflictError):
            read.commit()  # what it read was deleted
        assert table.get("a") == {"id": "a", "n": 1}
        table.put({"id": "b", "n": 2})
        assert guest.table("t").count() == 2
        snapshot.close()
        hold.release()
        assert guest.stats()["takeovers"] == 1


def test_a_killed_owner_is_followed_and_no_write_is_lost_or_done_twice(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with owner_of(path) as (process, _), kvstore.open(path, shared=True) as guest:
        assert guest.role == "guest"
        assert [guest.increment(b"n") for _ in range(3)] == [1, 2, 3]
        process.kill()
        process.join()
        assert guest.get(b"n") == b"3"  # reads need no owner
        assert guest.increment(b"n") == 4
        assert guest.role == "owner"
        assert (path / "control" / "socket").is_socket()
        assert guest.stats()["owner_pid"] == os.getpid()


@pytest.mark.parametrize("way", ["close", "kill"])
def test_the_end_of_an_owner_wakes_the_guests_that_wait_for_it(tmp_path: Path, way: str) -> None:
    path = tmp_path / "store"
    with owner_of(path) as (process, pipe), dial(path, 60, TURN_NAME) as turn:
        pipe.send("close") if way == "close" else process.kill()
        with suppress(ConnectionResetError):
            assert turn.recv(1) == b""
        with kvstore.open(path):  # the lock was free before
            pass


def test_a_write_that_a_stopped_owner_keeps_is_done_once_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with owner_of(path) as (process, _):
        with kvstore.open(path, shared=True, patience=0.3) as hasty:
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(OwnerAwayError, match=f"process {process.pid} is stopped") as told:
                hasty.put(b"hasty", b"1")
            assert told.value.pid == process.pid
            assert f"kill -CONT {process.pid}" in str(told.value)
            assert hasty.get(b"k") == b"v"  # reads go on
            with pytest.raises(KVStoreError, match=f"{process.pid}"):
                kvstore.open(path, shared=True, patience=0.3)
        os.kill(process.pid, signal.SIGCONT)
        with kvstore.open(path, shared=True) as guest:
            until(lambda: guest.get(b"hasty") == b"1")  # its request was on the way
            assert guest.role == "guest"


def test_a_guest_that_nobody_reads_rests_and_its_next_read_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with kvstore.open(path, shared=True) as owner, kvstore.open(path, shared=True) as guest:
        reads = [
            guest.get,
            lambda key: guest.get_many([key])[0],
            lambda key: dict(guest.scan())[key],
        ]
        for number, read in enumerate(reads):
            until(lambda: is_resting(guest))
            owner.put(b"k", b"%d" % number)
            assert read(b"k") == b"%d" % number
        owner.put(b"k", b"seen")
        until(lambda: guest.get(b"k") == b"seen")  # it follows again while it is read
        assert guest.positions is not None
        until(lambda: not is_resting(guest))


def test_tables_and_transactions_of_a_guest_read_the_files(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with owner_of(path) as (process, _), kvstore.open(path, shared=True) as guest:
        table = guest.table("t", SCHEMA, key="id", indexes={"by_n": ["n"]})
        first = table.put({"id": "a", "n": 1})
        table.put({"id": "b", "n": 2})
        os.kill(process.pid, signal.SIGSTOP)
        assert table.get("a") == {"id": "a", "n": 1}
        assert table.get_many(["b", "none"]) == [{"id": "b", "n": 2}, None]
        assert list(table.find("by_n", 2)) == [{"id": "b", "n": 2}]
        assert table.scan(columns=["n"]).read_all()["n"].to_pylist() == [1, 2]
        assert table.count() == len(table) == 2
        assert table.count(as_of=first) == 1
        assert [version.row for version in table.history("a")] == [{"id": "a", "n": 1}]
        assert table.changes(first).read_all().num_rows == 1
        assert table.codec().definition.name == "t"
        read = guest.transaction()
        assert read.get(b"k") == b"v"
        assert read.get_many([b"k", b"none"]) == [b"v", None]
        assert list(read.scan()) == [(b"k", b"v")]
        read.put(b"k", b"w")
        os.kill(process.pid, signal.SIGCONT)
        read.commit()
        assert guest.get(b"k") == b"w"
        process.kill()
        process.join()
        table.put({"id": "a", "n": 3})
        assert guest.role == "owner"
        assert table.get("a") == {"id": "a", "n": 3}
        assert [row["id"] for row in table.find("by_n", 3)] == ["a"]


def test_an_owner_that_answers_no_guests_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with kvstore.open(path), pytest.raises(LockedError, match="shared=True"):
        kvstore.open(path, shared=True, patience=0.05)
    with kvstore.open(path, control=True), kvstore.open(path, shared=True) as guest:
        guest.put(b"k", b"v")
        assert guest.role == "guest"


def test_a_guest_by_choice_never_owns(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with pytest.raises(NotAStoreError):
        kvstore.open(path, shared=True, role="guest")
    owner = kvstore.open(path, shared=True)
    with kvstore.open(path, shared=True, role="guest", patience=0.05) as guest:
        owner.put(b"k", b"v")
        owner.close()
        guest.refresh()
        assert guest.get(b"k") == b"v"
        with pytest.raises(NotListeningError):
            guest.put(b"k", b"w")
        with kvstore.open(path, shared=True):
            guest.put(b"k", b"w")
        assert guest.role == "guest"


def test_a_keeper_owns_for_its_guests_and_goes_with_them(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with kvstore.open(path, shared=True, role="keeper", patience=60) as store:
        assert store.role == "guest"
        store.put(b"k", b"v")
        keeper = read_owner(path)
        assert keeper is not None
        assert keeper.pid != os.getpid()
        os.kill(keeper.pid, signal.SIGKILL)
        store.put(b"k", b"w")  # by the next keeper
        keeper = read_owner(path)
        assert keeper is not None
    until(lambda: not keeper.is_there)
    with kvstore.open(path) as store:
        assert store.get(b"k") == b"w"


ORPHAN = """
import os, sys, kvstore
store = kvstore.open(sys.argv[1], shared=True, patience=60)
store.put(b"k", b"parent")
reading, writing = os.pipe()
if os.fork():
    os._exit(0)
os.close(writing)
os.read(reading, 1)  # it ends with the parent
store.put(b"k", b"orphan")
print(store.role, store.get(b"k").decode())
"""


@pytest.mark.soak
def test_forked_children_that_their_owner_left_have_a_keeper(tmp_path: Path) -> None:
    run = [sys.executable, "-c", ORPHAN, tmp_path / "store"]
    assert subprocess.check_output(run, text=True) == "guest orphan\n"
    keeper = read_owner(tmp_path / "store")
    assert keeper is not None
    until(lambda: not keeper.is_there)


def test_what_cannot_be_shared_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="path"):
        kvstore.open(None, shared=True)
    with pytest.raises(UsageError, match="engine"):
        kvstore.open(tmp_path / "store", "memory", shared=True)
    with pytest.raises(UsageError, match="shared=True"):
        kvstore.open(tmp_path / "store", role="guest")
    kvstore.open(tmp_path / "memory", "memory").close()
    with pytest.raises(UsageError, match="in memory"):
        kvstore.open(tmp_path / "memory", shared=True)
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n40 22 0:44 / {tmp_path}/net rw - nfs4 host:/ rw\n"
    )
    require_local(tmp_path / "store", mounts)
    with pytest.raises(UsageError, match="nfs4"):
        require_local(tmp_path / "net" / "store", mounts)


def test_a_path_that_is_long_can_be_shared(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 50) / "store"
    with kvstore.open(path, shared=True), kvstore.open(path, shared=True) as guest:
        guest.put(b"k", b"v")
        assert guest.get(b"k") == b"v"
