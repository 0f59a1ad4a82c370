"""The control socket: its access rights, its place, and its removal."""

from __future__ import annotations

import os
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import (
    DeterminateError,
    ForkedError,
    KVStoreError,
    LockedError,
    NotFoundError,
    NotListeningError,
    UsageError,
)
from kvstore.remote import control_socket
from tests.control.owners import Owner, owning
from tests.harness.forks import STATUS, reap
from tests.harness.seeds import seeded

pytestmark = pytest.mark.usefixtures("each_engine")


def test_a_store_is_reached_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvstore.open(tmp_path / "store", control=True) as store:
        monkeypatch.chdir(tmp_path)
        with kvstore.connect("store") as client:
            monkeypatch.chdir("/")
            at = client.put(b"k", b"v")
            assert store.get(b"k", as_of=at) == client.get(b"k") == b"v"
            assert client.path == tmp_path / "store"


def test_only_its_owner_reaches_the_socket(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with kvstore.open(tmp_path / "store", control=True):
            place = tmp_path / "store" / "control"
            assert stat.S_IMODE(place.stat().st_mode) == 0o700
            assert stat.S_IMODE((place / "socket").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_directory_that_was_open_to_others_is_closed(tmp_path: Path) -> None:
    place = tmp_path / "store" / "control"
    kvstore.open(tmp_path / "store").close()
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    with kvstore.open(tmp_path / "store", control=True):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.parametrize("length", [60, 100, 140, 240])
def test_a_path_may_be_longer_than_an_address_of_a_socket(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("d" * length) / "store"
    path.parent.mkdir()
    with kvstore.open(path, control=True) as store, kvstore.connect(path) as client:
        client.put(b"k", b"v")
        assert store.get(b"k") == b"v"


def test_a_store_that_does_not_listen_has_no_thread_and_no_socket(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store"):
        assert not [each for each in threading.enumerate() if each.name == "kvstore-control"]
        assert not (tmp_path / "store" / "control").exists()
        with pytest.raises(NotListeningError, match="control=True"):
            kvstore.connect(tmp_path / "store")


def test_a_closed_store_leaves_no_socket(tmp_path: Path) -> None:
    store = kvstore.open(tmp_path / "store", control=True)
    client = kvstore.connect(tmp_path / "store", patience=0)
    store.close()
    store.close()
    assert not list((tmp_path / "store" / "control").iterdir())
    with pytest.raises(KVStoreError):
        client.put(b"k", b"v")
    with pytest.raises(NotListeningError):
        kvstore.connect(tmp_path / "store")


def test_an_owner_that_was_killed_leaves_a_socket_that_traps_nobody(
    tmp_path: Path, spawn: Any, each_engine: str
) -> None:
    path = tmp_path / "store"
    with owning(spawn, path, each_engine) as owner:
        with kvstore.connect(path) as client:
            assert client.put(b"k", b"v", durability="sync") > 0
        with pytest.raises(LockedError, match=r"shared=True.*connect\(path\).*follow.*open_read"):
            kvstore.open(path, each_engine)
        owner.kill()
    assert (path / "control" / "socket").exists()
    with pytest.raises(NotListeningError):
        kvstore.connect(path)
    (path / "control" / "new-0").touch()  # an owner was killed while it made a socket
    with kvstore.open(path, control=True), kvstore.connect(path) as client:
        assert client.get(b"k") == b"v"
        assert os.listdir(path / "control") == ["socket"]


def test_a_second_owner_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", control=True):
        with pytest.raises(LockedError, match="use the Store that has it open"):
            kvstore.open(tmp_path / "store", control=True)
        with kvstore.connect(tmp_path / "store") as client:
            assert client.get(b"k") is None


def test_a_client_goes_over_to_the_next_owner(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", control=True):
        client = kvstore.connect(tmp_path / "store")
        client.put(b"k", b"v")
    with client, kvstore.open(tmp_path / "store", control=True):
        assert client.get(b"k") == b"v"


def test_clients_wait_for_an_owner_that_is_started_anew(
    tmp_path: Path, spawn: Any, each_engine: str
) -> None:
    """Owners are closed and killed in turn. Clients that were there before, and clients that come
    while nobody listens, find the next owner; each call is done once."""
    path, rng = tmp_path / "store", seeded()
    kvstore.open(path).close()
    done = [0] * 3

    def call(place: int, client: kvstore.Client) -> None:
        while not is_over.is_set():
            client.increment(b"%d" % place)
            done[place] += 1
            assert client.get(b"%d" % place) == b"%d" % done[place]

    def first_call() -> kvstore.Client:
        """A client that comes before its owner."""
        return kvstore.connect(path, patience=60)

    is_over = threading.Event()
    with ThreadPoolExecutor(len(done)) as threads:
        connected = [threads.submit(first_call) for _ in done]
        owner = Owner(spawn, path, each_engine, None)
        clients = [each.result() for each in connected]
        calls = [threads.submit(call, place, each) for place, each in enumerate(clients)]
        try:
            for end in [*rng.sample([Owner.kill, Owner.stop], 2), Owner.kill]:
                before = list(done)
                while any(each == now for each, now in zip(before, done, strict=True)):
                    assert not any(each.done() for each in calls)
                    wait(calls, timeout=0.01)
                end(owner)
                owner = Owner(spawn, path, each_engine, None)
        finally:
            is_over.set()
        for each in calls:
            each.result()
        assert [int(clients[0].get(b"%d" % place) or 0) for place in range(len(done))] == done
        owner.stop()


def test_a_path_with_nothing_is_told_at_once_and_may_be_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "missing.db"
    with pytest.raises(NotFoundError, match=r"no store and no socket is at .*missing.db"):
        kvstore.connect(path)
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(kvstore.connect, path, patience=60)
        with kvstore.open(path, control=True) as store, coming.result() as client:
            client.put(b"k", b"v")
            assert store.get(b"k") == b"v"


def test_a_store_without_a_path_cannot_listen() -> None:
    with pytest.raises(UsageError, match="no place for a socket"):
        kvstore.open(None, engine="memory", control=True)


def test_a_store_that_cannot_listen_is_closed_again(tmp_path: Path) -> None:
    kvstore.open(tmp_path / "store").close()
    (tmp_path / "store" / "control").touch()
    with pytest.raises(UsageError, match="no socket can be made"):
        kvstore.open(tmp_path / "store", control=True)
    kvstore.open(tmp_path / "store").close()


def test_an_owner_that_was_stopped_is_told(
    tmp_path: Path, spawn: Any, each_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    with owning(spawn, path, each_engine) as owner:
        os.kill(owner.pid, signal.SIGSTOP)
        waiting = []

        def dial_on() -> None:
            while True:  # the kernel accepts some connections before it makes the next one wait
                waiting.append(control_socket.dial(path, 0.05))

        try:
            with pytest.raises(DeterminateError, match="was its process stopped"):
                dial_on()
        finally:
            for connection in waiting:
                connection.close()
            os.kill(owner.pid, signal.SIGCONT)
        with kvstore.connect(path) as client:
            assert client.get(b"k") is None


def test_a_child_neither_answers_nor_keeps_callers_waiting(tmp_path: Path) -> None:
    """The parent closes its store while its child stays alive: callers see the end at once."""
    near, far = os.pipe()
    store = kvstore.open(tmp_path / "store", control=True)
    client = kvstore.connect(tmp_path / "store", patience=0)
    client.put(b"k", b"v")
    child = os.fork()
    if child == 0:
        os.close(far)
        try:
            store.get(b"k")
        except ForkedError:
            store.close()
            os.read(near, 1)
            os._exit(STATUS)
        os._exit(1)
    assert client.put(b"k", b"w") > 0
    store.close()
    with pytest.raises(KVStoreError):
        client.get(b"k")
    with pytest.raises(NotListeningError):
        kvstore.connect(tmp_path / "store")
    with kvstore.open(tmp_path / "store", control=True), kvstore.connect(tmp_path / "store") as new:
        assert new.get(b"k") == b"w"
    os.close(far)
    assert reap(child) == STATUS


def test_callers_of_a_killed_owner_see_the_end_although_its_child_lives(
    tmp_path: Path, spawn: Any, each_engine: str
) -> None:
    path = tmp_path / "store"
    with owning(spawn, path, each_engine) as owner:
        client = kvstore.connect(path, patience=0, timeout=10)
        assert client.get(b"k") is None  # its connection stays open
        child = owner.fork()
        try:
            owner.kill()
            with pytest.raises(KVStoreError):
                client.get(b"k")
            with pytest.raises(NotListeningError):
                kvstore.connect(path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_hundred_scripts_leave_nothing(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", control=True) as store:

        def call() -> None:
            with kvstore.connect(tmp_path / "store") as client:
                client.put(b"k", b"v")

        call()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            call()
        with kvstore.connect(tmp_path / "store") as client:
            client.get(b"k")  # by now the server has seen the others go
            assert len(os.listdir("/proc/self/fd")) <= before + 8
        assert store.get(b"k") == b"v"
