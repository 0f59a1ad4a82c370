"""A store that another process owns, for a backup, an import or a replica: one durable moment of
its files, with the holds and the imports of the owner.

    with as_store(client) as store:
        collection.backup(store)

A script beside a service reads by itself, so the heavy work costs the owner nothing. It asks the
owner for little: holds, records of imports, durable frontiers. For all else it calls the client.

Invariants
1. Everything that the handle shows was durable before the handle was given out, so no crash of
   the owner takes back what a backup has stored.
2. The handle shows one moment. Windows of backups end below its `upper`, also where the owner has
   newer commits.
3. Holds and imports are read from the owner at the moment of the call, never from the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvstore import opening
from kvstore.base.arguments import AGE
from kvstore.base.paths import require_place_of_copy
from kvstore.base.timestamp import NS_PER_SECOND, AgeLike, TimeLike, Timestamp
from kvstore.changes import ChangeIndex
from kvstore.codec.json import JsonObject
from kvstore.errors import UsageError
from kvstore.limits import (
    CONTROL_LEASE_S,
)
from kvstore.mvcc import Versions
from kvstore.mvcc.meta import Meta
from kvstore.remote import verbs
from kvstore.remote.client import Client
from kvstore.remote.client.client import hold_record
from kvstore.store import Store
from kvstore.timeline.committer import After, Committer
from kvstore.timeline.holds import BACKUP, REPLICA, USER, Hold, HoldRecord, Holds, Pins
from kvstore.timeline.import_records import ImportRecord, read_import
from kvstore.timeline.imports import Imports


class StoreBeside(Store):
    """A store at one moment, read from its files beside its owner. The owner takes claims and
    imports. A write raises `UsageError`."""

    owner: Client

    def attend(self, owner: Client) -> None:
        """Have `owner` take claims and imports."""
        self.owner, parts = owner, self._parts
        meta = Meta(self._engine)
        self.holds = HoldsBeside(meta, parts.committer, parts.pins, owner=owner)
        self.imports = ImportsBeside(parts.versions, parts.index, parts.committer, owner=owner)

    def checkpoint(self, path: str | Path) -> Timestamp:
        """A copy that the owner makes; see `Store.checkpoint`. Spark reads one."""
        return self.owner.checkpoint(require_place_of_copy(path, store=self.path))


class HoldsBeside(Holds):
    """The holds of a store that another process owns.

    A new hold of a backup or a replica is a lease until its owner moves it for the first time: it
    is lost after `CONTROL_LEASE_S`. So a script that was killed in its first run, and never runs
    again, keeps history for a bounded time.
    """

    def __init__(self, meta: Meta, committer: Committer, pins: Pins, *, owner: Client) -> None:
        super().__init__(meta, committer, pins)
        self.owner = owner
        self._leased: dict[str, tuple[Hold, dict[str, Any]]] = {}
        """The leases by name, each with the arguments of the hold that was asked for."""

    def all(self) -> list[HoldRecord]:
        """See `Holds.all`."""
        return [hold_record(fields) for fields in self.owner.pool.call(verbs.HOLDS)]

    def take(
        self,
        name: str,
        at: TimeLike | None = None,
        max_age: AgeLike | None = None,
        *,
        durable: bool = True,
        kind: str = USER,
        address: str = "",
    ) -> Hold:
        """See `Holds.take`. A new hold stands at the newest time of this handle, because the
        history read here must stay."""
        known = next((each for each in self.all() if each.name == name and not each.lost), None)
        if at is None and known is None:
            at = self._committer.upper - 1
        wanted: dict[str, Any] = {"name": name, "kind": kind, "address": address}
        is_lease = kind in (BACKUP, REPLICA) and (known is None or _is_lease(known))
        lease = timedelta(seconds=CONTROL_LEASE_S)
        wish = AGE.or_none.check("max_age", max_age)
        age = lease if is_lease and (wish is None or wish > lease) else wish
        found = self.owner.pool.call(verbs.HOLD, **wanted, at=at, max_age=age, durable=durable)
        hold = Hold(self, name, found["token"], is_new=found["is_new"])
        if is_lease:
            self._leased[name] = hold, {**wanted, "max_age": wish}
        return hold

    def move(
        self,
        name: str,
        token: str,
        to: TimeLike,
        *,
        durable: bool = True,
        reached: TimeLike | None = None,
    ) -> None:
        """See `Holds.move`. The first move ends a lease."""
        if name in self._leased:
            self.require_owned(name, token)
            hold, wanted = self._leased.pop(name)
            found = self.owner.pool.call(verbs.HOLD, **wanted, at=to, durable=False)
            hold.token = token = found["token"]
        place = {"to": to, "durable": durable, "reached": reached}
        self.owner.pool.call(verbs.MOVE_HOLD, name=name, token=token, **place)

    def release(self, name: str, token: str) -> None:
        """See `Holds.release`."""
        self.owner.pool.call(verbs.RELEASE_HOLD, name=name, token=token)

    def drop(self, name: str) -> HoldRecord:
        """See `Holds.drop`."""
        return self.owner.drop_hold(name)

    def require_owned(self, name: str, token: str) -> HoldRecord:
        """See `Holds.require_owned`."""
        return hold_record(self.owner.pool.call(verbs.HELD, name=name, token=token))


class ServedImports:
    """The records of the imports of a store that another process owns."""

    def __init__(self, owner: Client) -> None:
        self.owner = owner

    def get(self, import_id: int) -> ImportRecord | None:
        """See `Imports.get`."""
        fields = self.owner.pool.call(verbs.KNOWN_IMPORT, import_id=f"{import_id:016x}")
        if fields is None:
            return None
        return read_import(import_id, JsonObject(dict(fields), where="the owner's answer"))

    def abort(self, import_id: int) -> bool:
        """See `Imports.abort`."""
        return self.owner.pool.work(verbs.ABORT_IMPORT, None, import_id=f"{import_id:016x}")


class ImportsBeside(ServedImports, Imports):
    """The imports of a store that another process owns. Their files are brought here, and the owner
    checks and adds them."""

    def __init__(
        self, versions: Versions, index: ChangeIndex, committer: Committer, *, owner: Client
    ) -> None:
        Imports.__init__(self, versions, index, committer)
        self.owner = owner

    def revert(self, import_id: int, *, after: After | None = None) -> Timestamp:
        """See `Imports.revert`."""
        assert after is None
        return self.owner.revert_import(import_id)


@contextmanager
def beside(owner: Client) -> Iterator[StoreBeside]:
    """The store of `owner` as of now, for the time of the block; see `kvstore.remote.control`."""
    if owner.path is None:
        raise UsageError(
            f"{owner!r} reaches a store whose files are elsewhere",
            "run this on the machine of the store, with kvstore.connect(path); "
            "a sealed import at a URL is added by bulk.ingest",
        )
    durable = owner.sync()
    with opening.read_as(StoreBeside, owner.path) as opened:
        opened.attend(owner)
        if opened.upper > durable:  # commits that came meanwhile
            owner.sync()
        yield opened


def _is_lease(record: HoldRecord) -> bool:
    return record.max_age_ns == int(CONTROL_LEASE_S * NS_PER_SECOND)
