"""Live keys that came in the way of an import after it was checked against the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from kvstore.changes import Change
from kvstore.errors import KEYS_NAMED_MAX, KeyConflictError
from kvstore.store import Store
from kvstore.timeline.import_records import ImportRecord
from kvstore.timeline.reserved import FIRST_ROW


@dataclass(frozen=True, slots=True)
class NoneCame:
    """The check that no key of the linked import `record` came alive after `since`.

    `since=0` checks all live keys: the newest state is always readable. The caller holds the commit
    lock, so no commit comes between. Costs a look-up for each key that was put since.
    """

    store: Store
    record: ImportRecord
    since: int

    def __call__(self) -> None:
        """Raise `KeyConflictError` for keys that came alive."""
        changes = self._changes(None)
        if any(span.start >= FIRST_ROW for span in self.record.spans):
            changes = chain(changes, self._changes(FIRST_ROW))
        keys = (
            change.key
            for change in changes
            if change.op == "put" and self.store.imports.stored.has(self.record, change.key)
        )
        alive = list(
            islice((key for key in keys if self.store.get(key) is not None), KEYS_NAMED_MAX)
        )
        if alive:
            raise KeyConflictError(alive)

    def _changes(self, start: bytes | None) -> Iterator[Change]:
        """The changes since the check, from the key `start` on; or of all plain keys."""
        if self.since:
            return self.store.changes(self.since, start=start, order="time")
        return self.store.changes(0, start=start, revisions="latest")
