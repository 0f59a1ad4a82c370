"""Encryption: nothing shows without the key, and a wrong or damaged key is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore import backup
from kvstore.errors import (
    CorruptionError,
    UsageError,
)
from tests.backup.histories import (
    flip_a_bit,
)

pytestmark = pytest.mark.usefixtures("each_engine")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("0f" * 32)
    return path


def test_encrypted_collections_need_their_key_and_show_nothing(
    store: kvstore.Store, tmp_path: Path, key_file: Path
) -> None:
    marker = b"find me if you can, find me if you can"
    for name, opened in {
        "passphrase": {"passphrase": "correct horse"},
        "key-file": {"key_file": key_file},
    }.items():
        url = tmp_path / name
        collection = backup.Collection(url, **opened)  # type: ignore[arg-type]
        store.put(b"secret-key", marker)
        collection.backup(store)
        store.put(b"secret-key", b"2")
        collection.backup(store)
        collection.compact()
        collection.verify()
        stored = b"".join(path.read_bytes() for path in url.rglob("*") if path.is_file())
        assert marker not in stored
        assert b"secret-key" not in stored
        assert store.store_id.encode() not in stored
        collection.restore(tmp_path / f"restored-{name}", as_of=collection.since or None)
        with pytest.raises(UsageError, match="is encrypted"):
            backup.Collection(url)
    with pytest.raises(UsageError, match="does not open"):
        backup.Collection(tmp_path / "passphrase", "wrong")
    with pytest.raises(UsageError, match="a passphrase"):
        backup.Collection(tmp_path / "passphrase", key_file=key_file)


def test_a_collection_in_the_clear_takes_no_key(
    store: kvstore.Store, collection: backup.Collection
) -> None:
    store.put(b"a", b"1")
    collection.backup(store)
    with pytest.raises(UsageError, match="not encrypted"):
        backup.Collection(collection.url, "passphrase")


def test_looking_for_an_encrypted_collection_makes_none(
    store: kvstore.Store, tmp_path: Path
) -> None:
    collection = backup.Collection(tmp_path / "mistyped", "passphrase")
    assert collection.list() == []
    assert collection.source is None
    assert not (tmp_path / "mistyped").exists()
    other = backup.Collection(tmp_path / "mistyped", "passphrase")
    store.put(b"a", b"1")
    other.backup(store)
    assert len(collection.list()) == 1  # this handle reads with the key that the other handle made
    with pytest.raises(UsageError, match="does not open"):
        backup.Collection(tmp_path / "mistyped", "other")


def test_a_collection_begun_in_the_clear_beside_is_not_encrypted(
    store: kvstore.Store, tmp_path: Path
) -> None:
    sealed = backup.Collection(tmp_path / "both", "passphrase")
    backup.Collection(tmp_path / "both").backup(store)
    with pytest.raises(UsageError, match="not encrypted"):
        sealed.backup(store)
    assert len(backup.Collection(tmp_path / "both").list()) == 1


def test_an_empty_passphrase_encrypts_nothing(store: kvstore.Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="passphrase is empty"):
        backup.Collection(tmp_path / "sealed", "").backup(store)
    assert not (tmp_path / "sealed").exists()


def test_a_passphrase_may_be_any_bytes_of_the_environment(
    store: kvstore.Store, tmp_path: Path
) -> None:
    backup.Collection(tmp_path / "sealed", "p\udcff").backup(store)
    assert backup.Collection(tmp_path / "sealed", "p\udcff").verify().backups == 1


def test_a_key_record_that_is_damaged_is_a_wrong_key_or_corruption(
    store: kvstore.Store, tmp_path: Path
) -> None:
    backup.Collection(tmp_path / "sealed", "passphrase").backup(store)
    record = tmp_path / "sealed" / "blob" / "encryption.json"
    whole = record.read_bytes()
    for damaged in (
        b"",
        whole[:-1],
        bytes(len(whole)),
        b"[]",
        whole.replace(b'"kdf"', b'"kdg"'),
        whole.replace(b'"n": 32768', b'"n": 32769'),
        whole.replace(b'"salt": "', b'"salt": "x'),
    ):
        record.write_bytes(damaged)
        with pytest.raises(CorruptionError):
            backup.Collection(tmp_path / "sealed", "passphrase")
    record.unlink()
    with pytest.raises(CorruptionError, match="holds the key"):
        backup.Collection(tmp_path / "sealed", "passphrase")
    record.write_bytes(whole.replace(b'"r": 8', b'"r": 9'))
    with pytest.raises(UsageError, match="does not open"):
        backup.Collection(tmp_path / "sealed", "passphrase")


def test_damaged_ciphertext_is_refused(store: kvstore.Store, tmp_path: Path) -> None:
    collection = backup.Collection(tmp_path / "sealed", "passphrase")
    store.put(b"a", bytes(100_000))
    collection.backup(store)
    for part in (tmp_path / "sealed").rglob("*.parquet"):
        flip_a_bit(part)
    with pytest.raises(CorruptionError):
        collection.verify()
    with pytest.raises(CorruptionError):
        collection.restore(tmp_path / "restored")
