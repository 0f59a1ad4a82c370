"""The contract of blobs, as a suite that the tests of a blob inherit.

    class TestMyBlob(BlobContract):
        @pytest.fixture
        def blob(self) -> Blob:
            return MyBlob()

pytest then runs every rule of a blob in `kvstore.storage.contract` on `MyBlob`.
"""

from __future__ import annotations

import pytest

from kvstore.errors import UsageError
from kvstore.storage.contract import Blob, BlobInfo


class BlobContract:
    """The rules of every blob. A subclass gives an empty one by a fixture `blob`."""

    def test_a_name_reads_back_what_was_put(self, blob: Blob) -> None:
        blob.put("a/b/c.parquet", b"bytes")
        assert blob.get("a/b/c.parquet") == b"bytes"
        assert blob.size("a/b/c.parquet") == 5

    def test_a_missing_name_reads_as_none_everywhere(self, blob: Blob) -> None:
        assert blob.get("absent") is None
        assert blob.get_range("absent", start=0, length=1) is None
        assert blob.size("absent") is None
        assert blob.delete("absent") is None

    def test_a_name_is_written_once_and_a_retry_of_it_succeeds(self, blob: Blob) -> None:
        blob.put("once", b"first")
        blob.put("once", b"first")
        with pytest.raises(UsageError):
            blob.put("once", b"other")
        assert blob.get("once") == b"first"

    def test_an_empty_value_exists_and_its_delete_reports_zero_bytes(self, blob: Blob) -> None:
        blob.put("empty", b"")
        assert blob.get("empty") == b""
        assert blob.size("empty") == 0
        assert blob.delete("empty") == 0
        assert blob.get("empty") is None

    def test_delete_reports_the_size_and_frees_the_name(self, blob: Blob) -> None:
        blob.put("gone", b"12345")
        assert blob.delete("gone") == 5
        assert blob.delete("gone") is None
        blob.put("gone", b"new")
        assert blob.get("gone") == b"new"

    def test_ranges_are_cut_at_the_end(self, blob: Blob) -> None:
        blob.put("r", b"0123456789")
        assert blob.get_range("r", start=2, length=3) == b"234"
        assert blob.get_range("r", start=8, length=30) == b"89"
        assert blob.get_range("r", start=10, length=4) == b""

    def test_list_is_ascending_and_cuts_by_prefix_not_by_folder(self, blob: Blob) -> None:
        for name in ("p/b", "p/a", "p/ab/x", "q/a", "pz"):
            blob.put(name, name.encode())
        assert list(blob.list("p/a")) == [BlobInfo("p/a", 3), BlobInfo("p/ab/x", 6)]
        assert [info.name for info in blob.list("p")] == ["p/a", "p/ab/x", "p/b", "pz"]
        assert [info.name for info in blob.list()] == ["p/a", "p/ab/x", "p/b", "pz", "q/a"]
        assert list(blob.list("nothing/here")) == []

    def test_names_that_could_climb_out_of_the_folder_are_refused(self, blob: Blob) -> None:
        for name in ("../x", "/x", "a//b", "", "a/../b", ".hidden", "a b"):
            with pytest.raises(UsageError):
                blob.put(name, b"")

    def test_a_large_value_is_whole(self, blob: Blob) -> None:
        data = bytes(range(256)) * 40_000
        blob.put("large", data)
        assert blob.get("large") == data
        assert blob.get_range("large", start=10_000_000, length=4) == data[10_000_000:10_000_004]
