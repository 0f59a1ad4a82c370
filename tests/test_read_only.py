"""Stores opened to be read: any number at once, and no opening changes a file."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore import Span
from kvstore.engine import FileSpan
from kvstore.errors import KVStoreError, NotAStoreError, NotYetWrittenError, UsageError
from kvstore.mvcc.parallel_scan import split_span
from kvstore.opening import engine_at
from tests.harness.parts import parts_of

NOBODY = 65534

pytestmark = pytest.mark.usefixtures("each_engine")


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    """The bytes of all files, and the times at which they and their directory were changed."""
    found = {file.name: (file.stat().st_ctime_ns, file.read_bytes()) for file in path.iterdir()}
    return {**found, "": (path.stat().st_ctime_ns, b"")}


def test_checkpoint_of_a_store_in_use_is_read_by_several_at_once_and_stays_as_it_is(
    tmp_path: Path,
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        first = store.put(b"a", b"1")
        store.put(b"a", b"2")
        store.delete_range(b"b", b"c")
        upto = store.checkpoint(tmp_path / "copy")
        store.put(b"a", b"3")
        expected = list(store.changes(0, upto))
    before = contents(tmp_path / "copy")
    with (
        kvstore.open_read_only(tmp_path / "copy") as one,
        kvstore.open_read_only(tmp_path / "copy") as two,
    ):
        assert one.get(b"a") == two.get(b"a") == b"2"
        assert one.get(b"a", as_of=first) == b"1"
        assert list(one.changes(0)) == expected
        assert one.upper == upto + 1
        with pytest.raises(NotYetWrittenError):
            one.get(b"a", as_of=upto + 1)
    assert contents(tmp_path / "copy") == before


def test_every_write_is_refused_and_reads_go_on(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"a", b"1")
    with kvstore.open_read_only(tmp_path / "store") as store:
        for write in (
            lambda: store.put(b"a", b"2"),
            lambda: store.delete(b"a"),
            lambda: store.delete_range(b"a", b"b"),
            lambda: store.hold("mine"),
            lambda: store.gc(before=store.upper - 1),
            lambda: store.clear_range(b"a", b"b"),
            lambda: store.reshard(streams=2),
        ):
            with pytest.raises(UsageError, match="opened to be read only"):
                write()
        assert store.get(b"a") == b"1"


def as_a_stranger(pipe: Connection, root: str, engine: str) -> None:
    """The answers of another user, who may read `root` and not write to it, about the stores
    there."""
    scratch = tempfile.mkdtemp()
    if os.getuid() == 0:
        os.chown(scratch, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    tempfile.tempdir = scratch

    def outcome(call: Callable[[], Any]) -> str:
        try:
            with call() as store:
                return f"{sum(1 for _ in store.scan())} rows, {store.verify().ok}"
        except KVStoreError as error:
            return type(error).__name__

    with pipe:
        for name in ("closed", "torn", "copy", "new", "secret"):
            path = os.path.join(root, name)
            pipe.send((name, "read", outcome(lambda path=path: kvstore.open_read_only(path))))
            pipe.send((name, "write", outcome(lambda path=path: kvstore.open(path, engine))))
        pipe.send(os.listdir(scratch))
    os.rmdir(scratch)


def test_a_store_that_may_not_be_written_is_read_and_stays_as_it_is(
    spawn: Any, each_engine: str
) -> None:
    """Another user owns the files, or all write permissions are removed, as on read-only
    storage."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        with kvstore.open(root / "closed", durability="async") as store:
            parts_of(store).engine.compact("data")
            store.put(b"a", b"1")
            store.put(b"b", b"2")
            store.checkpoint(root / "copy")
            shutil.copytree(root / "closed", root / "torn")
        for log in (*(root / "torn").glob("*.log"), *(root / "torn").glob("*-journal")):
            with log.open("ab") as file:
                file.write(bytes(5000))
        shutil.copytree(root / "closed", root / "secret")
        for path in (*root.rglob("*"), root):
            path.chmod(0o555 if path.is_dir() else 0o444)
        (root / "secret").chmod(0)
        stores = [root / name for name in ("closed", "torn", "copy")]
        before = [contents(path) for path in stores]
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=as_a_stranger, args=(theirs, place, each_engine))
        process.start()
        theirs.close()
        said = {}
        for _ in range(10):
            name, how, found = ours.recv()
            said[name, how] = found
        assert ours.recv() == []
        process.join()
        assert [contents(path) for path in stores] == before
        for path in (root, *root.iterdir()):
            path.chmod(0o755)
    denied = "AccessDeniedError"
    for name in ("closed", "torn", "copy"):
        assert said[name, "read"] == "2 rows, True"
        assert said[name, "write"] == denied
    assert said["new", "read"] == "NotAStoreError"
    assert said["new", "write"] == denied
    assert said["secret", "read"] == said["secret", "write"] == denied


def test_what_is_no_store_is_not_made_one(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError):
        kvstore.open_read_only(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotAStoreError):
        kvstore.open_read_only(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


@given(
    st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=6), st.integers(0, 1 << 30))),
    st.integers(1, 9),
    st.binary(max_size=3),
)
def test_splits_cover_the_span_once_and_ascend(
    files: list[tuple[bytes, bytes, int]], count: int, start: bytes
) -> None:
    span = Span(start, start + b"\xff\xff\xff\xff")
    pieces = split_span(span, [FileSpan(min(a, b), max(a, b), n) for a, b, n in files], count)
    assert 1 <= len(pieces) <= count
    assert pieces[0].start == span.start
    assert pieces[-1].end == span.end
    assert all(a.end == b.start for a, b in pairwise(pieces))


@pytest.mark.parametrize("pattern", [b"%06d", b"trip/%08d/fare", b"id-%04x", b"%05X"])
def test_keys_that_are_written_in_digits_are_cut_between_digits(pattern: bytes) -> None:
    """All 20,000 numbers begin with 0 or 1, so no key has a byte between these two digits."""
    keys = [pattern % number for number in range(20_000)]
    pieces = split_span(Span(), [FileSpan(keys[0], keys[-1], 1 << 20)], 4)
    sizes = [sum(1 for key in keys if key in piece) for piece in pieces]
    assert sum(sizes) == 20_000
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


def test_splits_of_evenly_spread_keys_are_even(tmp_path: Path) -> None:
    pick = random.Random(7)
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for _ in range(20_000):
                batch.put(pick.randbytes(16), b"v" * 20)
        store.checkpoint(tmp_path / "copy")
    with kvstore.open_read_only(tmp_path / "copy") as store:
        sizes = [sum(1 for _ in store.scan(p.start, p.end)) for p in store.layout.splits(4)]
    assert sum(sizes) == 20_000
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


def test_a_reader_makes_a_whole_checkpoint_or_says_who_can(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"key", b"value")
        with kvstore.open_read_only(tmp_path / "store") as reader:
            if engine_at(tmp_path / "store") == "rocksdb":
                with pytest.raises(UsageError, match=r"kvstore\.connect"):
                    reader.checkpoint(tmp_path / "copy")
                assert not (tmp_path / "copy").exists()
                return
            reader.checkpoint(tmp_path / "copy")
    with kvstore.open_read_only(tmp_path / "copy") as copy:
        assert copy.get(b"key") == b"value"
