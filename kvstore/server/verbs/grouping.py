"""The verbs that begin and end the changesets of callers."""

from __future__ import annotations

from kvstore.protocol.parameters import NAME
from kvstore.protocol.results import COUNT, INTEGER, TEXT, fields
from kvstore.server.access import WRITE
from kvstore.server.changesets import LentChangesets, UnknownChangesetError
from kvstore.server.invocation import Invocation
from kvstore.server.verbs.verb import Answer, Verb, described


def changeset_verbs(changesets: LentChangesets) -> list[Verb]:
    """The verbs, over the changesets of one server."""

    def open_changeset(call: Invocation) -> Answer:
        """Open a changeset, inside the changeset named `outer` if it is given. A write with the
        header `Kvstore-Changeset: <name>` belongs to it."""
        name, opened = changesets.open(call.text("outer"))
        assert opened.id is not None, "it was entered"
        domain, serial = opened.id
        return {"name": name, "domain": domain, "serial": serial}

    def end_changeset(call: Invocation) -> Answer:
        """End a changeset. Returns the number of its changes."""
        return {"events": changesets.end(call["name"]).events}

    return [
        Verb(
            open_changeset.__name__,
            WRITE,
            open_changeset,
            described(open_changeset),
            {"outer": NAME},
            waits=True,
            result=fields(name=TEXT, domain=INTEGER, serial=INTEGER),
            errors=(UnknownChangesetError,),
        ),
        Verb(
            end_changeset.__name__,
            WRITE,
            end_changeset,
            described(end_changeset),
            {"name": NAME.required},
            waits=True,
            result=fields(events=COUNT),
            errors=(UnknownChangesetError,),
        ),
    ]
