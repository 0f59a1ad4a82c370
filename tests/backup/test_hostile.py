"""Hostile bytes in a collection: each format ends in the documented error, in bounded memory."""

from __future__ import annotations

import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import backup
from kvstore.backup.chains import Chains
from kvstore.backup.sealed import KEY_RECORD, SealedConsensus, Secret, unlock
from kvstore.backup.window import Attempt, find
from kvstore.base.clock import Clock
from kvstore.errors import CorruptionError, FormatVersionError, KVStoreError, UsageError
from kvstore.limits import KEY_RECORD_BYTES_MAX
from kvstore.storage.contract import Storage, Versioned
from kvstore.storage.local_files import FileBlob
from kvstore.storage.memory_storage import MemoryBlob, MemoryConsensus
from tests.harness.traced import traced
from tests.shard.test_hostile import lied


@pytest.fixture
def store() -> Any:
    with kvstore.open(None, engine="memory") as opened:
        yield opened


# -- the key record ---------------------------------------------------------------------------

KEY_LIES: list[dict[str, Any]] = [
    {"n": 2**22},
    {"n": 2**22, "r": 1},
    {"n": 2**63},
    {"n": 3},
    {"n": 1},
    {"n": 0},
    {"n": -2},
    {"n": 2.0},
    {"n": True},
    {"n": "32768"},
    {"n": None},
    {"r": 2**20},
    {"r": 0},
    {"p": 2**16},
    {"p": -1},
    {"salt": ""},
    {"salt": "00" * 65},
    {"salt": "zz"},
    {"salt": 5},
    {"wrapped": ""},
    {"wrapped": "00"},
    {"wrapped": "00" * 1000},
    {"wrapped": [1]},
    {"kdf": "argon2"},
    {"kdf": 1},
    {"kdf": None},
    {"format": "1"},
    {"format": -1},
]


def with_lie(record: bytes, lie: dict[str, Any]) -> bytes:
    return json.dumps(json.loads(record) | lie).encode()


@pytest.mark.traces_memory
@pytest.mark.parametrize("lie", KEY_LIES, ids=str)
def test_a_key_record_that_lies_is_damage_and_costs_nothing(lie: dict[str, Any]) -> None:
    record = Secret(passphrase="p").make_record(bytes(32))
    with traced() as memory, pytest.raises(CorruptionError, match="key record"):
        Secret(passphrase="p").open_record(with_lie(record, lie), "here")
    assert memory.peak < 4 << 20


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"[]",
        b"null",
        b"{" * 100_000,
        b'{"format":' * 50_000,
        b"{}" + b" " * KEY_RECORD_BYTES_MAX,
        b"\xff\xfe",
        b'{"format": 1, "format": 1}',
        b'{"format": NaN}',
    ],
    ids=lambda record: str(record[:12]),
)
def test_a_key_record_that_is_none_is_damage(record: bytes) -> None:
    with pytest.raises(CorruptionError, match="key record"):
        Secret(passphrase="p").open_record(record, "here")
    blob = MemoryBlob()
    blob.put(KEY_RECORD, record)
    with pytest.raises(CorruptionError, match="key record"):
        unlock(blob, Secret(passphrase="p"), "here")


def test_a_newer_key_record_is_told_and_other_secrets_too() -> None:
    record = Secret(passphrase="p").make_record(bytes(32))
    with pytest.raises(FormatVersionError):
        Secret(passphrase="p").open_record(with_lie(record, {"format": 2}), "here")
    with pytest.raises(UsageError, match="does not open"):
        Secret(passphrase="p").open_record(with_lie(record, {"n": 2**14}), "here")
    assert Secret(passphrase="p").open_record(record, "here") == bytes(32)


def test_a_key_file_that_never_ends_is_no_key() -> None:
    with pytest.raises(UsageError, match="holds no key"):
        Secret(key_file="/dev/zero")


def test_a_sealed_version_of_any_length_does_not_decrypt() -> None:
    blob, consensus = MemoryBlob(), MemoryConsensus()
    key = unlock(blob, Secret(passphrase="p"), "here")
    assert key is not None
    key.made()
    for length in range(40):
        consensus.compare_and_set(
            "k", expected=length - 1 if length else None, new=Versioned(length, bytes(length))
        )
        with pytest.raises(CorruptionError, match="decrypt"):
            SealedConsensus(consensus, key).head("k")


# -- the record of the collection, and of uploads ---------------------------------------------

RECORD = {
    "format": 1,
    "id": "0011",
    "source": "2233",
    "chains": ["chain-0123456789ab"],
    "dropping": ["chain-ab0123456789"],
    "drills": [],
}


def chains_of(record: bytes) -> Chains:
    consensus = MemoryConsensus()
    consensus.compare_and_set("collection", expected=None, new=Versioned(0, record))
    return Chains(Storage(MemoryBlob(), consensus), "here", Clock())


def test_a_collections_record_that_lies_is_told() -> None:
    rng = random.Random(2)
    assert chains_of(json.dumps(RECORD).encode()).read() is not None
    refused = 0
    for number in range(500):
        altered = lied(RECORD, rng)
        try:
            chains_of(altered).read()
        except (CorruptionError, FormatVersionError):
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{number}: {altered!r}") from error
    assert refused > 100


@pytest.mark.parametrize(
    "lie",
    [
        {"chains": []},
        {"chains": ["collection"]},
        {"chains": ["chain-a", "chain-a"]},
        {"chains": ["chain-a/../../x"]},
        {"dropping": ["chain-0123456789ab"]},
        {"chains": "chain-a"},
    ],
    ids=str,
)
def test_chains_that_none_has_are_told(lie: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError, match="chains"):
        chains_of(json.dumps(RECORD | lie).encode()).read()


def sealed(record: bytes) -> bytes:
    """A record of an upload, with the checksum of what it says."""
    body = json.loads(record)
    crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, "crc32": crc32}).encode()


def test_a_record_of_an_upload_that_lies_costs_only_that_upload(store: kvstore.Store) -> None:
    blob = MemoryBlob()
    collection = backup.Collection("x", storage=Storage(blob, MemoryConsensus()))
    store.put(b"a", b"1")
    collection.backup(store)
    with collection.snapshot(None) as (shard, snapshot):
        (part,) = snapshot.batches[0].parts
        rows = collection.open_part(part).read().to_batches()[0]
        attempt = Attempt.begin(blob, "chain-a", 5, 9)
        attempt.record(part, rows.slice(0, 1))
        (name,) = (info.name for info in blob.list("progress/"))
        body = json.loads(blob.get(name) or b"")
        del body["crc32"]
        rng = random.Random(4)
        found = 0
        for number in range(500):
            altered = sealed(lied(body, rng))
            blob.delete(name)
            blob.put(name, altered)
            try:
                left = find(blob, "chain-a", 5)
            except FormatVersionError:
                continue
            except BaseException as error:
                raise AssertionError(f"{number}: {altered!r}") from error
            found += left.farthest is not None
        assert 0 < found < 400
        assert shard.upper


# -- names that are no files ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fifo", "directory", "loop", "socket"])
@pytest.mark.parametrize("what", ["consensus/*/*-journal", "blob/*/part/*", "blob/*/rollup/*"])
def test_what_is_no_regular_file_is_told(
    store: kvstore.Store, tmp_path: Path, kind: str, what: str
) -> None:
    place = tmp_path / "c"
    store.put(b"a", b"1")
    backup.Collection(place).backup(store)
    for path in place.glob(what):
        path.unlink()
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "directory":
                path.mkdir()
            case "loop":
                path.symlink_to(path)
            case _:
                os.mknod(path, 0o140644)
    for use in (
        lambda: backup.Collection(place).verify(),
        lambda: backup.Collection(place).restore(tmp_path / "restored"),
    ):
        with pytest.raises(KVStoreError):
            use()


def test_a_blob_that_is_a_pipe_does_not_wait(tmp_path: Path) -> None:
    blob = FileBlob(tmp_path)
    os.mkfifo(tmp_path / "a")
    for use in (lambda: blob.get("a"), lambda: blob.get_range("a", start=0, length=1)):
        with pytest.raises(UsageError, match="regular"):
            use()
