"""The log of a root of pushes: an object for each event, numbered from 1, each put by one process.

    {"format": 1, "kind": "push", "push": n, "job": 32 hex, "shards": k, "at": ns, "rows", "bytes",
     "imports": [{"import_id": 16 hex, "checksum": 64 hex, "rows", "bytes"}, ...],
     "feed": {"position": hex, "batch": n, "origin": text of bulk.micro_batches}}
                                                  only in a push of a micro-batch
    {"format": 1, "kind": "revert", "push": n, "of": position of the push, "job": 32 hex, "at": ns}
    {"format": 1, "kind": "expire", "push": n, "job": 32 hex, "at": ns}

The event of a push that does more than to add its rows has the fields of its mode
(`bulk.pushes.modes`).

Invariants
1. The number of an event is taken by a put that only one process can make, so all readers see one
   order. A process whose put was overtaken reads the event and tries the next number.
2. Numbers have no gaps. A reader that finds no object under the next number has reached the end.
3. Events are never removed, so a store that was away, or is new, finds all of them. A year of
   pushes every five minutes is 100,000 objects of some hundred bytes. A job reads the newest ones.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from bulk.micro_batches import Origin
from bulk.pushes.modes import PLAIN, PushMode, read_mode
from bulk.pushes.sharding import SHARDS_MAX
from kvstore.arguments import require_integer
from kvstore.codec.json import JsonObject, read_object
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import CorruptionError, FormatVersionError, UsageError
from kvstore.limits import JSON_BYTES_MAX
from kvstore.storage.contract import Blob, put_first
from kvstore.timestamp import Timestamp

FORMAT: Final = 1
PUSH: Final = "push"
REVERT: Final = "revert"
EXPIRE: Final = "expire"
_KINDS: Final = (PUSH, REVERT, EXPIRE)
_JOB: Final = re.compile(r"[0-9a-f]{32}")
_ROOT_NAME: Final = "root.json"


class PushImport(NamedTuple):
    """The import of one shard of a push."""

    import_id: int
    checksum: str
    rows: int
    size_bytes: int


class MicroBatch(NamedTuple):
    """The place of a micro-batch in a change feed: the name of the feed in this log, the number of
    the micro-batch, and the stream that has planned it."""

    position: bytes
    number: int
    origin: Origin = Origin()

    def require_same_stream(self, last: MicroBatch) -> None:
        """Raise `UsageError` if this micro-batch is of another stream than `last`, the last one
        that was written for its feed, or has other rows under the number of `last`."""
        name = repr(self.position)
        if self.number == last.number:
            self.origin.require_repeated(name, self.number, last.origin)
        self.origin.require_same_query(name, self.number, last.origin, last.number)

    def fields(self) -> dict[str, Any]:
        """The fields of the object `feed` of an event."""
        found = {"position": self.position.hex(), "batch": self.number}
        return {**found, "origin": self.origin.text} if self.origin.text else found


class Push(NamedTuple):
    """A sealed push. `state` is sealed, reverted or expired. `how` tells what it does to rows that
    are not its own. `feed` names the micro-batch whose changes it has, None for other pushes."""

    number: int
    at: Timestamp
    job: str
    imports: tuple[PushImport, ...]
    state: str = "sealed"
    how: PushMode = PLAIN
    feed: MicroBatch | None = None

    @property
    def mode(self) -> str:
        """`add`, `replace` for the new whole of a span, or `change` for changes that clear
        ranges."""
        return self.how.name

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.imports)

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return sum(each.rows for each in self.imports)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(each.size_bytes for each in self.imports)

    def has_import(self, shard: int, import_id: int) -> bool:
        """Whether the rows of a shard are in this import."""
        return shard < self.shards and self.imports[shard].import_id == import_id

    def path(self, shard: int) -> str:
        """The place of a shard's import below the root."""
        return import_path(self.job, shard)


class PushEvent(NamedTuple):
    """One event of the log. `push` is the push itself, `number` the push that an event is about,
    and `of` the position of a push that is reverted, if the event tells it."""

    position: int
    kind: str
    number: int
    push: Push | None
    of: int | None = None


def import_path(job: str, shard: int) -> str:
    """The place of a shard's import below the root."""
    return f"imports/{job}/{shard:04d}"


class PushLog:
    """The log below one root."""

    def __init__(self, blob: Blob, where: str) -> None:
        self._blob, self.where = blob, where

    def root_id(self) -> str:
        """The identity of the root: two URLs of one root have the same. The first call makes it."""
        found = self._read(_ROOT_NAME)
        if found is None:
            fields = {"format": FORMAT, "root": secrets.token_hex(16)}
            put_first(self._blob, _ROOT_NAME, json.dumps(fields, sort_keys=True).encode())
            found = self._read(_ROOT_NAME)
        assert found is not None
        return found.text("root")

    def require_made(self) -> None:
        """Raise `UsageError` if there is no event. Costs a head, and a list where there is none: a
        bucket that is not there looks empty to a head."""
        if not self._has(1):
            self._blob.patience.over(lambda: [*self._blob.list("log/")])
            raise UsageError(f"{self.where} holds no push", "check the URL, or make a push first")

    def event(self, position: int) -> PushEvent | None:
        """The event of a position; None behind the end. Costs one get. Raises `CorruptionError`,
        and `FormatVersionError` if a newer release wrote it."""
        found = self._read(_name(position))
        return None if found is None else _event(position, found)

    def events(self, start: int = 1) -> Iterator[PushEvent]:
        """The events from a position on."""
        while (event := self.event(start)) is not None:
            yield event
            start += 1

    def end(self, known: int = 0) -> int:
        """The position of the last event, 0 where there is none. `known` has an event, or is 0.

        Costs two requests for each doubling of the events behind `known`, and one at least.
        """
        low, step = known, 1
        while self._has(low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has(middle) else (low, middle)
        return low

    def newest_first(self, end: int) -> Iterator[PushEvent]:
        """The events up to a position, the newest first. Costs a get for each that is taken."""
        for position in range(end, 0, -1):
            event = self.event(position)
            if event is None:
                where = f"{self.where}/{_name(position)}"
                raise CorruptionError(where, "it is gone, and later events are there")
            yield event

    def push_of(self, event: PushEvent) -> Push | None:
        """The push that an event is about; None if there is none. Costs a get, or one for each
        event since the push if the event does not tell its position."""
        if event.push is not None:
            return event.push
        before = event.position - 1
        newest = self.newest_first(min(event.of or before, before))
        try:
            return back_to(newest, event.number)[-1].push
        except UsageError:
            return None

    def append(
        self,
        fields_for: Callable[[Iterator[PushEvent]], dict[str, Any] | None],
        known: int = 0,
    ) -> PushEvent | None:
        """Append an event. `known` is as in `end`.

        `fields_for` gets the events before the new one, newest first, and returns the fields of the
        new one, or None to append nothing. It is called again where another process was faster.
        Raises `UsageError` for an event that no store could read.
        """
        end = known
        while True:
            end = self.end(end)
            fields = fields_for(self.newest_first(end))
            if fields is None:
                return None
            made = {"format": FORMAT, **fields}
            data = json.dumps(made, sort_keys=True).encode()
            _require_readable(data, f"{self.where}/{_name(end + 1)}")
            if put_first(self._blob, _name(end + 1), data):
                return self.event(end + 1)

    def _has(self, position: int) -> bool:
        size = self._blob.size
        return self._blob.patience.over(lambda: size(_name(position))) is not None

    def _read(self, name: str) -> JsonObject | None:
        read = self._blob.get_range
        data = self._blob.patience.over(lambda: read(name, start=0, length=JSON_BYTES_MAX + 1))
        if data is None:
            return None
        where = f"{self.where}/{name}"
        found = read_object(data, where=where)
        if found.get("format") != FORMAT:
            raise FormatVersionError(where, found=found.get("format"), supported=(FORMAT,))
        return found


def pushes_of(events: Iterable[PushEvent]) -> list[Push]:
    """The pushes of a log, oldest first, each with its state."""
    found: dict[int, Push] = {}
    for event in events:
        if event.push is not None:
            found[event.number] = event.push
        elif event.number in found:
            state = "reverted" if event.kind == REVERT else "expired"
            found[event.number] = found[event.number]._replace(state=state)
    return list(found.values())


def place_of(
    newest: Iterator[PushEvent], job: str, feed: MicroBatch | None, known: int
) -> tuple[int, Push | None]:
    """The next number of a push. With it comes the push that `job`, or this micro-batch, has made
    already: an earlier attempt whose answer was lost, or another process. Raises `UsageError` if
    the feed has a push of another stream."""
    number, has_feed = 1, feed is None
    for event in newest:
        if event.push is not None:
            number = max(number, event.number + 1)
            if event.push.job == job:
                return number, event.push
            if feed is not None and event.push.feed is not None and not has_feed:
                has_feed = event.push.feed.position == feed.position
                if has_feed:
                    feed.require_same_stream(event.push.feed)
                if has_feed and event.push.feed.number >= feed.number:
                    return number, event.push
        if event.position <= known and has_feed and number > 1:
            break
    return number, None


def last_of_feed(newest: Iterator[PushEvent], batch: MicroBatch) -> Push | None:
    """The last push of this feed, if it has this micro-batch or a later one. Raises `UsageError`
    if the last push of the feed is of another stream."""
    pushes = (event.push for event in newest if event.push is not None)
    for push in pushes:
        if push.feed is not None and push.feed.position == batch.position:
            batch.require_same_stream(push.feed)
            return push if push.feed.number >= batch.number else None
    return None


def unexpired(newest: Iterator[PushEvent]) -> list[Push]:
    """The pushes that are not expired, oldest first. Takes the events back to the newest
    expired push: pushes expire in their order."""
    expired: set[int] = set()
    found: list[PushEvent] = []
    for event in newest:
        if event.kind == EXPIRE:
            expired.add(event.number)
        if event.push is not None and event.number in expired:
            break
        found.append(event)
    return pushes_of(reversed(found))


def newest_pushes(newest: Iterator[PushEvent], count: int) -> list[Push]:
    """The `count` newest pushes, oldest first. Takes the events back to the oldest of them."""
    found: list[PushEvent] = []
    for event in newest if count else ():
        found.append(event)
        count -= event.push is not None
        if not count:
            break
    return pushes_of(reversed(found))


def back_to(newest: Iterator[PushEvent], number: int) -> list[PushEvent]:
    """The events from the newest back to push `number`, which is the last of the list. Raises
    `UsageError` if there is no such push."""
    require_integer(number, name="number")
    found = []
    for event in newest:
        found.append(event)
        if event.push is not None and event.number <= number:
            break
    if not found or found[-1].push is None or found[-1].number != number:
        raise UsageError(
            f"there is no push {number!r}", "`kvstore push list` or Pushes.list() names all pushes"
        )
    return found


class Ahead:
    """The events behind the event that a store takes. Each is read once, however often a store that
    was away for long, or waits for long, asks about them.

    Pushes expire in their order, so the highest number tells which ones have.
    """

    def __init__(self, log: PushLog) -> None:
        self._log = log
        self._expired = self._read = 0
        self._reverted = set[int]()

    def is_expired(self, event: PushEvent) -> bool:
        """Whether the push of `event` expires later."""
        if event.number > self._expired:
            for _ in self._later(event):
                if event.number <= self._expired:
                    break
        return event.number <= self._expired

    def is_reverted(self, event: PushEvent) -> bool:
        """Whether the push of `event` is reverted later."""
        for _ in self._later(event):
            pass
        return event.number in self._reverted

    def _later(self, event: PushEvent) -> Iterator[PushEvent]:
        """The events behind `event` that were not read before."""
        for each in self._log.events(max(self._read, event.position) + 1):
            self._read = each.position
            if each.kind == EXPIRE:
                self._expired = max(self._expired, each.number)
            elif each.kind == REVERT:
                self._reverted.add(each.number)
            yield each


def _require_readable(data: bytes, where: str) -> None:
    """Raise `UsageError` for an event that the stores could not read."""
    try:
        _event(1, read_object(data, where=where))
    except CorruptionError as error:
        remedy = "take fewer shards, or clear fewer ranges at once"
        raise UsageError(f"{where} cannot be written: {error.problem}", remedy) from error


def _name(position: int) -> str:
    return f"log/{position:020d}.json"


def _event(position: int, found: JsonObject) -> PushEvent:
    kind, number = found.text("kind"), found.integer("push", least=1)
    if kind not in _KINDS:
        raise found.damaged(f"{kind[:40]!a} is no kind of event")
    if kind != PUSH:
        return PushEvent(position, kind, number, None, found.optional_integer("of", least=1))
    job = found.text("job")
    imports = tuple(_import(each) for each in found.objects("imports"))
    if not _JOB.fullmatch(job) or not 0 < len(imports) <= SHARDS_MAX:
        raise found.damaged("it has no job, or no number of shards")
    how = read_mode(found) if "mode" in found else PLAIN
    feed = _feed(found.inner("feed")) if "feed" in found else None
    push = Push(number, Timestamp(found.integer("at")), job, imports, how=how, feed=feed)
    return PushEvent(position, kind, number, push)


def _feed(found: JsonObject) -> MicroBatch:
    origin = found.text("origin") if "origin" in found else ""
    return MicroBatch(found.hexed("position"), found.integer("batch"), Origin.of_text(origin))


def _import(found: JsonObject) -> PushImport:
    text = found.text("import_id")
    if not re.fullmatch(r"[0-9a-f]{16}", text) or not 0 < int(text, 16) <= IMPORT_ID_MAX:
        raise found.damaged(f"{text[:20]!a} is no import id")
    rows, size = found.integer("rows"), found.integer("bytes")
    return PushImport(int(text, 16), found.text("checksum"), rows, size)
