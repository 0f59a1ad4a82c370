"""Positions: how far a store has followed another place, such as a log of pushes in a bucket.

    position := | reserved | 00 | "p" | name |  ->  JSON      reserved: nine bytes ff,
    kvstore.base.span

A position is an ordinary key with versions, hidden from plain reads. So backups, restores and
replicas carry it like all other keys, and a store that is put back to a time has the position of
that time.

The position of a log of pushes has a field `pushes`, by which a look at the store names them:

    number -> {"state", "import", "at": time of the state, "added": time of a reverted push, ...}

Invariants
1. A position moves with the rows that it stands for: neither is there without the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.codec.json import JsonObject, read_object
from kvstore.mvcc.meta import optional_timestamp_of
from kvstore.mvcc.versions import Versions
from kvstore.mvcc.write_set import OpenWriteSet, WriteSet
from kvstore.timeline.committer import Committer
from kvstore.timeline.reserve import POSITIONS, Reserve


class PushTold(NamedTuple):
    """A push that a store has added, and the time at which it was reverted, if it was."""

    number: str
    import_id: int | None
    added: Timestamp | None
    reverted: Timestamp | None


class Positions:
    """The positions of one store."""

    def __init__(self, versions: Versions, committer: Committer, reserve: Reserve) -> None:
        self._versions, self._committer, self._reserve = versions, committer, reserve

    def get(self, name: str) -> JsonObject | None:
        """The position `name`; None if there is none. Raises `CorruptionError`."""
        [found] = self._versions.get_many([_key(name)], self._committer.upper - 1)
        return None if found is None else read_object(found, where=f"position {name}")

    def moving(self, name: str, fields: Mapping[str, Any]) -> WriteSet:
        """The writes that move a position, to be committed with its rows."""
        self._reserve.note_positions()
        writes = OpenWriteSet()
        writes.put(_key(name), json.dumps(fields, sort_keys=True).encode())
        return writes

    def move(self, name: str, fields: Mapping[str, Any]) -> Timestamp:
        """Move a position in a commit of its own, durably: there are no rows."""
        return self.write(self.moving(name, fields))

    def write(self, moving: WriteSet) -> Timestamp:
        """As `move`, of the writes that `moving` has made."""
        return self._committer.commit(moving, durability="sync")

    def note_pending(self, address: str, count: int) -> None:
        """Have the metrics tell how many events of the log of pushes at `address` are still to be
        taken."""
        self._committer.meters.pushes_pending[address] = count


def pushes_told(versions: Versions, as_of: int) -> Iterator[PushTold]:
    """The pushes that the positions of a store name at a time. Raises `CorruptionError`."""
    chunks = versions.scan(Span.of_prefix(POSITIONS), as_of)
    for key, value in chain.from_iterable(zip(*chunk, strict=True) for chunk in chunks):
        name = key[len(POSITIONS) :].decode("utf-8", "backslashreplace")
        fields = read_object(value, where=f"position {name}")
        told = fields.get("pushes")
        for number in told if type(told) is dict else ():
            push = fields.inner("pushes").inner(number)
            state, at = push.text("state"), optional_timestamp_of(push, "at")
            added = optional_timestamp_of(push, "added") if state == "reverted" else at
            reverted = at if state == "reverted" else None
            if state in ("added", "reverted"):
                yield PushTold(number, push.optional_integer("import"), added, reverted)


def _key(name: str) -> bytes:
    return POSITIONS + name.encode()
