"""Reports of the stores of a root: one small object for each store, replaced by its next number.

    status/<name>/<20 digits>.json := {"format": 1, "name", "store": id, "shard", "position",
        "told": ns, "free", "error",
        "pushes": {"<push>": {"state", "at": ns, "error", "seconds": {stage: s}}}}

The first `error` says why the store cannot read the next event of the log. `position` counts the
events that the store has passed. The states of a push are added, reverted, refused and waiting; its
`error` says why it was refused, or why it waits. A status has the last `PUSHES_TOLD` pushes, and as
many pushes whose states are the newest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import CorruptionError, FormatVersionError, UsageError
from kvstore.meta import optional_timestamp_of
from kvstore.storage.contract import FAILURES, Blob, put_first
from kvstore.timestamp import Timestamp

ERROR_CHARS_MAX: Final = 500
"""Characters of an error in a status: a whole status stays small."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NUMBERED: Final = re.compile(r"status/([^/]+)/([0-9]{20,})\.json")
_BYTES_MAX: Final = 1 << 20
_FORMAT: Final = 1
_GETS_AT_ONCE: Final = 8
"""Reports that are fetched at a time: a look waits for latency, not for bandwidth."""


class StoreStatus(NamedTuple):
    """The state of one push on one store.

    `state` is added, reverted, refused or waiting. A store waits if it has not come to the push, or
    has no access: then `error` says so. The state is unknown, and the shard -1, if the report is
    damaged or of a newer release. `at` is the stamp at which it was added or reverted.
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


class PutReport(NamedTuple):
    """A report that was put: its number, and the id of another store that reports as this name, if
    one was seen."""

    number: int
    other: str | None


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
            if (named := _NUMBERED.fullmatch(each.name)) and _NAME.fullmatch(named[1]):
                found[named[1]] = max(found.get(named[1], 0), int(named[2]))
        return found

    def _newest(self, name: str, number: int, push: int, known: _Known) -> StoreStatus | None:
        """The state of a push in a store's last report, which was `number` a moment ago."""
        while number:
            seen = known.get(name)
            if seen is not None and seen[0] == number:
                return seen[1]
            try:
                fields = self._report(_path(name, number))
                status = None if fields is None else _status(name, fields, push)
            except (CorruptionError, FormatVersionError) as error:
                status = StoreStatus(name, -1, "unknown", None, str(error), {})
            if status is not None:
                known[name] = number, status
                return status
            number = self.last(name)  # a newer report has replaced it
        return None

    def _report(self, path: str) -> JsonObject | None:
        read = self._blob.get_range
        data = self._blob.patience.over(lambda: read(path, start=0, length=_BYTES_MAX))
        if data is None:
            return None
        found = read_object(data, where=path)
        if found.get("format") != _FORMAT:
            raise FormatVersionError(path, found=found.get("format"), supported=(_FORMAT,))
        return found

    def write(self, name: str, fields: Mapping[str, Any], *, after: int) -> PutReport:
        """Report under the next number above `after`, and remove the report before. Costs a put and
        a delete, and more where another store reports under this name."""
        data = json.dumps({"format": _FORMAT, "name": name, **fields}, sort_keys=True).encode()
        number = after + 1
        is_put = put_first(self._blob, _path(name, number), data)
        if is_put and (not after or self._removed(name, after)):
            return PutReport(number, None)
        newest = self.last(name)
        if is_put and newest == number:
            return PutReport(number, None)
        # An earlier try of this store, or another store, was faster.
        other, highest = self._store_of(name, newest), max(newest, number) + 1
        while not put_first(self._blob, _path(name, highest), data):
            highest += 1
        for old in (number, newest):
            self._removed(name, old)
        return PutReport(highest, None if other == fields.get("store") else other)

    def _store_of(self, name: str, number: int) -> str | None:
        """The id of the store that has made a report; None if it does not tell."""
        with suppress(CorruptionError, FormatVersionError):
            found = self._report(_path(name, number))
            return None if found is None else found.optional("store", str)
        return None

    def _removed(self, name: str, number: int) -> bool:
        """Remove a report, because the highest number counts. False if it was gone."""
        with suppress(*FAILURES):
            return self._blob.delete(_path(name, number)) is not None
        return True


def _path(name: str, number: int) -> str:
    return f"status/{name}/{number:020d}.json"


def _status(name: str, fields: JsonObject, push: int) -> StoreStatus:
    told = fields.field("pushes", dict).get(str(push))
    shard, free = fields.integer("shard"), fields.optional_integer("free")
    if not isinstance(told, dict):
        blocked = fields.optional("error", str) or ""
        return StoreStatus(name, shard, "waiting", None, blocked, {}, free)
    each = JsonObject(told, where=fields.where)
    at, seconds = optional_timestamp_of(each, "at"), each.field("seconds", dict)
    return StoreStatus(name, shard, each.text("state"), at, each.text("error"), seconds, free)
