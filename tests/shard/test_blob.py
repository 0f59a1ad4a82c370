"""Each blob implementation against the contract, and the rules of local files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.store import LocalStore, MemoryStore, ObjectStore

from kvstore.backup.sealed import DataKey, SealedBlob, Secret
from kvstore.backup.testing.blobs import BlobContract
from kvstore.errors import AccessDeniedError
from kvstore.storage.contract import Blob, put_retrying, sweep
from kvstore.storage.local_files import FileBlob
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.storage.object_store import ObjectBlob


class TestMemoryBlob(BlobContract):
    @pytest.fixture
    def blob(self) -> Blob:
        return MemoryBlob()


class TestFileBlob(BlobContract):
    @pytest.fixture
    def blob(self, tmp_path: Path) -> Blob:
        return FileBlob(tmp_path / "new" / "folder")

    def test_a_second_handle_sees_what_the_first_put(self, tmp_path: Path) -> None:
        FileBlob(tmp_path).put("a/b", b"x")
        assert FileBlob(tmp_path).get("a/b") == b"x"

    def test_a_crashed_put_is_never_listed_and_is_swept(self, tmp_path: Path) -> None:
        blob = FileBlob(tmp_path)
        blob.put("a/whole", b"x")
        (tmp_path / "a" / ".tmp-0123").write_bytes(b"half")
        assert [info.name for info in blob.list()] == ["a/whole"]
        assert blob.sweep(before_ns=0) == 0
        assert blob.sweep(before_ns=1 << 62) == 1
        assert os.listdir(tmp_path / "a") == ["whole"]

    def test_sweeping_reaches_through_encryption_and_is_nothing_elsewhere(
        self, tmp_path: Path
    ) -> None:
        inner = FileBlob(tmp_path)
        inner.put("a/whole", b"x")
        (tmp_path / "a" / ".tmp-1").write_bytes(b"ha")
        sealed = SealedBlob(inner, DataKey(inner, Secret(passphrase="p"), "here"))
        assert sweep(sealed, before_ns=1 << 62) == 1
        assert sweep(MemoryBlob(), before_ns=1 << 62) == 0
        assert os.listdir(tmp_path / "a") == ["whole"]

    def test_a_folder_that_was_removed_is_made_again(self, tmp_path: Path) -> None:
        blob = FileBlob(tmp_path / "root")
        blob.put("folder/a", b"x")
        shutil.rmtree(tmp_path / "root")
        put_retrying(blob, "folder/b", b"y")
        assert blob.get("folder/b") == b"y"

    def test_a_folder_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(AccessDeniedError):
            FileBlob(tmp_path / "file").put("a", b"x")


class TestObjectBlobInMemory(BlobContract):
    @pytest.fixture
    def blob(self) -> Blob:
        return ObjectBlob(MemoryStore(), "some/prefix")


class TestObjectBlobOnFiles(BlobContract):
    @pytest.fixture
    def blob(self, tmp_path: Path) -> Blob:
        return ObjectBlob(LocalStore(tmp_path))


class TestObjectBlobOnS3(BlobContract):
    @pytest.fixture
    def blob(self, s3_bucket: Callable[[], ObjectStore]) -> Blob:
        return ObjectBlob(s3_bucket(), "prefix")


@pytest.mark.azure
class TestObjectBlobOnAzure(BlobContract):
    @pytest.fixture
    def blob(self, azure_store: ObjectStore) -> Blob:
        return ObjectBlob(azure_store, "prefix")
