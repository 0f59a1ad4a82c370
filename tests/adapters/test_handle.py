"""An adapter's way to its store: by path, by URL, in several processes, after a fork, unpickled."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import LockedError, UsageError
from kvstore.remote.handle import Handle
from kvstore.server import ListenAddress, Token, app, serving

PUT = """
import sys
from kvstore.remote.handle import Handle
handle = Handle(sys.argv[1])
handle.store.put(b"theirs", b"1")
print(handle.store.get(b"ours"))
"""


def test_two_processes_use_one_path(tmp_path: Path) -> None:
    handle = Handle(tmp_path / "s")
    handle.store.put(b"ours", b"1")
    command = [sys.executable, "-c", PUT, str(tmp_path / "s")]
    assert subprocess.check_output(command, text=True) == "b'1'\n"
    assert handle.store.get(b"theirs") == b"1"
    handle.close()
    assert subprocess.check_output(command, text=True) == "b'1'\n"  # now it owns the path


def test_a_handle_carries_on_when_the_owner_of_its_path_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PUT + "print(flush=True)\nsys.stdin.read()", tmp_path / "s"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "None\n"
        owner.stdout.readline()
        handle = Handle(tmp_path / "s")
        handle.store.put(b"ours", b"1")
        owner.kill()
        owner.wait()
        handle.store.put(b"ours", b"2")
        assert handle.store.get(b"ours") == b"2"
        assert handle.store.get(b"theirs") == b"1"
    handle.close()


def test_a_forked_child_reaches_the_store_through_its_parent(tmp_path: Path) -> None:
    handle = Handle(tmp_path / "s")
    handle.store.put(b"parent", b"1")

    def work() -> None:
        assert handle.store.get(b"parent") == b"1"
        handle.store.put(b"child", b"1")

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert handle.store.get(b"child") == b"1"
    handle.close()


def test_handles_of_one_path_share_a_store_until_the_last_one_goes(tmp_path: Path) -> None:
    first, second = Handle(tmp_path / "s"), Handle(os.path.relpath(tmp_path / "s"))
    assert first == second
    assert first.store is second.store
    first.close()
    assert second.store.put(b"k", b"v") < second.store.now()
    with pytest.raises(LockedError):
        kvstore.open(tmp_path / "s")
    second.close()
    gc.collect()
    with kvstore.open(tmp_path / "s") as store:
        assert store.get(b"k") == b"v"


def test_a_read_only_handle_owns_nothing(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"k", b"v")
        reader = Handle(tmp_path / "s", read_only=True)
        assert reader.store.get(b"k") == b"v"
        with pytest.raises(UsageError):
            reader.store.put(b"k", b"w")
    with kvstore.open(tmp_path / "m", engine="memory", control=True) as store:
        store.put(b"k", b"v")
        assert Handle(tmp_path / "m", read_only=True).store.get(b"k") == b"v"


def test_a_handle_of_an_address_pickles_and_one_of_an_open_store_does_not(
    store: kvstore.Store, tmp_path: Path
) -> None:
    handle = Handle(tmp_path / "other")
    for copied in (pickle.loads(pickle.dumps(handle)), copy.deepcopy(handle)):
        assert copied == handle
        assert hash(copied) == hash(handle)
        assert copied.store is handle.store
    given = Handle(store)
    assert given.store is store
    assert given != handle
    given.close()
    assert given.store.get(b"k") is None  # what the user opened stays open
    with pytest.raises(UsageError, match="belongs to this process"):
        pickle.dumps(given)
    for wrong in (7, None, b"path"):
        with pytest.raises(UsageError, match="is no store"):
            Handle(wrong)  # type: ignore[arg-type]  # refused


def test_a_url_and_a_socket_reach_a_server(store: kvstore.Store, tmp_path: Path) -> None:
    store.put(b"k", b"v")
    secret = "s" * 32
    tokens = [Token(secret, ["read"])]
    with serving(app(store, tokens), ListenAddress("127.0.0.1", 0)) as running:
        assert Handle(running.url, token=secret).store.get(b"k") == b"v"
    with serving(app(store), ListenAddress.parse(str(tmp_path / "socket"))):
        assert Handle(tmp_path / "socket").store.get(b"k") == b"v"
