"""Notes of requests that were done, so that a request that is sent again is not done again.

A caller that got no answer sends its request again, perhaps to a server that was killed and started
anew. So the commit that carries a request out has a note of it.

    request/<writer>     := serial, timestamp     the last request of a writer, and its commit
    requests-forgotten   := timestamp             notes of commits up to here may be gone

A token names a writer and numbers the writer's requests, one after the other. `known` is a time
at which the writer had not yet sent the request. Notes are bounded: the writer that wrote longest
ago is forgotten first. A request of an unknown writer is new if it began after the last commit
whose note is gone; otherwise nobody can tell, and it is refused.

Invariants
1. A note and the writes it tells of are in one engine batch: neither is there without the other.
2. A request that was done is never done again. A request that may have been done is refused.
3. The commit lock guards the notes. They are read at the first request that has a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from kvstore.base.timestamp import Timestamp
from kvstore.engine.api import WriteBatch
from kvstore.errors import IndeterminateError, UsageError
from kvstore.limits import REQUEST_WRITERS_MAX
from kvstore.mvcc.meta import Meta, timestamp_of

_PREFIX = "request/"
NOTES: Final = (_PREFIX.encode(), _PREFIX.encode() + b"\xff")
"""The bounds of the names of the notes, as they are stored."""

_FORGOTTEN = "requests-forgotten"


class RequestToken(NamedTuple):
    """The name of a request: the writer, its serial number, and a time before it was first sent;
    without the time the request counts as new where the writer is unknown."""

    writer: str
    serial: int = 0
    known: int | None = None


class DoneRequest(NamedTuple):
    """The last request of a writer, and the time of its commit."""

    serial: int
    timestamp: Timestamp


class RepeatedError(Exception):
    """Calls off the commit of a request that was done before, at `timestamp`."""

    def __init__(self, timestamp: Timestamp) -> None:
        super().__init__(timestamp)
        self.timestamp = timestamp


class RequestNotes:
    """The notes of one store."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._done: dict[str, DoneRequest] | None = None
        self._forgotten = 0

    def reload(self) -> None:
        """Take the notes as they are stored, after an interrupt."""
        self._done = None

    def done(self, token: RequestToken) -> DoneRequest | None:
        """The note of this request; None if no commit has done it, or its note is gone."""
        found = self._notes().get(token.writer)
        return found if found is not None and found.serial == token.serial else None

    def require_new(self, token: RequestToken) -> None:
        """Raise unless the request was surely not done."""
        done = self._notes().get(token.writer)
        if done is not None and token.serial == done.serial:
            raise RepeatedError(done.timestamp)
        if done is not None and token.serial < done.serial:
            raise UsageError(
                f"request {token.serial} of {token.writer}, which has made request {done.serial}",
                "number requests one after the other, and give each thread a writer of its own",
            )
        if done is None and token.known is not None and token.known < self._forgotten:
            raise IndeterminateError(
                f"request {token.serial} of {token.writer}",
                "the store no longer has the note of its outcome",
            )

    def stage(self, batch: WriteBatch, token: RequestToken, timestamp: int) -> list[str]:
        """Add the note of a request to the engine batch of its commit. Returns the writers whose
        notes leave for it, which `show` takes."""
        fields = {"serial": token.serial, "timestamp": timestamp}
        self._meta.stage(batch, _PREFIX + token.writer, fields)
        notes, leaving = self._notes(), list[str]()
        if token.writer not in notes and len(notes) >= REQUEST_WRITERS_MAX:
            leaving = list(islice(notes, len(notes) + 1 - REQUEST_WRITERS_MAX))
            self._meta.stage_timestamp(batch, _FORGOTTEN, self._forgotten_without(leaving))
            for writer in leaving:
                self._meta.stage_delete(batch, _PREFIX + writer)
        return leaving

    def show(self, token: RequestToken, timestamp: Timestamp, leaving: Sequence[str]) -> None:
        """Keep the note that `stage` has added, once its batch is written."""
        notes = self._notes()
        self._forgotten = self._forgotten_without(leaving)
        for writer in leaving:
            del notes[writer]
        notes.pop(token.writer, None)  # notes are in the order of their commits
        notes[token.writer] = DoneRequest(token.serial, timestamp)

    def _forgotten_without(self, leaving: Sequence[str]) -> int:
        """The time of the newest commit whose note is gone, once those of `leaving` are."""
        notes = self._notes()
        return max([self._forgotten, *(notes[writer].timestamp for writer in leaving)])

    def _notes(self) -> dict[str, DoneRequest]:
        if self._done is None:
            self._forgotten = self._meta.timestamp(_FORGOTTEN)
            found = [
                (writer, DoneRequest(record.integer("serial"), timestamp_of(record)))
                for writer, record in self._meta.records(_PREFIX)
            ]
            self._done = dict(sorted(found, key=lambda note: note[1].timestamp))
        return self._done
