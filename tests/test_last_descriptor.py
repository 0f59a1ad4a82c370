"""A process without a free file descriptor, a directory that cannot be read, and handles that are
no data: each gets an error of the project that says what to do."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore.backup import Collection
from kvstore.errors import UsageError

LATE = textwrap.dedent(
    """
    import os, resource, sys, kvstore
    from kvstore.errors import DeterminateError, StorageError
    verbs = {
        "tasks": lambda: store.tasks, "floor": lambda: store.floor(b"k"),
        "verify": lambda: store.verify(), "table": lambda: store.table("t"),
        "mapping": lambda: store.mapping(), "join": lambda: store.join(None),
        "follow": lambda: kvstore.follow(sys.argv[1]), "Join": lambda: kvstore.Join,
    }
    with kvstore.open(sys.argv[1]) as store:
        store.put(b"k", b"v")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        held = []
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for name, verb in verbs.items():
            try:
                verb()
            except (StorageError if name == "follow" else DeterminateError) as error:
                assert "ulimit -n" in str(error), error
            else:
                raise AssertionError(name)
        for descriptor in held:
            os.close(descriptor)
        assert store.floor(b"k") == (b"k", b"v") and store.verify().ok  # the import is repeated
    """
)


def test_a_late_import_without_a_descriptor_is_an_error_of_ours(tmp_path: Path) -> None:
    """`tasks`, `floor`, `verify` and others raised a bare `OSError`."""
    done = subprocess.run(
        [sys.executable, "-c", LATE, tmp_path / "s"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


BLIND = textwrap.dedent(
    """
    import os, sys, kvstore
    from kvstore.backup import Collection
    from kvstore.errors import AccessDeniedError
    root, target = sys.argv[1:]
    store = kvstore.open(os.path.join(root, "s"))
    store.put(b"k", b"v")
    collection = Collection(os.path.join(root, "c"))
    collection.backup(store)
    import kvstore.bulk.exports  # as root: nobody may not read the library
    os.mkdir(target)
    os.chmod(target, 0o333)
    if os.geteuid() == 0:
        for each, folders, files in os.walk(root):
            for name in (".", *folders, *files):
                os.chown(os.path.join(each, name), 65534, 65534)
        os.setresuid(65534, 65534, 0)
    path = os.path.join(target, "x")
    for verb in (collection.restore, store.checkpoint, kvstore.open):
        try:
            verb(path)
        except AccessDeniedError:
            assert not os.path.lexists(path), verb
        else:
            raise AssertionError(verb)
    os.setresuid(0, 0, 0) if os.getresuid()[2] == 0 else None
    os.chmod(target, 0o755)
    assert os.listdir(target) == [], os.listdir(target)
    """
)


def test_a_directory_that_may_be_written_and_not_read_takes_nothing() -> None:
    """`restore` said that nothing was written, and the restored store was there."""
    with tempfile.TemporaryDirectory() as made:  # nobody may not enter pytest's own directories
        os.chmod(made, 0o755)  # nobody works in it
        done = subprocess.run(
            [sys.executable, "-c", BLIND, made, f"{made}/blind"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr


HANDLES: dict[str, Callable[[kvstore.Store, Collection], Any]] = {
    "store": lambda s, _: s,
    "snapshot": lambda s, _: s.snapshot(),
    "batch": lambda s, _: s.batch(),
    "transaction": lambda s, _: s.transaction(),
    "table": lambda s, _: s.table("t", pa.schema({"a": pa.int64()}), key="a"),
    "feed": lambda s, _: s.feed("f", start="oldest"),
    "hold": lambda s, _: s.hold("h"),
    "tasks": lambda s, _: s.tasks,
    "live reader": lambda s, _: kvstore.follow(str(s.path)),
    "collection": lambda _, c: c,
    "reader": lambda _, c: c.open(),
    "client": lambda s, _: kvstore.connect(str(s.path)),
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[kvstore.Store, Collection]]:
    with kvstore.open(tmp_path / "s", control=True) as store:
        store.put(b"k", b"v")
        collection = Collection(tmp_path / "c")
        collection.backup(store)
        yield store, collection


@pytest.mark.parametrize("kind", HANDLES)
def test_a_handle_is_no_data(opened: tuple[kvstore.Store, Collection], kind: str) -> None:
    """ "cannot pickle 'builtins.Cache' object" said neither what nor what to do."""
    handle = HANDLES[kind](*opened)
    for call in (pickle.dumps, copy.deepcopy):
        with pytest.raises(UsageError, match=r"cannot be pickled.*kvstore\.follow.*kvstore\.conn"):
            call(handle)
    if hasattr(handle, "close") and kind not in ("store", "collection"):
        handle.close()
