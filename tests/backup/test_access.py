"""Places that refuse calls, are full or have lost a piece: the error comes at once, and intact
backups can still be read."""

from __future__ import annotations

import http.server
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvstore
from kvstore import backup
from kvstore.backup.shard import FileBlob, MemoryBlob, Shard, Storage
from kvstore.backup.window import Attempt, find, upload_here
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    NoBucketError,
    OutOfSpaceError,
    UsageError,
)
from kvstore.limits import ROLLUP_EVERY
from kvstore.storage.contract import Cas, Versioned
from kvstore.storage.local_files import FileConsensus
from kvstore.storage.memory_storage import MemoryConsensus
from tests.backup.histories import upload_and_be_killed

NOBODY = 65534


@pytest.fixture
def place(tmp_path: Path, store: kvstore.Store) -> Path:
    """A collection of three backups."""
    collection = backup.Collection(tmp_path / "collection")
    for number in range(3):
        store.put(b"k%d" % number, b"v")
        collection.backup(store)
    return tmp_path / "collection"


@pytest.fixture
def everyones() -> Iterator[Path]:
    """A directory that other users can look into."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


@contextmanager
def without_rights() -> Iterator[None]:
    """Run the block as a user who owns nothing. Tests that run as root may do everything
    otherwise."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def set_mode(root: Path, folder: int, file: int) -> None:
    for path in [root, *root.rglob("*")]:
        path.chmod(folder if path.is_dir() else file)


def test_what_cannot_be_written_is_read_and_restored(
    store: kvstore.Store, place: Path, everyones: Path
) -> None:
    shutil.copytree(place, everyones / "copy")
    set_mode(everyones / "copy", 0o555, 0o444)
    collection = backup.Collection(everyones / "copy")
    with without_rights():
        assert collection.verify().backups == len(collection.list()) == 3
        assert collection.scan_batches().read_all().num_rows == 3
        at = collection.restore(everyones / "restored")
        for write in (
            lambda: collection.backup(store),
            collection.compact,
            lambda: collection.expire(before=at),
        ):
            with pytest.raises(AccessDeniedError, match="permissions"):
                write()
    set_mode(everyones / "copy", 0o755, 0o644)
    assert collection.verify("contents", store).rows
    with kvstore.open(everyones / "restored") as restored:
        assert dict(restored.scan()) == dict(store.scan())


def test_what_cannot_be_read_is_refused(store: kvstore.Store, everyones: Path) -> None:
    (everyones / "closed").mkdir()
    (everyones / "closed").chmod(0)
    for path in (everyones / "closed", everyones / "closed" / "below", everyones / ("n" * 300)):
        with without_rights(), pytest.raises(AccessDeniedError):
            backup.Collection(path).backup(store)


class FullConsensus(MemoryConsensus):
    """Takes no further write once it `is_full`."""

    is_full = False

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        if self.is_full:
            raise OutOfSpaceError(key)
        return super().compare_and_set(key, expected=expected, new=new)


def test_what_is_full_is_read_and_restored(store: kvstore.Store, tmp_path: Path) -> None:
    consensus = FullConsensus()
    collection = backup.Collection("full", storage=Storage(MemoryBlob(), consensus))
    store.put(b"a", b"1")
    collection.backup(store)
    consensus.is_full = True
    collection.restore(tmp_path / "restored")
    assert collection.verify("contents", store).rows
    with pytest.raises(OutOfSpaceError):
        collection.backup(store)


def test_a_restore_that_is_done_is_done_though_its_lease_cannot_be_given_back(
    store: kvstore.Store, tmp_path: Path
) -> None:
    consensus = FullConsensus()
    collection = backup.Collection("full", storage=Storage(MemoryBlob(), consensus))
    store.put(b"a", b"1")
    collection.backup(store)

    def fill(_rows: int) -> None:
        consensus.is_full = True

    at = collection.restore(tmp_path / "restored", progress=fill)
    assert at == collection.upper - 1
    assert (tmp_path / "restored").is_dir()


def test_backups_go_on_where_nothing_may_be_deleted(
    store: kvstore.Store, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials may allow writes and refuse deletes. The backup that was appended stays."""

    def refuse(*_: object, **__: object) -> None:
        raise AccessDeniedError("delete", "not allowed")

    monkeypatch.setattr(FileBlob, "delete", refuse)
    monkeypatch.setattr(FileConsensus, "truncate", refuse)
    collection = backup.Collection(place)
    upload_and_be_killed(store, collection)
    for number in range(2 * ROLLUP_EVERY):
        store.put(b"k", b"%d" % number)
        assert collection.backup(store).upper == store.upper
    collection.verify("contents", store)


class NoRollups(MemoryBlob):
    """Has no room for a whole state once it `is_full`."""

    is_full = False

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        if self.is_full and "/rollup/" in name:
            raise OutOfSpaceError(name)
        super().put(name, data)


def test_what_was_appended_is_appended_though_no_rollup_fits() -> None:
    blob = NoRollups()
    shard = Shard.open(blob, MemoryConsensus(), "s")
    blob.is_full = True
    for upper in range(1, 2 * ROLLUP_EVERY):
        shard.writer().progress(upper)
    assert shard.upper == 2 * ROLLUP_EVERY - 1


# -- lost pieces ---------------------------------------------------------------------------


def test_a_lost_rollup_is_told_in_seconds(place: Path) -> None:
    (rollup,) = place.glob("blob/chain-*/rollup/*")
    rollup.unlink()
    with pytest.raises(CorruptionError, match=rollup.name):
        backup.Collection(place).list()


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda log: empty_files(log)])
def test_a_chain_whose_log_is_lost_is_not_begun_again(
    store: kvstore.Store, place: Path, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    (log,) = place.glob("consensus/chain-*")
    lose(log)
    for use in (
        lambda: backup.Collection(place).list(),
        lambda: backup.Collection(place).verify(),
        lambda: backup.Collection(place).backup(store),
        lambda: backup.Collection(place).restore(tmp_path / "restored"),
    ):
        with pytest.raises(CorruptionError, match=r"log of chain|the file is empty"):
            use()


def empty_files(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_bytes(b"")


def test_a_collection_whose_record_is_lost_is_not_begun_again(
    store: kvstore.Store, place: Path
) -> None:
    shutil.rmtree(place / "consensus")
    for use in (
        lambda: backup.Collection(place).backup(store),
        lambda: backup.Collection(place).list(),
    ):
        with pytest.raises(CorruptionError, match="record of the collection"):
            use()


def test_looking_at_a_chain_that_was_never_begun_does_not_make_it(
    store: kvstore.Store, place: Path
) -> None:
    (log,) = place.glob("consensus/chain-*")
    shutil.rmtree(log)
    shutil.rmtree(place / "blob")
    assert backup.Collection(place).list() == []
    assert backup.Collection(place).show().chains == 0
    assert not log.exists()
    store.drop_hold(store.holds.all()[0].name)  # as if no backup had ever been completed
    assert backup.Collection(place).backup(store).lower == 0


@pytest.mark.parametrize("passphrase", [None, "secret"])
def test_a_damaged_record_of_an_upload_costs_only_that_upload(
    store: kvstore.Store, tmp_path: Path, passphrase: str | None
) -> None:
    place = tmp_path / "collection"
    collection = backup.Collection(place, passphrase)
    store.put(b"a", b"1")
    collection.backup(store)
    for number in range(100):
        store.put(b"%03d" % number, b"v")
    with collection.snapshot(None) as (shard, _):
        attempt = Attempt.begin(shard.blob, shard.name, shard.upper, int(store.upper))
        uploaded = upload_here(store, shard, attempt, None).batch
        rows = collection.open_part(uploaded.parts[0]).read().to_batches()[0]
        attempt.record(uploaded.parts[0], rows.slice(49, 1))
        record = next(place.glob("blob/progress/*/*/*.json"))
        whole = record.read_bytes()
        assert find(shard.blob, shard.name, shard.upper).farthest is not None
        for place_of_byte in range(0, len(whole), 3):
            damaged = bytearray(whole)
            damaged[place_of_byte] ^= 4
            record.write_bytes(damaged)
            found = find(shard.blob, shard.name, shard.upper)
            assert found.farthest is None or found.farthest.after.key == rows["key"][49].as_py()
        record.write_bytes(whole[:-9])
        (record.parent / "notes.txt").write_text("not ours")
    collection.backup(store)
    assert collection.verify("contents", store).rows


# -- object stores ----------------------------------------------------------------------------


@pytest.fixture
def refusing() -> Iterator[tuple[str, list[int]]]:
    """A server that answers every request with one status, and the address of the server."""
    status = [403]

    class Refuses(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status[0])
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_PUT = do_HEAD = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", status
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "error", "remedy"),
    [
        (403, AccessDeniedError, "credentials"),
        (401, AccessDeniedError, "credentials"),
        (404, NoBucketError, "bucket"),
    ],
)
def test_an_object_store_that_refuses_says_what_to_see_to(
    refusing: tuple[str, list[int]], answer: int, error: type[UsageError], remedy: str
) -> None:
    endpoint, status = refusing
    status[0] = answer
    options = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "a",
        "secret_access_key": "b",
        "client_options": {"allow_http": True},
    }
    with pytest.raises(error, match=remedy):
        backup.Collection("s3://bucket/place", options=options).list()
