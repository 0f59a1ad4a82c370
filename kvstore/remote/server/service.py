"""The service below every transport: verbs over one store, each with its right.

A transport (HTTP, or the control socket in the store's directory) finds out who calls, brings the
arguments into the form of an `Invocation`, and sends the answer. Everything else is decided here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa

from kvstore.errors import NotFoundError
from kvstore.remote.server.access import Grant
from kvstore.remote.server.http import VerbFailedError
from kvstore.remote.server.invocation import Answer, Invocation, LentChangesets, ServedVerb
from kvstore.remote.server.verbs import SERVED
from kvstore.remote.verbs import ADMIN, GET, VERBS
from kvstore.store import Store
from kvstore.timeline.request_notes import RequestToken

assert SERVED.keys() == VERBS.keys(), f"no work, or no declaration: {SERVED.keys() ^ VERBS.keys()}"


class Service:
    """The verbs of one store. Any thread may call them."""

    def __init__(self, store: Store, verbs: Sequence[ServedVerb] = ()) -> None:
        """`verbs` are added to the verbs of every store: packages above bring their own."""
        self.store, self.changesets = store, LentChangesets(store)
        added = {verb.declared.name: verb for verb in verbs}
        self.verbs: Mapping[str, ServedVerb] = {**{name: SERVED[name] for name in VERBS}, **added}
        self._writers: set[str] = set()
        """The writers of requests that threads are doing."""
        self._turn = threading.Condition()

    def verb(self, name: str) -> ServedVerb:
        """The verb of this name. Raises `NotFoundError` if there is none."""
        found = self.verbs.get(name)
        if found is None:
            raise NotFoundError(f"no verb {name!r}", "see /v1/openapi.json for all verbs")
        return found

    def run(
        self,
        verb: ServedVerb,
        access: Grant,
        fields: Mapping[str, Any],
        table: pa.Table | None = None,
        token: RequestToken | None = None,
        changeset: str | None = None,
    ) -> Answer:
        """The answer of a verb. Raises `AccessDeniedError` before it looks at an argument, and
        `UsageError` for a wrong one. The writes of a verb belong to the changeset named
        `changeset`."""
        call = self._call(verb, access, fields, table, token)
        if call.token is None:
            return self._answer(verb, call, changeset)
        with self._turn_of(call.token.writer):
            return self._answer(verb, call, changeset)

    def run_short(
        self,
        verb: ServedVerb,
        access: Grant,
        fields: Mapping[str, Any],
        table: pa.Table | None = None,
        token: RequestToken | None = None,
        changeset: str | None = None,
    ) -> tuple[Answer, int] | None:
        """The answer of a short verb, and the time below which the disk must have everything before
        the answer is given; 0 for no time. None, with nothing done, if a lock is in the way, or
        another attempt at the same request."""
        call = self._call(verb, access, fields, table, token)
        if call.token is not None and call.token.writer in self._writers:
            return None
        call.awaits_disk = False
        with self.store.requests.unless_busy() as is_ours:
            if not is_ours:
                return None
            answer = self._answer(verb, call, changeset)
            return answer, self.store.upper if call.awaits_disk else 0

    @contextmanager
    def _turn_of(self, writer: str) -> Iterator[None]:
        """A block that does a request of a writer. A caller that got no answer in time sends its
        request again: if the second attempt was refused while the first one waits, the first one
        could still be done."""
        with self._turn:
            self._turn.wait_for(lambda: writer not in self._writers)
            self._writers.add(writer)
        try:
            yield
        finally:
            with self._turn:
                self._writers.discard(writer)
                self._turn.notify_all()

    def _answer(self, verb: ServedVerb, call: Invocation, changeset: str | None) -> Answer:
        try:
            if changeset is None or not verb.declared.is_grouped:
                return verb.run(call)
            return self.changesets.within(changeset, call.token, partial(verb.run, call))
        except OSError as error:
            raise VerbFailedError from error

    def _call(
        self,
        verb: ServedVerb,
        access: Grant,
        fields: Mapping[str, Any],
        table: pa.Table | None,
        token: RequestToken | None,
    ) -> Invocation:
        declared = verb.declared
        access.require(declared.right)
        if declared.right == ADMIN:
            access.require_whole(declared.name)
        given = declared.read(fields, has_rows=table is not None)
        once = token if declared.once else None
        return Invocation(self.store, self.changesets, access, given, table, once)

    def value(self, access: Grant, fields: Mapping[str, Any]) -> bytes | None:
        """The value of one key, as bytes: the verb `get` without its JSON."""
        given = GET.read(fields)
        return self.store.get(access.require_key(given["key"]), given.get("as_of"))
