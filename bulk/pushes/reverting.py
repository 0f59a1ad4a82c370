"""A push is taken back: by the record of its import, or by rows in a store that has no such record.

A store that was put back from a backup has the versions that a push made, at the stamp of the push.
The revert there is an import of the store's own: each key whose value comes from the push gets the
value that it would have without it, or a delete. A push that the place of the store has forgotten
is found in the log, and its stamp in the record of its import.

Invariants
1. The result is the same as of a revert by the record: live writes that came after the push stay,
   and earlier pushes that were reverted show nothing.
2. All rows appear at one time, together with the position. A kill leaves them invisible, and the
   next look begins again.

Costs a pass over the versions of the store, and a look at the history of each key of the push. It
raises `HistoryGoneError` where the state below the push is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bulk.ingest import staging_beside
from bulk.part import PartWriter
from bulk.pushes.amended import AmendedPush
from bulk.pushes.log import PushEvent, PushLog
from bulk.pushes.modes import PushMode
from bulk.pushes.newer import PushStamps
from bulk.pushes.place import PushPlace, PushState, require_known_since, with_state
from bulk.pushes.pushes import import_id_of
from kvstore.commit import After
from kvstore.errors import ClosedError, ForkedError, HistoryGoneError, UsageError
from kvstore.errors.system import storage_errors
from kvstore.imports import FoundKeys, ImportRecord
from kvstore.limits import PUSHES_TOLD
from kvstore.mvcc import WriteSet
from kvstore.reserve import FIRST_ROW
from kvstore.span import RESERVED, Span
from kvstore.store import Store
from kvstore.timestamp import Timestamp


def revert_rows(
    store: Store,
    import_id: int,
    added: Timestamp,
    stamps: PushStamps,
    after: After,
    tell: Callable[[str], None],
) -> Timestamp:
    """Take the push back that was added at `added`. Returns the time.

    `import_id` is the id of the import that does so, and `after` makes the writes that belong to
    it. `stamps` are of all pushes of the store. `tell` is called between rows, and ends the work by
    an error.
    """
    imports = store.imports
    known = imports.get(import_id)
    if known is not None and known.added is None:
        imports.abort(import_id)  # its rows were made for an older state
    with (
        imports.alone(import_id, adding=True),
        store.snapshot() as snapshot,
        staging_beside(store) as directory,
    ):
        at = snapshot.as_of
        record, files = _written(store, import_id, added, at, stamps, directory, tell)
        amends = AmendedPush(store, PushMode(built_at=at), PushStamps(), tell)
        found = FoundKeys(record)
        for file in files:
            found.read(file)
        record, keys, _ = amends.begin(record, found.keys, at, files, directory)
        imports.prepare(record, keys)
        imports.link(files)
        return imports.add(import_id, after=after, amend=amends.linked())


def _written(
    store: Store,
    import_id: int,
    added: Timestamp,
    at: Timestamp,
    stamps: PushStamps,
    directory: Path,
    tell: Callable[[str], None],
) -> tuple[ImportRecord, list[Path]]:
    """The import that takes the push back, and its file."""
    with storage_errors(str(directory)):
        directory.mkdir(parents=True)
    writer = PartWriter(directory, import_id)
    for key, value in _below(store, added, at, stamps):
        tell("revert")
        writer.put(key, value) if value is not None else writer.delete(key)
    part = writer.finish()
    digest = f"revert of {added}"
    if part is None:
        return ImportRecord(import_id, digest, 0, 0, ()), []
    span = Span(part.smallest, part.largest + b"\x00")
    record = ImportRecord(import_id, digest, part.rows, part.size_bytes, (span,))
    return record, [directory / part.name]


def _below(
    store: Store, added: Timestamp, at: Timestamp, stamps: PushStamps
) -> Iterator[tuple[bytes, bytes | None]]:
    """The keys whose values at `at` come from the push, each with its value without the push."""
    without = stamps.without(added)
    for start, end in ((b"", RESERVED), (FIRST_ROW, None)):
        for change in store.changes(added - 1, added, start=start, end=end):
            if stamps.last_write(store, change.key, at).timestamp == added:
                yield change.key, without.value(store, change.key, at)


class Reverts:
    """Takes pushes back in one store, as the events of a log ask for it."""

    def __init__(
        self, store: Store, log: PushLog, place: PushPlace, shard: int, tell: Callable[[str], None]
    ) -> None:
        self._store, self._log, self._place, self._shard = store, log, place, shard
        self._tell = tell

    def take_back(self, event: PushEvent, fields: dict[str, Any]) -> None:
        """Take back the push of `event`, if the store has it, and pass the event. `fields` are the
        place. A store that cannot do it tells so in the state of the push."""
        told: Mapping[str, Any] | None = fields["pushes"].get(str(event.number))
        if told is None:
            told = self._forgotten(event, fields)
        if told is None or told["state"] != "added":
            state = None
            if told is not None and told["state"] == "refused":  # it is not tried again
                state = PushState("refused", told["error"], import_id=told["import"])
            self._place.move(fields, event.number, state)
            return
        added, import_id = Timestamp(told["at"]), told["import"]
        by_rows = self._by_rows(told, fields["pushes"])
        moved = {**fields, "log": event.position}

        def after(reverted: Timestamp) -> WriteSet:
            state = PushState("reverted", "", reverted, added, import_id, by_rows=by_rows)
            return self._place.moving(with_state(moved, event.number, state))

        try:
            if by_rows:
                require_known_since(fields["pushes"], told.get("event") or 0)
                own = import_id_of(f"revert/{self._place.name}/{event.number}", self._shard)
                stamps = self._place.stamps()
                reverted = revert_rows(self._store, own, added, stamps, after, self._tell)
            else:
                reverted = self._store.imports.revert(import_id, after=after)
        except (ClosedError, ForkedError):
            raise
        except (UsageError, HistoryGoneError) as error:
            problem = f"revert refused: {type(error).__name__}: {error}"
            kept = PushState("added", problem, added, import_id=import_id)
            self._place.move(fields, event.number, kept)
            return
        if self._place.state_of(event.number) != "reverted":  # it was reverted by hand before
            self._store.positions.write(after(reverted))

    def _forgotten(self, event: PushEvent, fields: dict[str, Any]) -> dict[str, Any] | None:
        """The state of a push that the place has forgotten, as the records of imports have it. None
        if the store never took the push."""
        if len(fields["pushes"]) < PUSHES_TOLD:
            return None
        push = self._log.push_of(event)
        if push is None or self._shard >= push.shards:
            return None
        import_id = push.imports[self._shard].import_id
        record = self._store.imports.get(import_id)
        if record is None or record.added is None:
            return PushState("refused", error=_NO_RECORD).fields()
        return PushState("added", at=record.added, import_id=import_id).fields()

    def _by_rows(self, told: Mapping[str, Any], pushes: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether a push is taken back by rows. It is where the store has no record of its import,
        and after an earlier push was taken back by rows, which a revert by the record would show
        again."""
        record = self._store.imports.get(told["import"])
        if record is None or record.added != told["at"]:
            return True
        return any(each.get("by_rows") and each["added"] < told["at"] for each in pushes.values())


_NO_RECORD: Final = (
    "revert refused: the store has no record of this push; if it has its rows, push the right "
    "values"
)
