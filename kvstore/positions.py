"""Positions: how far a store has followed another place, such as a log of pushes in a bucket.

    position := | reserved | 00 | "p" | name |  ->  JSON      reserved: nine bytes ff, kvstore.span

A position is an ordinary key with versions, hidden from plain reads. So backups, restores and
replicas carry it like all other keys, and a store that is put back to a time has the position of
that time.

Invariants
1. A position moves with the rows that it stands for: neither is there without the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvstore.codec.json import JsonObject, read_object
from kvstore.commit import Committer
from kvstore.mvcc.versions import Versions
from kvstore.mvcc.write import OpenWriteSet, WriteSet
from kvstore.reserve import POSITIONS, Reserve
from kvstore.timestamp import Timestamp


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
        self._reserve.require_free("the store")
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


def _key(name: str) -> bytes:
    return POSITIONS + name.encode()
