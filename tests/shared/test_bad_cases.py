"""What goes wrong beside a shared store: directories that vanish, other users, other releases, full
disks, clocks that step, sockets that were left behind, and a hundred guests at once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import (
    KVStoreError,
    NotAStoreError,
    OtherReleaseError,
    OutOfSpaceError,
)
from kvstore.remote.presence import guests
from tests.harness.full_disk import fill, small_disk
from tests.shared.programs import come, member_of

HOUR_NS = 3600 * 10**9
GUESTS, EACH = 100, 5


@pytest.mark.damages_store
@pytest.mark.usefixtures("spawn")
def test_a_directory_that_vanishes_is_told(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ExitStack() as members:
        owner = members.enter_context(member_of(path))
        guest = members.enter_context(member_of(path, patience=0.2))
        guest.ask("put", b"k", b"v")
        assert guest.ask("get", b"k") == b"v"
        shutil.rmtree(path)
        assert isinstance(guest.ask("refresh"), NotAStoreError)
        assert isinstance(guest.ask("get", b"k"), NotAStoreError)
        owner.kill()
        assert isinstance(guest.ask("put", b"k", b"w"), NotAStoreError)
        assert not path.exists()
        with member_of(path) as another:  # a new store at the place
            assert another.ask("role") == "owner"
            assert another.ask("get", b"k") is None


@pytest.mark.skipif(os.getuid() != 0, reason="root alone becomes another user")
def test_a_process_of_another_user_is_refused() -> None:
    with (
        tempfile.TemporaryDirectory() as place,
        kvstore.open(f"{place}/store", shared=True) as owner,
    ):
        os.chmod(place, 0o755)
        path = Path(place, "store")
        with kvstore.open(path, shared=True) as guest:  # all modules are imported behind it
            guest.put(b"k", b"v")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            told = b"nothing"
            try:
                os.setgid(65534)
                os.setuid(65534)
                kvstore.open(path, shared=True, patience=0.1)
            except KVStoreError as error:
                told = type(error).__name__.encode()
            finally:
                os.write(writing, told)
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 100) == b"AccessDeniedError"
        os.close(reading)
        os.close(writing)
        owner.put(b"k", b"w")


@pytest.mark.usefixtures("spawn")
def test_a_socket_that_was_left_behind_is_no_owner(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with member_of(path) as killed:
        killed.ask("put", b"k", b"v")
        killed.kill()
    assert (path / "control" / "socket").is_socket()
    with member_of(path) as next_owner:
        assert next_owner.ask("role") == "owner"
        assert next_owner.ask("get", b"k") == b"v"


def test_a_socket_of_something_else_is_no_owner(tmp_path: Path) -> None:
    path = tmp_path / "store"
    kvstore.open(path).close()
    (path / "control").mkdir()
    with socket.socket(socket.AF_UNIX) as left, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path / "control")
        left.bind("socket")
    with kvstore.open(path, shared=True) as store:
        assert store.role == "owner"


@pytest.mark.usefixtures("spawn")
def test_releases_that_share_by_different_rules_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with member_of(path) as owner, kvstore.open(path, shared=True) as guest:
        guest.put(b"k", b"v")
        with (
            pytest.raises(OtherReleaseError, match="start them with the newer") as told,
            member_of(path, rules=9),
        ):
            pass
        assert told.value.pid == owner.process.pid
        owner.kill()
        with member_of(path, rules=9) as newer:
            assert newer.ask("role") == "owner"
            assert newer.ask("put", b"k", b"9") > 0
            with pytest.raises(OtherReleaseError, match=f"process {newer.process.pid} owns"):
                guest.put(b"k", b"w")
            guest.refresh()
            assert guest.get(b"k") == b"9"  # the files can be read
        guest.put(b"k", b"w")  # nobody owns the store any more
        assert guest.role == "owner"


def test_a_disk_that_is_full_at_the_take_over_leaves_the_guest_one(
    tmp_path: Path, spawn: Any
) -> None:
    with small_disk(tmp_path / "disk", 24 << 20) as disk:
        path = disk / "store"
        with member_of(path) as owner, kvstore.open(path, shared=True, patience=0.2) as guest:
            guest.put(b"k", b"v")
            ballast = fill(disk)
            owner.kill()
            with pytest.raises(OutOfSpaceError):
                guest.put(b"k", b"w")
            assert guest.role == "guest"
            assert guest.get(b"k") == b"v"
            ballast.unlink()
            guest.put(b"k", b"w")
            assert guest.role == "owner"
            assert guest.get(b"k") == b"w"


def test_a_hundred_guests_come_at_once(tmp_path: Path, spawn: Any) -> None:
    path = tmp_path / "store"
    with kvstore.open(path, shared=True) as owner:
        gate = spawn.Event()
        processes = [
            spawn.Process(target=come, args=(path, range(first, first + EACH), gate))
            for first in range(0, GUESTS, EACH)
        ]
        for process in processes:
            process.start()
        gate.set()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert owner.count(prefix=b"came/") == GUESTS
        assert guests(path) == []


@pytest.mark.parametrize("stepping", ["owner", "guest", "both"])
@pytest.mark.usefixtures("spawn")
def test_clocks_that_step_back_and_forward_order_nothing_anew(
    tmp_path: Path, stepping: str
) -> None:
    path = tmp_path / "store"
    clock = multiprocessing.get_context("forkserver").Value("q", 0)
    steady = multiprocessing.get_context("forkserver").Value("q", 0)
    clocks = {role: clock if stepping in (role, "both") else steady for role in ("owner", "guest")}
    with (
        member_of(path, clock=clocks["owner"]) as owner,
        member_of(path, clock=clocks["guest"]) as guest,
    ):
        number, last, members = 0, 0, [owner, guest]
        for step in (0, -HOUR_NS, 2 * HOUR_NS, -5 * HOUR_NS):
            clock.value = step
            for writer in members:
                number += 1
                at = writer.ask("put", b"k", b"%d" % number)
                assert at > last
                last = at
                assert writer.ask("get", b"k") == b"%d" % number
                for reader in members:
                    assert reader.ask("refresh") > last
                    assert reader.ask("get", b"k") == b"%d" % number
                    assert reader.ask("get", b"k", as_of=at) == b"%d" % number
                    assert reader.ask("now") >= at
        owner.kill()
        clock.value -= HOUR_NS
        assert guest.ask("put", b"k", b"after") > last
        assert guest.ask("role") == "owner"
        assert guest.ask("get", b"k", as_of=last) == b"%d" % number
        assert guest.ask("stats").count("'takeovers': 1") == 1
