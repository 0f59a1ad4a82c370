"""The contracts of blobs and consensus fail storages that break one of their rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.backup.testing.blobs import BlobContract
from kvstore.backup.testing.consensus import ConsensusContract
from kvstore.storage.contract import Blob, BlobInfo, Cas, Versioned
from kvstore.storage.memory_storage import MemoryBlob, MemoryConsensus


class Overwrites(MemoryBlob):
    """Accepts other bytes under a name that exists."""

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self.delete(name)
        super().put(name, data)


class Shuffles(MemoryBlob):
    """Lists names in another order."""

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        return reversed(list(super().list(prefix)))


class Agrees(MemoryConsensus):
    """Tells each writer that it won."""

    def compare_and_set(self, key: str, *, expected: int | None, new: Versioned) -> Cas:
        super().compare_and_set(key, expected=expected, new=new)
        return Cas.COMMITTED


@pytest.mark.parametrize(
    ("blob", "rule"),
    [
        (Overwrites(), "test_a_name_is_written_once_and_a_retry_of_it_succeeds"),
        (Shuffles(), "test_list_is_ascending_and_cuts_by_prefix_not_by_folder"),
    ],
)
def test_a_broken_blob_fails_the_rule_it_breaks(blob: Blob, rule: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(BlobContract(), rule)(blob)


def test_a_consensus_that_lets_two_writers_win_fails() -> None:
    with pytest.raises(AssertionError):
        ConsensusContract().test_of_many_at_once_exactly_one_commits_each_version(Agrees())
