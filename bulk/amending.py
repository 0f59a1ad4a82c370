"""An import that is amended for the store that takes it: rows that its files do not have, and rows
that are left out.

    begin     before the record is written: further files, and the record with their rows
    linked    all rows are in the store, and nobody sees them
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvstore.imports import Amend, ImportRecord
from kvstore.span import Span
from kvstore.timestamp import Timestamp


class Amending(Protocol):
    """The amendments to one import. The methods are called once each, in their order here."""

    @property
    def replaced(self) -> Sequence[Span]:
        """The spans in which the import deletes each key that it lacks."""
        ...

    def begin(
        self,
        record: ImportRecord,
        keys: list[bytes] | None,
        at: Timestamp,
        files: Sequence[Path],
        directory: Path,
    ) -> tuple[ImportRecord, list[bytes] | None, list[Path]]:
        """The record and the key list with all rows, and files in `directory` with further rows.

        `files` have the rows of the import, and `keys` is its key list. The history of the store is
        kept from `at`, its newest time, until the import is added.
        """
        ...

    def linked(self) -> Amend:
        """Look at the rows of the import in the store. Returns the call that makes the last
        changes, under the commit lock."""
        ...
