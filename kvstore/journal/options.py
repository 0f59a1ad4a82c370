"""How a journal is written: its content, its sync policy, and the size of its files."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import UsageError
from kvstore.journal.sync import Sync
from kvstore.limits import JOURNAL_FILE_BYTES, JOURNAL_FILE_RECORDS


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """`content` names the meaning of the records. A live file ends at `file_bytes` or
    `file_records`. Raises `UsageError` for values that no journal can have."""

    content: str
    sync: Sync
    file_bytes: int
    file_records: int

    def __post_init__(self) -> None:
        if not self.content.isascii():
            raise UsageError(f"content {self.content!r} is not ASCII", "name it by ASCII letters")
        if self.file_bytes < 1 or self.file_records < 1:
            raise UsageError("file_bytes and file_records must be positive", "pass 1 or more")

    @classmethod
    def of(
        cls, content: str, sync: Sync, file_bytes: int | None, file_records: int | None
    ) -> JournalOptions:
        """Options in which None stands for the limit of `kvstore.limits`."""
        return cls(
            content,
            sync,
            JOURNAL_FILE_BYTES if file_bytes is None else file_bytes,
            JOURNAL_FILE_RECORDS if file_records is None else file_records,
        )
