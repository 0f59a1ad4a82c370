"""Patience: failures that may pass are tried again, logged and bounded, and others are raised at
once."""

from __future__ import annotations

import errno
import http.server
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvstore
from kvstore import backup
from kvstore.errors import (
    AccessDeniedError,
    DeterminateError,
    IndeterminateError,
    KVStoreError,
    NoBucketError,
    OutOfSpaceError,
    StorageError,
    UsageError,
)
from kvstore.limits import RETRY_TOLD_S
from kvstore.storage.contract import Storage
from kvstore.storage.local_files import FileBlob, FileConsensus
from kvstore.storage.object_store import open_object_store
from kvstore.storage.os_files import OS_FILES
from kvstore.storage.patience import LOG, Patience, Waiting
from tests.shard.world import World, batch_of


class Minutes:
    """A clock that moves only by pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def patience(self, seconds: float, tell: Callable[[Waiting], None] | None = None) -> Patience:
        return Patience(seconds, tell=tell, pause=self.pause, monotonic=lambda: self.now)


def failing(error: KVStoreError, calls: list[int]) -> Callable[[], None]:
    def call() -> None:
        calls.append(1)
        raise error

    return call


@pytest.mark.parametrize("error", [DeterminateError("put", "503"), IndeterminateError("put", "?")])
def test_a_failure_that_may_pass_is_tried_for_as_long_as_patience_lasts(
    error: DeterminateError | IndeterminateError,
) -> None:
    time, calls = Minutes(), list[int]()
    with pytest.raises(type(error)):
        time.patience(600).over(failing(error, calls))
    assert time.now == pytest.approx(600)
    assert len(calls) == len(time.pauses) + 1 < 200
    assert max(time.pauses) <= 10


def test_an_outage_that_ends_is_forgotten() -> None:
    time, calls = Minutes(), list[int]()

    def call() -> str:
        calls.append(1)
        if time.now < 30:
            raise DeterminateError("get", "503")
        return "there"

    assert time.patience(120).over(call) == "there"
    assert time.now < 40


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_no_patience_is_one_attempt(seconds: float) -> None:
    time, calls = Minutes(), list[int]()
    with pytest.raises(DeterminateError):
        time.patience(seconds).over(failing(DeterminateError("get", "503"), calls))
    assert time.now == seconds
    assert (len(calls) == 1) is (seconds == 0)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "60", True])
def test_a_patience_that_is_no_time_is_a_callers_mistake(seconds: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="patience"):
        backup.Collection(tmp_path, patience=seconds)  # type: ignore[arg-type]


def test_a_long_wait_is_told_and_can_be_called_off(caplog: pytest.LogCaptureFixture) -> None:
    time, calls, told = Minutes(), list[int](), list[Waiting]()
    with caplog.at_level(logging.WARNING, LOG.name), pytest.raises(DeterminateError):
        time.patience(60, told.append).over(failing(DeterminateError("get of x", "503"), calls))
    assert RETRY_TOLD_S <= told[0].waited_s < 2 * RETRY_TOLD_S
    assert 3 <= len(told) <= 6
    assert "get of x" in str(told[0])
    assert len(caplog.records) == len(told) + 1

    def stop(_: Waiting) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time.patience(60, stop).over(failing(DeterminateError("get of x", "503"), calls))


def test_a_command_ends_with_its_patience_against_a_failure_that_stays() -> None:
    world, time = World(), Minutes()
    shard = world.open(patience=time.patience(30))
    batch = batch_of(shard, 5)
    world.consensus.script = ["refused"] * 1_000
    with pytest.raises(DeterminateError):
        shard.writer().compare_and_append(batch)
    assert time.now == pytest.approx(30)
    time.now, world.consensus.script = 0.0, ["unsent"] * 1_000
    with pytest.raises(IndeterminateError):
        shard.writer().compare_and_append(batch)
    assert time.now == pytest.approx(30)


# -- local files ------------------------------------------------------------------------------

LASTING = [
    (errno.EIO, StorageError),
    (errno.EACCES, AccessDeniedError),
    (errno.EROFS, AccessDeniedError),
    (errno.ENOTDIR, AccessDeniedError),
    (errno.ENOSPC, OutOfSpaceError),
    (errno.EDQUOT, OutOfSpaceError),
]
CALLS = ["open", "os.open", "os.fsync", "os.write", "os.link", "os.scandir", "lock"]
FAILURES = [
    *((*LASTING[0], call, part) for call in CALLS for part in ("consensus", "blob")),
    *((*lasting, "lock", "consensus") for lasting in LASTING[1:]),
    *((*lasting, "os.link", "blob") for lasting in LASTING[1:]),
]


UNNEEDED = {("os.link", "consensus")}
"""Calls that a backup does not make in these folders."""


@contextmanager
def sticky(number: int, call: str, below: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One system call fails for good. A call that names a file fails only below a folder."""

    def failed(*args: object, **_: object) -> None:
        if args and isinstance(args[0], str | Path) and str(below) not in str(args[0]):
            return real(*args, **_)
        raise OSError(number, os.strerror(number))

    place = {
        "open": (OS_FILES.__class__, "append"),
        "lock": (OS_FILES.__class__, "lock"),
    }.get(call)
    if place is None:
        place = (os, call.removeprefix("os."))  # type: ignore[assignment]
    assert place is not None
    real = getattr(*place)
    if place[0] is not os:

        def method(_self: object, *args: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(*place, method)
    else:
        monkeypatch.setattr(*place, failed)
    try:
        yield
    finally:
        monkeypatch.setattr(*place, real)


@pytest.mark.parametrize(("number", "kind", "call", "part"), FAILURES)
def test_a_disk_that_fails_for_good_is_told_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[KVStoreError],
    call: str,
    part: str,
) -> None:
    time = Minutes()
    place = tmp_path / "collection"
    blob = FileBlob(place / "blob", patience=time.patience(60))
    consensus = FileConsensus(place / "consensus", patience=blob.patience)
    with kvstore.open(tmp_path / "store", engine="memory") as store:
        store.put(b"a", b"1")
        collection = backup.Collection("x", storage=Storage(blob, consensus))
        collection.backup(store)
        store.put(b"b", b"2")
        upper = collection.upper
        # The files of the source are spared: calls on descriptors fail for the collection only.
        if call in ("os.fsync", "os.write"):
            store.sync()
            collection = backup.Collection("x", storage=Storage(blob, consensus))
            monkeypatch.setattr(type(store), "sync", lambda self: self.upper)
        with sticky(number, call, place / part, monkeypatch):
            met = outcome(lambda: collection.backup(store))
        if isinstance(met, KVStoreError):
            assert isinstance(met, kind), met
            assert not isinstance(met, DeterminateError | IndeterminateError)
        else:  # the call is not needed here
            assert met.upper > upper
            assert (call, part) in UNNEEDED
        assert time.pauses == []
        fresh = backup.Collection("x", storage=Storage(blob, consensus))
        fresh.backup(store)
        assert dict(fresh_rows(fresh)) == {b"a": b"1", b"b": b"2"}


def outcome(call: Callable[[], backup.BackupInfo]) -> backup.BackupInfo | KVStoreError:
    try:
        return call()
    except KVStoreError as error:
        return error


def fresh_rows(collection: backup.Collection) -> list[tuple[bytes, bytes]]:
    rows = collection.scan_batches().read_all()
    return list(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))


# -- object stores ----------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[str, list[int]]]:
    """The address of a server, and a list with the status of its answers and the number of
    requests."""
    state = [503, 0]

    class Answers(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            state[1] += 1
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(state[0])
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", state
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "kind", "is_tried_again"),
    [
        (400, StorageError, False),
        (403, AccessDeniedError, False),
        (404, NoBucketError, False),
        (405, StorageError, False),
        (416, StorageError, False),
        (501, StorageError, False),
        (429, DeterminateError, True),
        (500, DeterminateError, True),
        (503, DeterminateError, True),
    ],
)
def test_an_answer_that_will_not_change_is_told_at_once(
    server: tuple[str, list[int]], status: int, kind: type[KVStoreError], is_tried_again: bool
) -> None:
    url, state = server
    state[0] = status
    time = Minutes()
    options = {"endpoint": url, "access_key_id": "a", "secret_access_key": "b"}
    blob, consensus = open_object_store(
        "s3://bucket/place",
        patience=time.patience(20),
        region="us-east-1",
        retry_config={"max_retries": 0},
        **options,
    )
    with pytest.raises(kind) as error:
        backup.Collection("s3://bucket/place", storage=Storage(blob, consensus)).list()
    assert isinstance(error.value, DeterminateError) is is_tried_again
    assert time.now == pytest.approx(20 if is_tried_again else 0)
    assert (state[1] > 5) is is_tried_again


def test_an_object_stores_own_retries_are_bounded(server: tuple[str, list[int]]) -> None:
    url, state = server
    options = {"endpoint": url, "access_key_id": "a", "secret_access_key": "b"}
    time = Minutes()
    blob, _ = open_object_store(
        "s3://bucket/x", patience=time.patience(0), region="us-east-1", **options
    )
    with pytest.raises(DeterminateError):
        blob.patience.over(lambda: blob.get("a"))
    assert 1 <= state[1] <= 3
