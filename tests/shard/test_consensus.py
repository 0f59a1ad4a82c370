"""Each consensus implementation against the contract, and the rules of object stores."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore, ObjectStore

from kvstore.backup.testing.consensus import KEY, ConsensusContract, cas, fill, seqnos
from kvstore.errors import CorruptionError, IndeterminateError
from kvstore.storage.contract import Cas, Consensus, Versioned
from kvstore.storage.journal import Journal
from kvstore.storage.local_files import FileConsensus
from kvstore.storage.memory_storage import MemoryConsensus
from kvstore.storage.object_store import ObjectConsensus, open_object_store
from kvstore.storage.patience import Patience
from tests.harness.proxy import Answer, Proxy, Request


class TestMemoryConsensus(ConsensusContract):
    @pytest.fixture
    def consensus(self) -> Consensus:
        return MemoryConsensus()


class TestObjectConsensusInMemory(ConsensusContract):
    @pytest.fixture
    def consensus(self) -> Consensus:
        return ObjectConsensus(MemoryStore(), "p")


class TestObjectConsensusOnFiles(ConsensusContract):
    @pytest.fixture
    def consensus(self, tmp_path: Path) -> Consensus:
        return ObjectConsensus(LocalStore(tmp_path))


class TestObjectConsensusOnS3(ConsensusContract):
    @pytest.fixture
    def consensus(self, s3_bucket: Callable[[], ObjectStore]) -> Consensus:
        return ObjectConsensus(s3_bucket(), "p")


@pytest.mark.azure
class TestObjectConsensusOnAzure(ConsensusContract):
    @pytest.fixture
    def consensus(self, azure_store: ObjectStore) -> Consensus:
        return ObjectConsensus(azure_store, "p")


def test_a_server_without_conditional_puts_would_be_noticed(
    s3_bucket: Callable[[], ObjectStore],
) -> None:
    """The whole protocol rests on If-None-Match: the server of these tests honours it."""
    store = s3_bucket()
    obstore.put(store, "once", b"1", mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "once", b"2", mode="create")
    assert bytes(obstore.get(store, "once").bytes()) == b"1"


class _Behind:
    """Weather: the first put has `answer`, and every request behind it fails."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._is_put = answer, False

    def __call__(self, request: Request) -> Answer:
        if self._is_put:
            return Answer.FAILED
        self._is_put = request.method == "PUT"
        return self._answer if self._is_put else Answer.WHOLE


@pytest.mark.parametrize("answer", [Answer.WHOLE, Answer.LOST, Answer.BUSY])
def test_a_read_that_fails_behind_a_put_leaves_the_outcome_unknown(
    s3_server: str, s3_bucket: Callable[[], ObjectStore], answer: Answer
) -> None:
    bucket = s3_bucket().config["bucket"]  # type: ignore[attr-defined]
    with Proxy(s3_server) as proxy:
        _, consensus = open_object_store(
            f"s3://{bucket}/p",
            patience=Patience(1.0),
            endpoint=proxy.url,
            access_key_id="test",
            secret_access_key="test",
            region="us-east-1",
        )
        assert cas(consensus, None, 1) is Cas.COMMITTED
        proxy.weather = _Behind(answer)
        with pytest.raises(IndeterminateError):
            cas(consensus, 1, 2)
    # The put was carried out, unless the server did not hear of it.
    seen = seqnos(ObjectConsensus(s3_bucket(), "p/consensus"))
    assert seen == ([1] if answer is Answer.BUSY else [1, 2])


class _SleepyConsensus(ObjectConsensus):
    """Stops between reading the head and creating the next version, as a paused process would."""

    def __init__(self, store: ObjectStore, while_asleep: Callable[[], None]) -> None:
        super().__init__(store, "p")
        self._while_asleep = while_asleep

    def _head(self, key: str) -> tuple[int, Versioned] | None:
        found = super()._head(key)
        self._while_asleep()
        return found


def test_a_writer_that_slept_through_a_truncation_cannot_fork_the_log() -> None:
    store = MemoryStore()
    awake = ObjectConsensus(store, "p")
    fill(awake, 1, 2)

    def others_go_on() -> None:
        for seqno in (3, 4, 5):
            assert cas(awake, seqno - 1, seqno) is Cas.COMMITTED
        awake.truncate(KEY, 5)

    asleep = _SleepyConsensus(store, others_go_on)
    with pytest.raises(IndeterminateError):
        asleep.compare_and_set(KEY, expected=2, new=Versioned(3, b"fork"))
    assert seqnos(awake) == [5]
    assert seqnos(ObjectConsensus(store, "p")) == [5]
    assert cas(awake, 5, 6) is Cas.COMMITTED
    awake.truncate(KEY, 6)
    left = [meta["path"] for chunk in obstore.list(store) for meta in chunk]
    assert [path for path in left if "/v" in path] == ["p/s-1/v00000000000000000006"]


def test_a_put_repeated_by_the_client_library_is_known_as_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consensus = ObjectConsensus(MemoryStore())
    put = obstore.put

    def put_twice(*args: object, **kwargs: object) -> object:
        put(*args, **kwargs)  # type: ignore[arg-type]
        return put(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(obstore, "put", put_twice)
    assert cas(consensus, None, 1) is Cas.COMMITTED
    assert cas(consensus, None, 1) is Cas.MISMATCH


def test_a_foreign_object_among_the_versions_is_reported() -> None:
    store = MemoryStore()
    obstore.put(store, f"consensus/{KEY}/README", b"hello")
    with pytest.raises(CorruptionError, match="README"):
        ObjectConsensus(store).head(KEY)


class TestFileConsensus(ConsensusContract):
    @pytest.fixture
    def consensus(self, tmp_path: Path) -> Consensus:
        return FileConsensus(tmp_path / "not" / "yet")


def test_a_second_handle_sees_new_heads_and_truncations(tmp_path: Path) -> None:
    writer, reader = FileConsensus(tmp_path), FileConsensus(tmp_path)
    assert reader.head(KEY) is None
    fill(writer, 1, 2)
    assert seqnos(reader) == [1, 2]
    assert cas(reader, 2, 3) is Cas.COMMITTED
    assert seqnos(writer) == [1, 2, 3]
    writer.truncate(KEY, 3)
    assert seqnos(reader) == [3]
    assert cas(reader, 3, 4) is Cas.COMMITTED
    assert seqnos(writer) == [3, 4]


def test_a_reader_beside_truncations_always_finds_a_head(tmp_path: Path) -> None:
    writer, reader = FileConsensus(tmp_path), FileConsensus(tmp_path)
    cas(writer, None, 1)
    heads: list[Versioned | None] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            heads.append(reader.head(KEY))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            for seqno in range(1, 500):
                cas(writer, seqno, seqno + 1)
                writer.truncate(KEY, seqno + 1)
        finally:
            done.set()
    reading.result()
    assert heads
    assert None not in heads


def test_a_key_whose_folder_was_removed_begins_anew(tmp_path: Path) -> None:
    consensus = FileConsensus(tmp_path / "place")
    fill(consensus, 1, 2)
    shutil.rmtree(tmp_path / "place")
    assert consensus.head(KEY) is None
    assert cas(consensus, 2, 3) is Cas.MISMATCH
    assert cas(consensus, None, 1) is Cas.COMMITTED
    assert seqnos(consensus) == [1]


def test_a_version_whose_write_was_cut_off_does_not_count(tmp_path: Path) -> None:
    consensus = FileConsensus(tmp_path)
    fill(consensus, 1, 2)
    (live,) = [p for p in (tmp_path / KEY).iterdir() if p.name.endswith("-journal")]
    os.truncate(live, live.stat().st_size - 1)
    (tmp_path / KEY / "LOCK").write_bytes(b"")  # the write was cut off by the loss of power
    assert seqnos(FileConsensus(tmp_path)) == [1]
    assert cas(FileConsensus(tmp_path), 1, 7) is Cas.COMMITTED
    assert seqnos(consensus) == [1, 7]


@pytest.mark.parametrize("change", ["cut", "emptied", "deleted", "older copy"])
def test_a_live_file_of_an_older_state_is_corruption_not_an_older_head(
    tmp_path: Path, change: str
) -> None:
    fill(FileConsensus(tmp_path), 1, 2)
    (live,) = [p for p in (tmp_path / KEY).iterdir() if p.name.endswith("-journal")]
    older = live.read_bytes()
    consensus = FileConsensus(tmp_path)
    assert cas(consensus, 2, 3) is Cas.COMMITTED
    if change == "deleted":
        live.unlink()
    else:
        left = {"cut": live.read_bytes()[:-1], "emptied": b"", "older copy": older}
        live.write_bytes(left[change])
    for looking in (consensus, FileConsensus(tmp_path)):
        with pytest.raises(CorruptionError):
            looking.head(KEY)
        with pytest.raises(CorruptionError):
            cas(looking, 2, 3)
    (tmp_path / KEY / "LOCK").unlink()  # a caller who wants the older state asks for it
    assert change == "emptied" or len(seqnos(FileConsensus(tmp_path))) in (0, 2)


def test_a_record_that_is_too_short_for_a_version_is_corruption(tmp_path: Path) -> None:
    with Journal.open(tmp_path / KEY, content="kvstore.consensus/1") as journal:
        journal.append(b"short")
    with pytest.raises(CorruptionError, match="too short"):
        FileConsensus(tmp_path).head(KEY)


def test_a_damaged_version_is_corruption_not_an_older_head(tmp_path: Path) -> None:
    consensus = FileConsensus(tmp_path)
    fill(consensus, 1, 2, 3)
    (live,) = [p for p in (tmp_path / KEY).iterdir() if p.name.endswith("-journal")]
    data = bytearray(live.read_bytes())
    data[len(data) // 2] ^= 1
    live.write_bytes(data)
    with pytest.raises(CorruptionError):
        FileConsensus(tmp_path).head(KEY)
    with pytest.raises(CorruptionError):
        cas(FileConsensus(tmp_path), 3, 4)
