"""The import of a push, amended for one store: what the mode of the push asks for.

    replace      each live key of the spans that the push lacks gets a row that deletes it
    built_at     each key that was written since then loses its row

Invariants
1. Both are rows of the import, or rows that the import lacks. So they have the stamp of the push,
   history, feeds and backups show them as they show the import, and its revert undoes them in O(1).
2. A key that is kept has no row: no reader sees an older value of it at any time, its expiry stays,
   and a revert does not touch it.
3. The pass over the spans and the search for newer writes run beside other commits. Under the
   commit lock only keys that were written since are looked at.

One pass over the live keys of the spans is the price of a replace. The keys that were written since
`built_at` are held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from bulk.fetching import require_space
from bulk.pushes.modes import PushMode
from bulk.pushes.newer import NOTHING, PushStamps, written
from bulk.sst import SstFile
from kvstore.codec.keys import TAIL_BYTES, TOMBSTONE
from kvstore.codec.ordered import frame, unframe_all
from kvstore.engine.loose import LooseFiles
from kvstore.errors.system import storage_errors
from kvstore.imports import Amend, ImportRecord, RowChanges
from kvstore.limits import SETTLE_ROWS_MAX
from kvstore.mvcc.expiry import CARRIED, EXPIRY, carried_key, decode_due, waiting_key
from kvstore.reserve import FIRST_ROW
from kvstore.span import Span, merge_spans
from kvstore.store import Store
from kvstore.timestamp import Timestamp

_DELETED: Final = "deleted.sst"
"""The file of the rows that delete, beside the files of the push."""


class _Deletes(NamedTuple):
    """A file of rows that delete. `keys` are their keys, if they are few."""

    path: Path
    rows: int
    keys: list[bytes]


class AmendedPush:
    """See `bulk.amending.Amending`."""

    def __init__(
        self, store: Store, how: PushMode, stamps: PushStamps, tell: Callable[[str], None]
    ) -> None:
        """`stamps` are of the pushes that the store has taken. `tell` is called again and again
        while keys are compared. An error that it raises ends the work."""
        self._store, self._how, self._stamps = store, how, stamps
        self._tell = tell
        self._at = Timestamp(0)
        self._newer = NOTHING
        self._left_out: set[bytes] = set()

    @property
    def replaced(self) -> Sequence[Span]:
        """See `Amending.replaced`. A push that keeps newer writes names no span, because it may
        leave any key of its spans as it is."""
        return self._how.spans if self._how.built_at is None else ()

    def begin(
        self,
        record: ImportRecord,
        keys: list[bytes] | None,
        at: Timestamp,
        files: Sequence[Path],
        directory: Path,
    ) -> tuple[ImportRecord, list[bytes] | None, list[Path]]:
        """See `Amending.begin`."""
        self._at = at
        spans = tuple(merge_spans([*record.spans, *self._how.spans]))
        self._record = replace(record, spans=spans)
        built_at = self._how.built_at
        if built_at is not None and built_at < at:
            stamps = self._stamps
            found = written(self._store, self._searched(), stamps, since=built_at, upto=at)
            kept = {key: time for key, time in found.keys.items() if self._is_newer(key)}
            self._newer = found._replace(keys=kept)
        if not self._how.spans:
            return self._record, keys, []
        deletes = self._write_deletes(files, directory)
        if deletes is None:
            return self._record, keys, []
        size = record.size_bytes + deletes.path.stat().st_size
        self._record = replace(self._record, rows=record.rows + deletes.rows, size_bytes=size)
        listed = None if keys is None or not self._record.is_small else [*keys, *deletes.keys]
        return self._record, listed, [deletes.path]

    def _write_deletes(self, files: Sequence[Path], directory: Path) -> _Deletes | None:
        """Write the rows that delete the keys which the push lacks. None if there are none. Raises
        `OutOfSpaceError` before they take the room that a fetch leaves free."""
        with storage_errors(str(directory)):
            directory.mkdir(parents=True, exist_ok=True)
        file, path = SstFile(directory / _DELETED), directory / _DELETED
        rows, listed = 0, list[bytes]()
        try:
            for keys in self._missing(files):
                stored = [frame(key) + self._record.reference + TOMBSTONE for key in keys]
                require_space(directory, sum(map(len, stored)))
                file.add(stored, [b""] * len(stored))
                rows += len(stored)
                if rows <= SETTLE_ROWS_MAX:
                    listed += keys
            return None if file.finish() is None else _Deletes(path, rows, listed)
        except BaseException:
            file.abandon()
            raise

    def linked(self) -> Amend:
        """See `Amending.linked`."""
        self._leave_out(self._newer.keys)
        for span, _ in self._newer.spans:
            self._leave_out(key for key in self._rows_in(span) if self._is_newer(key))
        return self._at_commit

    def _at_commit(self) -> RowChanges:
        upto = Timestamp(self._store.upper - 1)
        since = written(self._store, self._searched(), PushStamps(), since=self._at, upto=upto)
        newer = [key for key, time in since.keys.items() if self._keeps(time)]
        self._leave_out(newer)
        for span, time in since.spans:
            if self._keeps(time):
                self._leave_out(self._rows_in(span))
        return RowChanges(self._left_out, self._appeared(since.keys.keys() - {*newer}, upto))

    def _keeps(self, time: int) -> bool:
        return self._how.built_at is not None and time > self._how.built_at

    def _is_newer(self, key: bytes) -> bool:
        """Whether a reader sees a live write to `key` that is newer than the build of the push. A
        push that came after that write may cover it."""
        built_at, stamps = self._how.built_at, self._stamps
        if built_at is None:
            return False
        if all(stamp <= built_at for stamp in chain(stamps.standing, stamps.passed)):
            return True
        return stamps.is_live(self._store, key, self._at, since=built_at)

    def _searched(self) -> list[Span]:
        """The spans in which writes are looked for: plain keys, keys of tables, or both."""
        spans = self._record.spans
        plain = [Span().plain()] if any(each.start < FIRST_ROW for each in spans) else []
        tables = [Span(FIRST_ROW)] if any(_has_rows(each) for each in spans) else []
        return plain + tables

    def _missing(self, files: Sequence[Path]) -> Iterator[list[bytes]]:
        """The live keys of the spans that the files lack, ascending, without the newer ones."""
        newer = self._newer.keys
        with LooseFiles(files) as loose:
            for span in merge_spans(self._how.spans):
                live = self._store.scan_batches(span.start, span.end, as_of=self._at)
                keys = (batch.column("key").to_pylist() for batch in live)
                pushed = (_keys_of(stored) for stored, _ in loose.rows(frame(span.start)))
                for missing in absent(keys, pushed):
                    self._tell("compare")
                    if gone := [key for key in missing if key not in newer]:
                        yield gone

    def _rows_in(self, span: Span) -> Iterator[bytes]:
        """The keys in a span that the linked import has."""
        name = self._record.import_id.to_bytes(8, "big")
        return (key for key, _ in self._store.imports.rows_in(name, span))

    def _leave_out(self, keys: Iterable[bytes]) -> None:
        """Leave out the rows that the import has for `keys`, and the records of their expiries."""
        stored = self._store.imports.stored
        found = sorted(keys)
        self._left_out.update(row.stored for row in stored.among(self._record, found))
        if not any(span.start.startswith(EXPIRY) for span in self._record.spans):
            return
        carried = [*stored.among(self._record, map(carried_key, found))]
        waiting = []
        for row in carried:
            key = row.key.removeprefix(CARRIED)
            waiting.append(waiting_key(decode_due(row.value, key), key))
        self._left_out.update(row.stored for row in carried)
        self._left_out.update(row.stored for row in stored.among(self._record, sorted(waiting)))

    def _appeared(self, keys: Iterable[bytes], upto: Timestamp) -> list[bytes]:
        """The keys that came alive since the pass, and that the push is to delete."""
        store, spans = self._store, self._how.spans
        return [
            key
            for key in sorted(keys)
            if any(key in span for span in spans)
            and not store.imports.stored.has(self._record, key)
            and store.get(key, upto) is not None
        ]


def absent(live: Iterable[list[bytes]], pushed: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
    """The keys of `live` that are not in `pushed`. Both ascend, in chunks; a chunk of each is
    held."""
    known: set[bytes] = set()
    last: bytes | None = None
    for keys in live:
        while keys and (last is None or last < keys[-1]):
            chunk = next(pushed, None)
            if chunk is None:
                break
            known.update(chunk)
            last = chunk[-1]
        yield [key for key in keys if key not in known]
        known = {key for key in known if key > keys[-1]} if keys else known


def _keys_of(stored: Sequence[bytes]) -> list[bytes]:
    return unframe_all([entry[:-TAIL_BYTES] for entry in stored])


def _has_rows(span: Span) -> bool:
    return span.end is None or span.end > FIRST_ROW
