"""The imports of one store: adding, reverting and aborting them, and the stamps that readers use.

Invariants
1. An id is bound to one manifest (its digest), as long as the import is known; adding it again
   returns the first stamp.
2. A stamp leaves the view of readers only after the last row that refers to it has left the engine,
   because a reader takes the view first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Final, TypeAlias

from kvstore.base.arguments import INTEGER
from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.changes.index import OP_IMPORT, OP_REVERT, ChangeIndex
from kvstore.engine.api import WriteBatch
from kvstore.errors import (
    Argument,
    CorruptionError,
    HistoryGoneError,
    ImportRefusedError,
    NotFoundError,
    UsageError,
)
from kvstore.mvcc.expiry_records import EXPIRY
from kvstore.mvcc.meta import KeptRecords, Meta
from kvstore.mvcc.scan import RowArrays
from kvstore.mvcc.versions import Versions
from kvstore.timeline.committer import After, Committer
from kvstore.timeline.import_records import (
    IMPORT_PREFIX,
    UNCHANGED,
    Amend,
    ImportRecord,
    KeyLists,
    PastImports,
    StoredRows,
    import_fields,
    import_name,
    stored_import,
    tell_of,
)

Check: TypeAlias = "Callable[[], None] | None"
INGEST_DIRECTORY: Final = "ingest"
REFUSED_PREFIX: Final = "refused-"
"""The names of the directories in it that keep loads which their gates have refused."""
"""The directory to which `bulk.ingest` brings files before RocksDB takes them. After a crash the
files stay there."""


class Imports:
    """The imports of one store."""

    def __init__(self, versions: Versions, index: ChangeIndex, committer: Committer) -> None:
        self._versions = versions
        self._engine = versions.engine
        self._index = index
        self._committer = committer
        self._meta = Meta(self._engine)
        self._kept = KeptRecords(self._meta, IMPORT_PREFIX, stored_import)
        self._lists = KeyLists(self._meta)
        self.stored = StoredRows(self._engine, committer)
        self._aborting: set[int] = set()
        self._busy: dict[int, tuple[int, bool]] = {}
        """Imports that one thread has to itself: which thread, and whether it is adding."""
        self._busy_lock = threading.RLock()  # taken by `with`, as in `Frontiers`
        self._freed = threading.Condition(self._busy_lock)
        self.reload()

    def __repr__(self) -> str:
        records = [*self._records.values()]
        adding = sum(record.added is None for record in records)
        reverted = sum(record.reverted is not None for record in records)
        added = len(records) - adding - reverted
        return f"<kvstore.Imports: {added} added, {adding} being added, {reverted} reverted>"

    def reload(self) -> None:
        """Take the records as they are stored: another process may have written them. Costs 2 us
        an import, and 10 us if its record was not read before."""
        self.past = PastImports(self._meta)
        self._records = {record.import_id: record for record in self._kept.read()}
        self._versions.publish_stamps(
            {
                record.reference: record.lifetime
                for record in self._records.values()
                if record.added is not None
            }
        )

    def get(self, import_id: int) -> ImportRecord | None:
        """The record of an import; None if this store never had it, or forgot it.

        A past import has no spans.
        """
        known = self._records.get(import_id)
        return self.past.get(import_id) if known is None else known

    def all(self) -> list[ImportRecord]:
        """All imports that have rows: first the ones being added, then the others by the time they
        were added."""
        return sorted(self.every(), key=lambda record: record.added or 0)

    def every(self) -> list[ImportRecord]:
        """All imports that are not past, in no order."""
        return list(self._records.values())  # copied at once: other threads add to it

    # -- rows -------------------------------------------------------------------------------

    def spans_of(self, key: bytes) -> tuple[Span, ...]:
        """The spans of the import whose id the change index has as `key`."""
        return self._named(key).spans

    def rows_in(self, key: bytes, span: Span) -> Iterator[tuple[bytes, bytes | None]]:
        """The keys in `span` that the import `key` of the change index wrote, each with its value,
        ascending. Costs its rows if it has a key list, else a pass over its spans."""
        record = self._named(key)
        keys = self._lists.of(record.import_id)
        if keys is not None:
            wanted = (listed for listed in keys if listed in span)
            for rows in self._versions.imported_among(wanted, record.reference):
                yield from rows
            return
        for part in record.spans:
            shared = span.intersect(part.start, part.end)
            if shared is not None:
                yield from self._versions.imported_keys(shared, record.reference)

    def columns_in(self, record: ImportRecord, span: Span) -> Iterator[RowArrays]:
        """The rows in `span` that an import put and that the store keeps, as columns. A pass over
        the spans of the import."""
        for part in record.spans:
            shared = span.intersect(part.start, part.end)
            if shared is not None:
                yield from self._versions.imported_columns(shared, record.reference)

    def keys_of(self, record: ImportRecord) -> list[bytes] | None:
        """The keys of an import, ascending. None if it has no key list."""
        return self._lists.of(record.import_id)

    def touched_by(self, key: bytes) -> list[bytes] | tuple[Span, ...]:
        """The keys of the import whose id the change index has as `key`, or its spans if it has no
        key list."""
        record = self._named(key)
        keys = self._lists.of(record.import_id)
        return record.spans if keys is None else keys

    def _named(self, key: bytes) -> ImportRecord:
        record = self.get(int.from_bytes(key, "big"))
        if record is None:
            raise CorruptionError(f"import {key.hex()}", "in the change index, but has no record")
        return record

    # -- adding -----------------------------------------------------------------------------

    def find(self, record: ImportRecord) -> ImportRecord | None:
        """The stored record of the import that `record` describes, None if there is none.

        Raises `ImportRefusedError` if its id is known with another manifest, and `UsageError` if it
        was reverted.
        """
        known = self.get(record.import_id)
        if known is not None:
            known.require_standing()
        if known is not None and known.digest != record.digest:
            raise ImportRefusedError(
                str(record.import_id),
                "this id was used with another manifest",
                f"added at {known.added}: the same rows are there, others need another id"
                if known.added is not None
                else "store.imports.abort takes back a half-added one; or stage under another id",
            )
        return known

    @contextmanager
    def alone(self, import_id: int, *, wait: bool = True, adding: bool = False) -> Iterator[bool]:
        """Give this thread an import to itself. Without `wait`: False if another thread has it.

        Two threads that add an import come one after the other, and the second one finds it added:
        if it linked the rows once more, they would come back where they had been cleared. An abort
        waits for an add, which counts on the rows. The thread that has an import may take it again,
        unless it is `adding` it.
        """
        self._committer.health.require()
        former, is_ours = None, False
        try:
            with self._busy_lock:
                if wait:
                    former = self._mine(import_id)
                    if former is None:
                        self._freed.wait_for(lambda: import_id not in self._busy)
                if import_id not in self._busy or former is not None:
                    is_ours = True
                    self._busy[import_id] = get_ident(), adding
            yield is_ours
        finally:
            if is_ours:
                with self._busy_lock:
                    if former is None:
                        self._busy.pop(import_id, None)
                    else:
                        self._busy[import_id] = former
                    self._freed.notify_all()

    def _mine(self, import_id: int) -> tuple[int, bool] | None:
        """The claim that this thread has on an import. Raises `UsageError` if the thread is adding
        it."""
        found = self._busy.get(import_id)
        if found is None or found[0] != get_ident():
            return None
        if found[1]:
            raise UsageError(
                f"import {import_id} is being added by this thread",
                "raise an error from the progress of ingest to call it off, then abort it",
            )
        return found

    def prepare(self, record: ImportRecord, keys: Collection[bytes] | None = None) -> None:
        """Write down, durably, that an import is about to be added. Raises as `find`.

        `keys` are the keys of its files, if the caller has read them: see `FoundKeys`.
        """
        committer = self._committer
        committer.require_commits()
        with committer.lock:
            if self.find(record) is None:
                prepared = replace(record, prepared=committer.now())

                def stage(batch: WriteBatch) -> None:
                    self._stage(batch, prepared)
                    self._lists.stage(batch, prepared, keys)

                show = partial(self._records.__setitem__, record.import_id, prepared)
                committer.write_meta(stage, show, mend=committer.mend_by(self.reload))

    def flush(self) -> None:
        """Write the rows that many commits left in memory to a file. `link` would do it while
        commits wait, 10 ms for 26 MB. Raises as `prepare` in a store that takes no commits."""
        self._committer.require_commits()
        self._engine.flush()

    def link(self, files: Sequence[Path]) -> None:
        """Move the files into the engine. Nothing becomes visible. The cost does not depend on
        their size. Raises `ImportRefusedError` for files that the engine does not take."""
        self._committer.health.require()
        if not files:
            return
        try:
            self._engine.ingest(files)
        except CorruptionError as error:
            where, remedy = str(files[0].parent), "abort the import, and stage it again"
            raise ImportRefusedError(where, error.problem, remedy) from error

    def is_linked(self, record: ImportRecord) -> bool:
        """Whether the files of an import are in the engine: all are, if the first row is."""
        return bool(record.spans) and self.stored.has(record, record.spans[0].start)

    def add(
        self,
        import_id: int,
        *,
        check: Check = None,
        after: After | None = None,
        amend: Amend | None = None,
        report: str = "",
    ) -> Timestamp:
        """Make a linked import visible at one new timestamp, durably. Returns the stamp. `check`
        runs under the commit lock, and calls the import off by raising an error. `amend` runs after
        it and changes the rows, in the same batch. The writes that `after` makes follow the import:
        readers see both or none, also after a crash. Rows whose time to expire has passed are
        deleted before it returns. A `report` takes the place of the one that the record has."""
        with self._committer.lock:
            record = self.get(import_id)
            if record is None or import_id in self._aborting:
                raise UsageError(f"import {import_id} was aborted meanwhile", "ingest it again")
            if record.added is not None:
                record.require_standing()
                return record.added
            if report:
                record = replace(record, report=report)
            added = self._transition(record, OP_IMPORT, check, after, amend)
            self._committer.meters.imports_added += 1
        tell_of("import added", record, added, self._committer.where)
        if self._committer.has_due:  # rows whose time had passed: nobody may call again
            self._committer.catch_up()
        return added

    def abort(self, import_id: int) -> bool:
        """Forget an import that was not added; its rows are removed. O(entries in its spans).

        Returns whether there was one. Waits while it is being added; raises `UsageError` if it was
        added: revert it then.
        """
        import_id = INTEGER.check("import_id", import_id)
        with self.alone(import_id):
            return self._abort(import_id)

    def abort_idle(self, import_id: int) -> bool:
        """As `abort`, but leaves an import alone that is being added, or was added meanwhile."""
        with self.alone(import_id, wait=False) as is_ours:
            record = self._records.get(import_id)
            if not is_ours or record is None or record.added is not None:
                return False
            return self._abort(import_id)

    def revert(self, import_id: int, *, after: After | None = None) -> Timestamp:
        """Hide an import from now on: the rows that it covered show again. One record, whatever its
        size.

        `after` is as in `add`.

        Raises `UsageError` on an unknown import, `HistoryGoneError` if it was added at or below
        `since`: the state just before it may be gone. Reverting twice returns the first time.
        """
        import_id = INTEGER.check("import_id", import_id)
        committer = self._committer
        with committer.lock:
            record = self.get(import_id)
            if record is None or record.added is None:
                raise NotFoundError(
                    f"no import {import_id:016x} was added here",
                    (
                        Argument("store.imports.all()"),
                        " names all imports; one that was added long ago is forgotten: delete its "
                        "keys instead",
                    ),
                )
            if record.reverted is not None:
                return record.reverted
            if record.added <= committer.since:
                raise HistoryGoneError(
                    # A revert shows again what the import covered: the state just before it.
                    as_of=Timestamp(record.added - 1),
                    since=committer.since,
                    remedy=f"import {import_id} was added at {record.added}, and what it "
                    "covered may be gone: delete its keys instead",
                )
            reverted = self._transition(record, OP_REVERT, None, after)
            committer.meters.imports_reverted += 1
        tell_of("import reverted", record, reverted, committer.where)
        return reverted

    # -- what GC asks -----------------------------------------------------------------------

    def first_row(self, record: ImportRecord, start: bytes = b"") -> bytes | None:
        """The first key at or above `start` that has a row of the import, None if none has.

        Stops at the first. Costs a pass over the spans up to it, or look-ups of the listed keys.
        """
        span = Span(start)
        key = record.import_id.to_bytes(8, "big")
        return next((found for found, _ in self.rows_in(key, span)), None)

    def retire(
        self,
        gone: Sequence[ImportRecord],
        stage_rows: Callable[[WriteBatch], None] | None = None,
    ) -> None:
        """Turn imports that have no row and no change entry after this batch into past imports.
        `stage_rows` adds the fate of their last rows to the batch."""
        with self._committer.lock:
            turn = self.past.next_turn(len(gone))

            def stage(batch: WriteBatch) -> None:
                if stage_rows is not None:
                    stage_rows(batch)
                if gone:
                    self.past.stage(batch, gone, turn)
                for record in gone:
                    self._stage_delete(record.import_id, batch)

            def show() -> None:
                if not gone:
                    return
                self.past.take(turn)
                shown = dict(self._versions.view.stamps)
                for record in gone:
                    shown.pop(record.reference, None)
                self._versions.publish_stamps(shown)
                for record in gone:
                    self._records.pop(record.import_id, None)

            mend = self._committer.mend_by(self.reload)
            self._committer.write_meta(stage, show, durable=False, mend=mend)

    # -- inside -----------------------------------------------------------------------------

    def _transition(
        self,
        record: ImportRecord,
        op: int,
        check: Check,
        after: After | None,
        amend: Amend | None = None,
    ) -> Timestamp:
        changes = UNCHANGED

        def ready() -> None:
            nonlocal changes
            if check is not None:
                check()
            if amend is not None:
                changes = amend()

        def stage(
            batch: WriteBatch, timestamp: Timestamp, changeset: tuple[int, int]
        ) -> Callable[[], None]:
            if op == OP_IMPORT:
                changed = replace(record, added=timestamp, rows=record.rows + changes.rows)
                self.stored.stage(batch, record, changes)
                self._lists.amend(batch, changed, changes)
            else:
                changed = replace(record, reverted=timestamp)
            self._stage(batch, changed)
            key = record.import_id.to_bytes(8, "big")
            self._index.stage_event(batch, op, key, timestamp, changeset)

            def publish() -> None:
                if any(span.start.startswith(EXPIRY) for span in record.spans):
                    self._committer.expiries.note_records()
                self._records[record.import_id] = changed
                shown = {**self._versions.view.stamps, record.reference: changed.lifetime}
                self._versions.publish_stamps(shown)
                spans = [(span.start, span.end) for span in record.spans]
                self._committer.recent.add(timestamp, {}, spans)

            return publish

        def reload() -> None:
            if any(span.start.startswith(EXPIRY) for span in record.spans):
                self._committer.expiries.begin()
            self.reload()

        return self._committer.commit_event(
            stage, events=1, reload=reload, check=ready, after=after
        )

    def _abort(self, import_id: int) -> bool:
        committer = self._committer
        with committer.lock:
            record = self.get(import_id)
            if record is None or import_id in self._aborting:
                return False
            if record.added is not None:
                raise UsageError(
                    f"import {import_id} was added at {record.added}", "revert it instead"
                )
            self._aborting.add(import_id)
        try:
            self.stored.remove(record, self._lists.of(import_id))
            with committer.lock:
                forget = partial(self._records.pop, import_id)
                stage = partial(self._stage_delete, import_id)
                committer.write_meta(stage, forget, mend=committer.mend_by(self.reload))
        finally:
            self._aborting.discard(import_id)
        return True

    def _stage(self, batch: WriteBatch, record: ImportRecord) -> None:
        self._meta.stage(batch, import_name(record.import_id), import_fields(record))

    def _stage_delete(self, import_id: int, batch: WriteBatch) -> None:
        self._meta.stage_delete(batch, import_name(import_id))
        self._lists.stage_delete(batch, import_id)
