"""Hostile bytes in a collection: each format ends in the documented error, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

import kvstore
from backup.sealed import KEY_RECORD, SealedConsensus, Secret, unlock
from backup.shard.blob import MemoryBlob
from backup.shard.consensus import MemoryConsensus, Versioned
from kvstore.errors import CorruptionError, FormatVersionError, UsageError
from kvstore.limits import KEY_RECORD_BYTES_MAX


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


@pytest.mark.parametrize("lie", KEY_LIES, ids=str)
def test_a_key_record_that_lies_is_damage_and_costs_nothing(lie: dict[str, Any]) -> None:
    record = Secret(passphrase="p").make_record(bytes(32))
    tracemalloc.start()
    with pytest.raises(CorruptionError, match="key record"):
        Secret(passphrase="p").open_record(with_lie(record, lie), "here")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


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
