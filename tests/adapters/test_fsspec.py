"""A store as files: what fsspec's own suite cannot ask for, such as the past and one commit.

The suite itself runs in `make conformance`.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.adapters.fsspec import KVStoreFileSystem
from kvstore.adapters.tree import Child, children

NAMES = st.lists(st.sampled_from([b"a", b"b", b"ab", b"0", b"\xff"]), min_size=1, max_size=4)


@pytest.fixture
def files(store: kvstore.Store) -> Any:
    return KVStoreFileSystem(store)


@given(st.sets(NAMES.map(b"/".join), max_size=40), st.sampled_from([b"", b"a/", b"a/b/", b"\xff/"]))
def test_a_listing_names_what_lies_directly_below(keys: set[bytes], prefix: bytes) -> None:
    below = [key[len(prefix) :].partition(b"/") for key in keys if key.startswith(prefix)]
    expected = {Child(name, bool(slash)) for name, slash, _ in below}
    with kvstore.open(None, engine="memory") as store:
        store.put_many([(key, b"") for key in keys])
        found = list(children(store, prefix))
        assert len(found) == len(expected)
        assert set(found) == expected


def test_a_listing_passes_by_a_large_directory(store: kvstore.Store) -> None:
    """A seek leaves the directory; neighbours in the order of bytes are not lost with it."""
    store.put_many({b"d/%04d" % n: b"" for n in range(1000)})
    store.put_many({b"d": b"", b"d!": b"", b"d.e/f": b"", b"d0": b"", b"e/f": b""})
    names = [(each.name, each.is_directory) for each in children(store, b"")]
    assert names == [
        *((b"d", False), (b"d!", False), (b"d.e", True), (b"d", True)),
        *((b"d0", False), (b"e", True)),
    ]


def test_the_past_is_read_by_url_and_cannot_be_written(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with kvstore.open(place) as store:
        old = store.put(b"a/b", b"old")
        store.put(b"a/b", b"new")
        store.put(b"a/c", b"later")
        url = f"kvstore://{place}@{old}/a/b"
        with fsspec.open(url) as file:  # beside the owner, who does not listen
            assert file.read() == b"old"
        past, path = fsspec.core.url_to_fs(url)
        assert past.ls("a", detail=False) == [path] == ["a/b"]
        assert past.unstrip_protocol(path) == url
        assert pickle.loads(pickle.dumps(past)).cat(path) == b"old"
        assert past.ukey(path) == str(old)
        assert past.modified(path) == old.to_datetime()
        for write in (past.rm, past.rm_file, past.mkdir, lambda name: past.pipe(name, b"")):
            with pytest.raises(OSError, match="the past cannot be written"):
                write(path)
        assert store.get(b"a/b") == b"new"


def test_a_transaction_is_one_commit_and_a_failed_block_none(
    store: kvstore.Store, files: Any
) -> None:
    store.put(b"before", b"1")
    before = store.upper - 1
    with files.transaction:
        files.pipe({"a": b"1", "b/c": b"2"})
        with files.open("d", "w") as text:
            text.write("3")
        assert store.upper == before + 1
    stamps = {store.history(key)[0].timestamp for key in (b"a", b"b/c", b"d")}
    assert len(stamps) == 1
    with suppress(RuntimeError), files.transaction:
        files.pipe("a", b"lost")
        raise RuntimeError
    with suppress(RuntimeError), files.open("a", "wb") as half:
        half.write(b"half")
        raise RuntimeError
    file = files.open("never closed", "wb")
    file.write(b"half")
    del file
    assert {path: files.cat(path) for path in files.find("")} == {
        **{"a": b"1", "b/c": b"2", "before": b"1", "d": b"3"}
    }
    files.pipe("a", b"4")
    assert files.cat("a") == b"4"  # a transaction that failed has ended


def test_a_tree_is_deleted_by_one_commit(store: kvstore.Store, files: Any) -> None:
    files.pipe({f"tree/{n}/{m}": b"" for n in range(3) for m in range(3)} | {"tree": b"file"})
    files.pipe("treetop", b"stays")
    before = store.upper - 1
    files.rm("tree", recursive=True)
    assert files.find("") == ["treetop"]
    assert len({change.timestamp for change in store.changes(since=before)}) == 1
    with pytest.raises(FileNotFoundError):
        files.rm("tree", recursive=True)


def test_files_and_directories_of_strange_names(store: kvstore.Store, files: Any) -> None:
    store.put_many({b"\xff\xfe/\x80": b"x", b"dir/": b"no file", b"same": b"1", b"same/x": b"2"})
    (strange,) = (path for path in files.find("") if path.encode(errors="replace") == b"??/?")
    assert files.cat(strange) == b"x"
    assert files.isfile("same")
    assert files.ls("same", detail=False) == ["same/x"]
    assert files.ls("dir") == [{"name": "dir", "size": 0, "type": "directory"}]
    with pytest.raises(IsADirectoryError):
        files.open("dir")
    with pytest.raises(FileNotFoundError):
        files.ls("absent")


def test_who_comes_second_does_not_create(store: kvstore.Store, files: Any) -> None:
    mine = files.open("lock", "xb")
    mine.write(b"mine")
    files.pipe("lock", b"theirs", mode="create")
    with pytest.raises(FileExistsError):
        mine.close()
    with pytest.raises(FileExistsError):
        files.pipe("lock", b"mine", mode="create")
    assert files.cat("lock") == b"theirs"
    with files.open("lock", "ab") as file:
        file.write(b"!")
    assert files.cat_file("lock", start=-3) == b"rs!"


def test_a_file_system_of_a_closed_store_is_not_found_again(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        assert KVStoreFileSystem(store).find("") == []
    with kvstore.open(tmp_path / "s") as store:
        KVStoreFileSystem(store).pipe("a", b"1")
        assert KVStoreFileSystem(store=store).cat("a") == b"1"
    with pytest.raises(kvstore.errors.UsageError, match="names no store"):
        fsspec.filesystem("kvstore")
