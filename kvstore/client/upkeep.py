"""Upkeep of a served store, for callers with the right `admin`; and verbs by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvstore.arguments import require_age, require_integer
from kvstore.claims import HoldRecord
from kvstore.client import calls, streams
from kvstore.client.calls import ClientRequest
from kvstore.client.capture import ServedCapture
from kvstore.client.holds import ClientHold
from kvstore.client.reply import Reply
from kvstore.client.work import collect, hold_record, work_of
from kvstore.gc import GcReport
from kvstore.protocol.values import to_json
from kvstore.span import Span
from kvstore.timestamp import TimeLike, Timestamp
from kvstore.verify import Problem, StoreReport


class ServedUpkeep(ServedCapture):
    """The calls of a client that concern the upkeep of a store, and calls of verbs by their
    names."""

    def gc(
        self,
        before: TimeLike | None = None,
        keep: timedelta | None = None,
        *,
        compact: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> GcReport:
        """See `Store.gc`. An error that `progress` raises ends the run of the owner."""
        return collect(self._pool, before, keep, compact, progress)

    def checkpoint(self, path: str | Path) -> Timestamp:
        """See `Store.checkpoint`. `path` is an absolute path on the machine of the server."""
        return Timestamp(self.work("checkpoint", None, path=str(path))["timestamp"])

    def clear_range(self, start: bytes, end: bytes, *, compact: bool = True) -> Timestamp:
        """See `Store.clear_range`."""
        span = Span(start, end)
        fields = {"start": to_json(span.start), "end": to_json(span.end), "compact": compact}
        return Timestamp(self.work("clear_range", None, **fields)["timestamp"])

    def verify(self, *, progress: Callable[[int], None] | None = None) -> StoreReport:
        """See `Store.verify`. The server walks; an error that `progress` raises ends the walk."""
        found = self.work("verify", progress)
        problems = tuple(Problem(*each) for each in found["problems"])
        return StoreReport(**{**found, "problems": problems})

    def revert_import(self, import_id: int) -> Timestamp:
        """See `Store.revert_import`."""
        number = require_integer(import_id, name="import_id")
        return Timestamp(self.call("revert_import", import_id=f"{number:016x}")["timestamp"])

    def hold(
        self, name: str, at: TimeLike | None = None, max_age: timedelta | None = None
    ) -> ClientHold:
        """See `Store.hold`."""
        age = require_age(max_age, name="max_age")
        seconds = None if age is None else age.total_seconds()
        found = self.call("hold", name=name, at=calls.ns(at, "at"), max_age=seconds, durable=True)
        return ClientHold(self.call, name, str(found["token"]))

    def drop_hold(self, name: str) -> HoldRecord:
        """Remove a hold, whoever owns it: see `Holds.drop`."""
        return hold_record(self.call("drop_hold", name=name))

    # -- other verbs ------------------------------------------------------------------------

    def call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Call a verb by its name, with arguments as JSON: for verbs that this client lacks."""
        request: ClientRequest[dict[str, Any]] = calls.verb(verb, arguments, Reply.json)
        return self._pool.send(request)

    def rows(self, verb: str, **arguments: Any) -> pa.RecordBatchReader:
        """Call a verb that answers with rows, as `call`. The call is sent once."""
        request: ClientRequest[dict[str, Any]] = calls.verb(verb, arguments, Reply.json)
        return streams.rows(self._pool, request)

    def work(
        self, verb: str, progress: Callable[[int], None] | None, /, **arguments: Any
    ) -> Mapping[str, Any]:
        """Call a verb of long work, and return its result. An error that `progress` raises ends
        the work at its next step."""
        return work_of(self._pool, verb, progress, **arguments)
