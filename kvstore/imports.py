"""Imports: bulk loads that get their timestamp when they are added, at a cost that does not
depend on their size.

The rows of an import carry its id where other versions carry a timestamp. Nobody sees them until
one record says when the import was added; that record is the commit.

    import/<id> := state "adding" | "added" | "reverted", digest, rows, bytes,
                   spans [[start, end] hex], prepared, added, reverted

    nothing --prepare--> adding --add--> added --revert--> reverted
                            `---abort--> nothing              |
                  nothing <--forget-- (no row left) ----------'

Invariants
1. The record of an import is durable before its files enter the engine: whatever a crash leaves
   can be found, added by a second try, or aborted.
2. An id is bound to one manifest (its digest) for ever; adding it again returns the first stamp.
3. `added` and `reverted` never change once set.
4. A record outlives the last row that refers to it and the last change entry that names it: only
   then GC forgets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, Final, TypeAlias

from kvstore.changes.entry import OP_IMPORT, OP_REVERT
from kvstore.changes.index import ChangeIndex
from kvstore.codec.json import JsonObject
from kvstore.codec.keys import TAIL_BYTES, TOMBSTONE, VALUE, encode_reference, span_bounds
from kvstore.codec.ordered import frame
from kvstore.commit import Committer, Staged
from kvstore.engine.api import DATA, WriteBatch, chunks
from kvstore.engine.loose import LooseFile, told_once
from kvstore.errors import CorruptionError, HistoryGoneError, ImportRefusedError, UsageError
from kvstore.meta import Meta, optional_timestamp_of, span_of
from kvstore.mvcc.version import Lifetime
from kvstore.mvcc.versions import Versions
from kvstore.span import Span
from kvstore.timestamp import Timestamp

INGEST_DIRECTORY: Final = "ingest"
"""Where `bulk.ingest` brings files before RocksDB takes them; what a crash leaves stays there."""

_PREFIX = "import/"

Tell: TypeAlias = "Callable[[Sequence[Path | str]], list[LooseFile]]"
"""Reads the figures of sorted files: bounds and entries, by key."""


@dataclass(frozen=True, slots=True)
class ImportRecord:
    """The record of one import in a store."""

    import_id: int
    digest: str
    rows: int
    size_bytes: int
    spans: tuple[Span, ...]
    prepared: Timestamp | None = None
    added: Timestamp | None = None
    reverted: Timestamp | None = None

    @property
    def reference(self) -> bytes:
        """The suffix that its rows carry."""
        return encode_reference(self.import_id)

    @property
    def lifetime(self) -> Lifetime:
        """When its rows are visible, once it was added."""
        assert self.added is not None
        if self.reverted is None:
            return Lifetime(self.added)
        return Lifetime(self.added, self.reverted)

    @property
    def is_spent(self) -> bool:
        """Whether GC has taken its last row: all that is kept is who it was and when."""
        return bool(self.rows) and not self.spans

    @property
    def state(self) -> str:
        """`adding`, `added` or `reverted`."""
        if self.reverted is not None:
            return "reverted"
        return "adding" if self.added is None else "added"


class Imports:
    """The imports of one store."""

    def __init__(
        self, versions: Versions, index: ChangeIndex, committer: Committer, tell: Tell = told_once
    ) -> None:
        """`tell` reads the figures of sorted files that no store has taken."""
        self._versions = versions
        self._engine = versions.engine
        self._index = index
        self._committer = committer
        self._tell = tell
        self._meta = Meta(self._engine)
        self._records = {
            import_id: _read(import_id, record)
            for import_id, record in self._meta.numbered(_PREFIX)
        }
        self._aborting: set[int] = set()
        self._busy: dict[int, tuple[int, bool]] = {}
        """Imports that one thread has to itself: which thread, and whether it is adding."""
        self._busy_lock = threading.RLock()  # taken by itself, as those of the committer
        self._freed = threading.Condition(self._busy_lock)
        self._publish()

    def get(self, import_id: int) -> ImportRecord | None:
        """The record of an import, None if this store has never heard of it."""
        return self._records.get(import_id)

    def all(self) -> list[ImportRecord]:
        """All imports that have rows: those being added first, then by the time they were added."""
        # Copied at once: other threads add to it while this one looks.
        kept = [record for record in list(self._records.values()) if not record.is_spent]
        return sorted(kept, key=lambda record: record.added or 0)

    def spans_of(self, key: bytes) -> tuple[bytes, list[Span]]:
        """Suffix and spans of the import whose id the change index has as `key`."""
        record = self._records.get(int.from_bytes(key, "big"))
        if record is None:
            raise CorruptionError(f"import {key.hex()}", "in the change index, but has no record")
        return record.reference, list(record.spans)

    # -- adding -----------------------------------------------------------------------------

    def find(self, record: ImportRecord) -> ImportRecord | None:
        """The stored record of the import that `record` describes, None if there is none.

        Raises `ImportRefusedError` if its id is known with another manifest.
        """
        known = self._records.get(record.import_id)
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

        Of two threads that add it, the later finds it added: rows that it linked after that would
        come back where they had been cleared. An abort must not take away rows that an add has
        counted on. The thread that has it may take it again, unless it is `adding` it.
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
        """What this thread has of an import already. Raises `UsageError` if it is adding it."""
        found = self._busy.get(import_id)
        if found is None or found[0] != get_ident():
            return None
        if found[1]:
            raise UsageError(
                f"import {import_id} is being added by this thread",
                "what the progress of ingest raises calls it off; abort it then",
            )
        return found

    def prepare(self, record: ImportRecord) -> None:
        """Write down, durably, that an import is about to be added. Raises as `find`."""
        committer = self._committer
        committer.require_commits()
        with committer.lock:
            if self.find(record) is None:
                self._write(replace(record, prepared=committer.now()))

    def told_files(self, files: Sequence[Path | str]) -> list[LooseFile]:
        """The figures of sorted files that no store has taken, by key: bounds, entries."""
        self._committer.health.require()
        return self._tell(files)

    def link(self, files: Sequence[Path]) -> None:
        """Move the files into the engine. Nothing becomes visible. Flat in their size."""
        self._committer.health.require()
        if files:
            self._engine.ingest(files)

    def is_linked(self, record: ImportRecord) -> bool:
        """Whether the files of an import are in the engine.

        They enter it all or none, so the first row answers for all.
        """
        return bool(record.spans) and self.has_row(record, record.spans[0].start)

    def has_row(self, record: ImportRecord, key: bytes) -> bool:
        """Whether a linked import has a row for `key`. At most two look-ups."""
        stem = frame(key) + record.reference
        return any(self._engine.get(DATA, stem + kind) is not None for kind in (VALUE, TOMBSTONE))

    def add(self, import_id: int, *, check: Callable[[], None] | None = None) -> Timestamp:
        """Make a linked import visible at one new timestamp, durably. Returns the stamp.

        `check` runs under the commit lock, and calls the import off by raising an error.
        """
        with self._committer.lock:
            record = self._records.get(import_id)
            if record is None or import_id in self._aborting:
                raise UsageError(f"import {import_id} was aborted meanwhile", "ingest it again")
            if record.added is not None:
                return record.added
            return self._transition(record, OP_IMPORT, check)

    def abort(self, import_id: int) -> bool:
        """Forget an import that was not added; its rows are removed. O(entries in its spans).

        Returns whether there was one. Waits while it is being added; raises `UsageError` if it was
        added: revert it then.
        """
        require_import_id(import_id)
        with self.alone(import_id):
            return self._abort(import_id)

    def abort_idle(self, import_id: int) -> bool:
        """As `abort`, but leaves alone what is being added, or was added meanwhile."""
        with self.alone(import_id, wait=False) as is_ours:
            record = self._records.get(import_id)
            if not is_ours or record is None or record.added is not None:
                return False
            return self._abort(import_id)

    def revert(self, import_id: int) -> Timestamp:
        """Hide an import from now on: what was below shows again. One record, whatever its size.

        Raises `UsageError` on an unknown import, `HistoryGoneError` if it was added at or below
        `since`: the state just before it may be gone. Reverting twice returns the first time.
        """
        require_import_id(import_id)
        committer = self._committer
        with committer.lock:
            record = self._records.get(import_id)
            if record is None or record.added is None:
                raise UsageError(f"no import {import_id} was added here", "see store.imports.all()")
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
            return self._transition(record, OP_REVERT, None)

    # -- what GC asks -----------------------------------------------------------------------

    def first_row(self, record: ImportRecord, start: bytes = b"") -> bytes | None:
        """The first key at or above `start` that has a row of the import, None if none has.

        Stops at the first; costs a pass over the spans up to it.
        """
        for span in sorted(record.spans, key=lambda span: span.start):
            part = span.intersect(start, None)
            if part is not None:
                for key, _ in self._versions.imported_keys(part, record.reference):
                    return key
        return None

    def forget(self, gone: Sequence[ImportRecord]) -> None:
        """Let go of imports of which no row and no change entry is left.

        What stays of a record is who it was and when: a late retry of the job that added it
        must get the first stamp, not add it again.
        """
        if not gone:
            return
        spent = [replace(record, spans=()) for record in gone]

        def stage(batch: WriteBatch) -> None:
            for record in spent:
                self._meta.stage(batch, _name(record.import_id), _fields(record))

        with self._committer.lock:
            self._committer.write_meta(stage, durable=False)
            self._records.update((record.import_id, record) for record in spent)
            self._publish()

    # -- inside -----------------------------------------------------------------------------

    def _transition(
        self, record: ImportRecord, op: int, check: Callable[[], None] | None
    ) -> Timestamp:
        def stage(batch: WriteBatch, timestamp: Timestamp, changeset: tuple[int, int]) -> Staged:
            if op == OP_IMPORT:
                changed = replace(record, added=timestamp)
            else:
                changed = replace(record, reverted=timestamp)
            self._meta.stage(batch, _name(record.import_id), _fields(changed))
            key = record.import_id.to_bytes(8, "big")
            self._index.stage_event(op, key, timestamp, batch, changeset)

            def publish() -> None:
                self._records[record.import_id] = changed
                self._publish()
                spans = [(span.start, span.end) for span in record.spans]
                self._committer.recent.add(timestamp, (), spans)

            return 1, publish

        return self._committer.commit_staged(stage, durability="sync", check=check)

    def _abort(self, import_id: int) -> bool:
        committer = self._committer
        with committer.lock:
            record = self._records.get(import_id)
            if record is None or import_id in self._aborting:
                return False
            if record.added is not None:
                raise UsageError(
                    f"import {import_id} was added at {record.added}", "revert it instead"
                )
            self._aborting.add(import_id)
        try:
            self._remove_rows(record)
            with committer.lock:
                committer.write_meta(lambda batch: self._meta.stage_delete(batch, _name(import_id)))
                del self._records[import_id]
        finally:
            self._aborting.discard(import_id)
        return True

    def _write(self, record: ImportRecord) -> None:
        name, fields = _name(record.import_id), _fields(record)
        self._committer.write_meta(lambda batch: self._meta.stage(batch, name, fields))
        self._records[record.import_id] = record

    def _publish(self) -> None:
        self._versions.publish_stamps(
            {
                record.reference: record.lifetime
                for record in self._records.values()
                if record.added is not None and not record.is_spent
            }
        )

    def _remove_rows(self, record: ImportRecord) -> None:
        for span in record.spans:
            for keys, _ in chunks(self._engine.cursor(DATA, *span_bounds(span.start, span.end))):
                doomed = [key for key in keys if key[-TAIL_BYTES:-1] == record.reference]
                if doomed:
                    self._committer.write_meta(partial(self._stage_removal, doomed), durable=False)

    def _stage_removal(self, keys: Sequence[bytes], batch: WriteBatch) -> None:
        data = self._engine.families[DATA]
        for key in keys:
            batch.delete(key, data)


def require_import_id(import_id: object) -> None:
    """Raise `UsageError` on anything but an integer."""
    if not isinstance(import_id, int):
        raise UsageError(f"import id {import_id!r}", "ids are integers: see store.imports.all()")


def _name(import_id: int) -> str:
    return f"{_PREFIX}{import_id:016x}"


def _hex(end: bytes | None) -> str | None:
    return None if end is None else end.hex()


def _fields(record: ImportRecord) -> dict[str, Any]:
    return {
        "state": record.state,
        "digest": record.digest,
        "rows": record.rows,
        "bytes": record.size_bytes,
        "spans": [[span.start.hex(), _hex(span.end)] for span in record.spans],
        "prepared": record.prepared,
        "added": record.added,
        "reverted": record.reverted,
    }


def _read(import_id: int, record: JsonObject) -> ImportRecord:
    """An import from its record. Raises `CorruptionError` where it is not of an import's shape."""
    spans = record.items_of("spans", list)
    if not import_id or any(len(bounds) != 2 for bounds in spans):
        raise record.damaged("import id 0 is never given out, and a span has two bounds")
    found = ImportRecord(
        import_id=import_id,
        digest=record.text("digest"),
        rows=record.integer("rows"),
        size_bytes=record.integer("bytes"),
        spans=tuple(span_of(record, start, end) for start, end in spans),
        prepared=optional_timestamp_of(record, "prepared"),
        added=optional_timestamp_of(record, "added"),
        reverted=optional_timestamp_of(record, "reverted"),
    )
    if found.reverted is not None and (found.added is None or found.added >= found.reverted):
        raise record.damaged(f"added at {found.added}, reverted at {found.reverted}")
    if record.text("state") != found.state:
        raise record.damaged(f"its state is {record['state']!r}, its times say {found.state!r}")
    return found
