"""The service below every transport: verbs over one store, each with its right.

A transport (HTTP, or the control socket in the store's directory) finds out who calls, brings the
arguments into the form of an `Invocation`, and sends the answer. Everything else is decided here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from kvstore.errors import NotFoundError
from kvstore.remote.server.changesets import LentChangesets
from kvstore.remote.server.http import VerbFailedError
from kvstore.remote.server.invocation import Answer, Invocation, ServedVerb
from kvstore.remote.server.tokens import Grant
from kvstore.remote.server.verbs import SERVED
from kvstore.remote.verbs import ADMIN, GET, VERBS
from kvstore.store import Store
from kvstore.timeline.request_notes import RequestToken

assert SERVED.keys() == VERBS.keys(), f"no work, or no declaration: {SERVED.keys() ^ VERBS.keys()}"


class VerbCall(NamedTuple):
    """A call of a verb as a transport brings it: nothing in it is checked yet. Its writes belong to
    the changeset named `changeset`, and are done once for `token`."""

    verb: ServedVerb
    access: Grant
    fields: Mapping[str, Any]
    table: pa.Table | None = None
    token: RequestToken | None = None
    changeset: str | None = None


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

    def run(self, call: VerbCall) -> Answer:
        """The answer of a verb. Raises `AccessDeniedError` before it looks at an argument, and
        `UsageError` for a wrong one."""
        invocation = self._invocation(call)
        if invocation.token is None:
            return self._answer(call, invocation)
        with self._turn_of(invocation.token.writer):
            return self._answer(call, invocation)

    def run_short(self, call: VerbCall) -> tuple[Answer, int] | None:
        """The answer of a short verb, and the time below which the disk must have everything before
        the answer is given; 0 for no time. None, with nothing done, if a lock is in the way, or
        another attempt at the same request."""
        invocation = self._invocation(call)
        if invocation.token is not None and invocation.token.writer in self._writers:
            return None
        invocation.awaits_disk = False
        with self.store.requests.unless_busy() as is_ours:
            if not is_ours:
                return None
            answer = self._answer(call, invocation)
            return answer, self.store.upper if invocation.awaits_disk else 0

    @contextmanager
    def _turn_of(self, writer: str) -> Iterator[None]:
        """Do one request of a writer at a time. A caller that got no answer in time sends its
        request again. If the second attempt were refused while the first one still waits, the first
        one could be done after the refusal."""
        with self._turn:
            self._turn.wait_for(lambda: writer not in self._writers)
            self._writers.add(writer)
        try:
            yield
        finally:
            with self._turn:
                self._writers.discard(writer)
                self._turn.notify_all()

    def _answer(self, call: VerbCall, invocation: Invocation) -> Answer:
        run = partial(call.verb.run, invocation)
        if call.changeset is not None and call.verb.declared.is_grouped:
            run = partial(self.changesets.within, call.changeset, invocation.token, run)
        slow = self.store.requests.slow
        try:
            if slow is None:
                return run()
            with slow.within():
                return run()
        except OSError as error:
            raise VerbFailedError from error

    def _invocation(self, call: VerbCall) -> Invocation:
        declared, access = call.verb.declared, call.access
        access.require(declared.right)
        if declared.right == ADMIN:
            access.require_whole(declared.name)
        given = declared.read(call.fields, has_rows=call.table is not None)
        once = call.token if declared.once else None
        return Invocation(self.store, self.changesets, access, given, call.table, once)

    def value(self, access: Grant, fields: Mapping[str, Any]) -> bytes | None:
        """The value of one key, as bytes: the verb `get` without its JSON."""
        given = GET.read(fields)
        return self.store.get(access.require_key(given["key"]), given.get("as_of"))
