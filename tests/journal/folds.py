"""The simplest state a journal can carry: the list of its payloads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.storage.journal import Journal, Record
from tests.harness.disk import MemoryDisk

PATH = "/journal"
IDENTITY = 0x01020304


class Payloads:
    def __init__(self) -> None:
        self.items: list[bytes] = []

    def restore(self, record: Record) -> None:
        self.items.append(record.payload)

    def apply(self, record: Record) -> None:
        assert record.ordinal == len(self.items) + 1
        self.items.append(record.payload)

    def records(self) -> Iterator[tuple[int, bytes]]:
        return ((0, item) for item in self.items)


def open_journal(disk: MemoryDisk, fold: Payloads | None = None, **options: Any) -> Journal:
    fold = Payloads() if fold is None else fold
    options.setdefault("snapshot", None)
    return Journal.open(
        PATH,
        apply=fold.apply,
        restore=fold.restore,
        files=disk,
        identity=IDENTITY,
        content="test",
        **options,
    )


def state_of(disk: MemoryDisk) -> list[bytes]:
    """Open for writing, as a restarted process would; returns the payloads that are found."""
    fold = Payloads()
    open_journal(disk, fold).close()
    return fold.items


def outcome_of(disk: MemoryDisk) -> list[bytes] | KVStoreError:
    """The payloads that a restarted process finds, or the error that it gets."""
    try:
        return state_of(disk)
    except KVStoreError as error:
        return error


def live_file(disk: MemoryDisk) -> str:
    (path,) = (path for path in disk.inodes if path.endswith("-journal"))
    return path
