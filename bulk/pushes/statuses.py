"""Reports of the stores of a root: one small object for each store, replaced by its next number.

    status/<name>/<20 digits>.json := {"format": 1, "name", "shard", "position", "told": ns, "free",
        "error", "pushes": {"<push>": {"state", "at": ns, "error", "seconds": {stage: s}}}}

The first `error` says why the store cannot read the next event of the log. `position` counts the
events that the store has passed. The states of a push are added, reverted, refused and waiting; its
`error` says why it was refused, or why it waits. A status has the last `PUSHES_TOLD` pushes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import UsageError
from kvstore.storage.contract import FAILURES, Blob, put_first
from kvstore.timestamp import Timestamp

PUSHES_TOLD: Final = 100
"""Pushes that a status names: a job waits for one of the newest."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BYTES_MAX: Final = 1 << 20
_FORMAT: Final = 1
_GETS_AT_ONCE: Final = 8
"""Reports that are fetched at a time: a look waits for latency, not for bandwidth."""


class StoreStatus(NamedTuple):
    """The state of one push on one store.

    `state` is added, reverted, refused, or waiting where the store has not come to the push, or
    has no access: `error` tells it then. `at` is the stamp at which it was added or reverted.
    `seconds` has the seconds of each stage. `free` are the bytes that were free on the store's disk
    at its last report, None in memory.
    """

    name: str
    shard: int
    state: str
    at: Timestamp | None
    error: str
    seconds: Mapping[str, float]
    free: int | None = None


_Known: TypeAlias = "dict[str, tuple[int, StoreStatus]]"
"""The last report that was read of each store: its number, and the state of one push."""


def require_name(name: object) -> str:
    """`name`, if it can name a store. Raises `UsageError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"name={name!r}", "use letters, digits, . _ and -, 100 at most")
    return name


class Statuses:
    """The statuses below one root.

    Keeps what stores have reported about the push that was asked for last: a second look at a
    thousand stores costs one list, and a get for each store that has reported since.
    """

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._known: tuple[int, _Known] = (0, {})

    def last(self, name: str) -> int:
        """The number of a store's last report, 0 before the first. Costs a list."""
        return self._numbers(f"status/{name}/").get(name, 0)

    def of_push(self, push: int, names: Collection[str] | None = None) -> list[StoreStatus]:
        """The state of a push on each store, by name, or on the stores `names`. Costs a list for
        1,000 stores, and a get for each report that was not read before."""
        if self._known[0] != push:
            self._known = push, {}
        known = self._known[1]
        numbers = self._numbers("status/")
        wanted = sorted(numbers if names is None else numbers.keys() & set(names))
        with ThreadPoolExecutor(_GETS_AT_ONCE, "kvstore-statuses") as pool:
            found = pool.map(lambda name: self._newest(name, numbers[name], push, known), wanted)
            return [each for each in found if each is not None]

    def _numbers(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for each in self._blob.patience.over(lambda: [*self._blob.list(prefix)]):
            parts = each.name.removesuffix(".json").split("/")
            if len(parts) == 3 and parts[2].isdigit():
                found[parts[1]] = max(found.get(parts[1], 0), int(parts[2]))
        return found

    def _newest(self, name: str, number: int, push: int, known: _Known) -> StoreStatus | None:
        """The state of a push in a store's last report, which was `number` a moment ago."""
        while number:
            seen = known.get(name)
            if seen is not None and seen[0] == number:
                return seen[1]
            fields = self._report(_path(name, number))
            if fields is not None:
                status = _status(name, fields, push)
                known[name] = number, status
                return status
            number = self.last(name)  # a newer report has replaced it
        return None

    def _report(self, path: str) -> JsonObject | None:
        read = self._blob.get_range
        data = self._blob.patience.over(lambda: read(path, start=0, length=_BYTES_MAX))
        return None if data is None else read_object(data, where=path)

    def write(self, name: str, fields: Mapping[str, Any], *, after: int) -> int:
        """Report under the next number above `after`, and remove the report before. Returns the
        number. Costs a put and a delete."""
        data = json.dumps({"format": _FORMAT, "name": name, **fields}, sort_keys=True).encode()
        number = after + 1
        while not put_first(self._blob, _path(name, number), data):
            number += 1
        with suppress(*FAILURES):  # the highest number counts
            self._blob.delete(_path(name, number - 1))
        return number


def _path(name: str, number: int) -> str:
    return f"status/{name}/{number:020d}.json"


def _status(name: str, fields: JsonObject, push: int) -> StoreStatus:
    told = fields.field("pushes", dict).get(str(push))
    shard, free = fields.integer("shard"), fields.optional_integer("free")
    if not isinstance(told, dict):
        blocked = fields.optional("error", str) or ""
        return StoreStatus(name, shard, "waiting", None, blocked, {}, free)
    each = JsonObject(told, where=fields.where)
    at = each.optional("at", int)
    seconds = each.field("seconds", dict)
    state = each.text("state")
    stamp = None if at is None else Timestamp(at)
    return StoreStatus(name, shard, state, stamp, each.text("error"), seconds, free)
