"""The log of a root of pushes: an object for each event, numbered from 1, each put by one process.

    {"format": 1, "kind": "push", "push": n, "job": 32 hex, "shards": k, "at": ns,
     "rows", "bytes",
     "imports": [{"import_id": 16 hex, "checksum": 64 hex, "rows", "bytes"}, ...],
     "feed": {"position": hex, "batch": n, "origin": text of bulk.micro_batches}}
                                                  only in a push of a micro-batch
    {"format": 1, "kind": "revert", "push": n, "of": position of the push, "job": 32 hex,
     "at": ns}
    {"format": 1, "kind": "expire", "push": n, "job": 32 hex, "at": ns}

The event of a push that does more than to add its rows has the fields of its `PushMode`.

Invariants
1. The number of an event is taken by a put that only one process can make, so all readers see one
   order. A process whose put was overtaken reads the event and tries the next number.
2. Numbers have no gaps. A reader that finds no object under the next number has reached the end.
3. Events are never removed, so a store that was away, or is new, finds all of them. A year of
   pushes every five minutes is 100,000 objects of some hundred bytes. A job reads the newest
   ones.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from zlib import crc32

import pyarrow as pa

from kvstore.base.arguments import INTEGER, ArgumentKind, integer, text, word
from kvstore.base.clock import Clock
from kvstore.base.paths import require_outside, require_parent, require_path
from kvstore.base.span import RESERVED, Span, merge_spans, require_key
from kvstore.base.timestamp import TimeLike, Timestamp, to_timestamp
from kvstore.bulk.bucket import BucketUrl
from kvstore.bulk.manifest import Manifest
from kvstore.bulk.micro_batches import BatchOrigin
from kvstore.bulk.staging import Staging
from kvstore.codec.json import JsonObject, read_object
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import (
    Argument,
    CorruptionError,
    FormatVersionError,
    UsageError,
    printable,
    storage_errors,
)
from kvstore.limits import JSON_BYTES_MAX
from kvstore.mvcc.expiry_records import EXPIRY
from kvstore.mvcc.meta import optional_timestamp_of, span_of
from kvstore.storage.address import open_blob, parse_address, public_address, require_options
from kvstore.storage.contract import FAILURES, Blob, put_first
from kvstore.storage.patience import Patience
from kvstore.tables import TableCodec
from kvstore.tables.definition import table_prefix
from kvstore.timeline.reserved import FIRST_ROW

# --------------------------------------------------------------------------------------------------
# The place of a root of pushes, as callers name it: a URL that backups take, or a directory.


@dataclass(frozen=True)
class PushesPlace:
    """The root of pushes: a URL that backups take, or a directory that all machines share."""

    url: BucketUrl

    def open(self) -> tuple[Blob, str]:
        """The blobs below the root, and its name in errors."""
        url = self.url
        blob = open_blob(url.url, patience=Patience(url.patience_s), **url.options)
        return blob, public_address(url.url)

    def require_parent(self) -> None:
        """Raise `UsageError` for a directory whose parent is missing: the path is mistyped, or a
        disk is not mounted."""
        address = parse_address(self.url.url)
        if address.is_file:
            require_parent(Path(address.path))


def root_place(
    url: Staging, options: Mapping[str, Any] | None, patience: float | None
) -> PushesPlace:
    """The root of pushes that `url` names. Raises `UsageError`."""
    if isinstance(url, BucketUrl):
        return PushesPlace(url)
    if not isinstance(url, str):
        require_path(url, name="url")
    address = parse_address(url)
    if address.is_file:
        with storage_errors(address.path):
            is_new = not os.path.isdir(address.path) or not os.listdir(address.path)
        if is_new:
            require_outside(Path(address.path), name="the log of pushes")
    text = str(require_path(address.path, name="url")) if address.is_file else address.url
    return PushesPlace(BucketUrl(text, require_options(options), patience))


# --------------------------------------------------------------------------------------------------
# The shard of a key. The rule is published, and never changes: other programs compute it.
#
#     shard := CRC-32 of the key (IEEE 802.3, as zlib's), modulo the number of shards

SHARDS_MAX: Final = 10_000
"""Shards of a push: their numbers have four digits in the names of objects."""


def shard_of(key: bytes, shards: int) -> int:
    """The shard of `key`, from 0 to `shards - 1`. Spark's `crc32(key) % shards` is the same."""
    return crc32(require_key(key)) % integer(1, SHARDS_MAX).check("shards", shards)


def shard_column(keys: pa.Array, shards: int) -> pa.Array:
    """The shards of keys, as 32-bit integers. Costs 0.2 us a key."""
    return pa.array([crc32(key) % shards for key in keys.to_pylist()], pa.int32())


# --------------------------------------------------------------------------------------------------
# The mode of a push: what it does to keys that it lacks, and to writes that came after its build.
#
#     "mode": "add" | "replace" | "change", "spans": [[start hex, end hex | null], ...],
#     "built_at": ns | null
#
# A push that adds writes its rows over older ones. A push that replaces is the new whole of
# `spans`: each key there that it lacks is deleted, at the stamp of its rows. With `built_at` it
# leaves alone each key that was written after that time, by anything but a push. A push that
# changes deletes the keys of `spans` that it lacks, as a change feed with range deletes asks for,
# and its rows lie anywhere.
#
# Invariants
# 1. A push that replaces has spans, and all its rows lie in them. A push that changes has spans. A
#    push that adds has none.
# 2. A span has plain keys only, or keys of tables only: no push deletes the records of a store.

ModeName: TypeAlias = Literal["add", "replace"]
ADD: Final = "add"
REPLACE: Final = "replace"
MODE: Final[ArgumentKind[ModeName]] = word(ADD, REPLACE)
CHANGE: Final = "change"
SPANS_MAX: Final = 1_000
"""Spans of one push: the entry of the log stays small, and each span is a scan on each store."""


class PushMode(NamedTuple):
    """How a push meets older and newer rows. The default writes over all of them."""

    name: str = ADD
    spans: tuple[Span, ...] = ()
    built_at: Timestamp | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the push only writes its rows."""
        return self.name == ADD and self.built_at is None

    def fields(self) -> dict[str, Any]:
        """The fields of the event of a push with this mode."""
        spans = [[each.start.hex(), each.end and each.end.hex()] for each in self.spans]
        return {"mode": self.name, "spans": spans, "built_at": self.built_at}

    def require_rows(self, manifests: Iterable[Manifest]) -> None:
        """Raise `UsageError` unless all rows lie where the push may write."""
        if self.name != REPLACE:
            return
        for part in (part for each in manifests for part in each.parts):
            if part.smallest.startswith(EXPIRY):
                continue  # the keys that expire are rows of another part
            if not any(part.smallest in span and part.largest in span for span in self.spans):
                raise UsageError(
                    f"rows from {printable(part.smallest)} to {printable(part.largest)} lie "
                    "outside of the span that the push replaces",
                    "push them by another push, or replace a longer span",
                )

    def require_tables(self, codecs: Iterable[TableCodec]) -> None:
        """Raise `UsageError` unless the spans of tables belong to the tables of the push."""
        own = []
        for codec in codecs:
            require_keeping(codec, self.built_at)
            own.append(Span.of_prefix(table_prefix(codec.definition.number)))
        if any(span.start >= FIRST_ROW and span not in own for span in self.spans):
            raise UsageError(
                "the push replaces a table of which it has no rows", "push its rows by table="
            )


PLAIN: Final = PushMode()
"""The mode of a push that only writes its rows."""


def mode_of(
    mode: ModeName,
    prefix: bytes | None,
    codec: TableCodec | None = None,
    *,
    keep_newer: bool,
    built_at: TimeLike | None,
) -> PushMode:
    """The mode that the arguments of a caller describe. A push of a table replaces its keys: the
    rows, and the entries of its indexes. Raises `UsageError`."""
    MODE.check("mode", mode)
    if codec is not None:
        if prefix is not None:
            raise UsageError((Argument.of("prefix", prefix), " with a table"), "leave it out")
        prefix = table_prefix(codec.definition.number) if mode == REPLACE else None
        require_keeping(codec, built_at)
    if (mode == REPLACE) != (prefix is not None):
        raise UsageError(
            (Argument.of("mode", mode), " with ", Argument.of("prefix", prefix)),
            (
                "pass ",
                Argument.of("mode", "replace"),
                " and the prefix of the keys that the push replaces; an empty prefix is every key",
            ),
        )
    if keep_newer != (built_at is not None):
        raise UsageError(
            (Argument.of("keep_newer", keep_newer), " with ", Argument.of("built_at", built_at)),
            (
                "pass both: ",
                Argument("built_at"),
                " is the time at which the job read the data that it pushes",
            ),
        )
    spans = () if prefix is None else (Span.of_prefix(prefix).plain(),)
    _require_own(spans)
    return PushMode(mode, spans, None if built_at is None else _instant(built_at))


def mode_of_changes(cleared: Iterable[tuple[bytes, bytes]]) -> PushMode:
    """The mode of a push that clears these ranges before it writes. Raises `UsageError`."""
    try:
        ranges = [(start, end) for start, end in cleared if start < end]
    except (TypeError, ValueError) as error:
        raise UsageError(f"the cleared ranges: {error}", "pass pairs of two keys") from error
    spans = tuple(merge_spans(Span(start, end) for start, end in ranges))
    if len(spans) > SPANS_MAX:
        raise UsageError(
            f"the changes clear {len(spans):,} ranges of keys, and a push at most {SPANS_MAX:,}",
            "push the changes of a shorter window",
        )
    _require_own(spans)
    return PushMode(CHANGE, spans) if spans else PLAIN


def require_keeping(codec: TableCodec, built_at: object) -> None:
    """Raise `UsageError` for a push that keeps newer rows of a table with a unique index. A row
    that is kept may have the values of a row of the push, and nothing compares the two."""
    for index in codec.definition.indexes:
        if built_at is not None and index.is_unique:
            raise UsageError(
                f"keep_newer for {codec.definition.where}, whose index {index.name!r} is unique",
                "leave out keep_newer, or drop the index",
            )


def read_mode(found: JsonObject) -> PushMode:
    """The mode of the event of a push. Raises `CorruptionError`."""
    name, spans = found.text("mode"), found.items_of("spans", list)
    if name not in (ADD, REPLACE, CHANGE) or (name != ADD) != bool(spans):
        raise found.damaged(f"mode {name[:40]!a} has {len(spans)} spans")
    if any(len(bounds) != 2 for bounds in spans):
        raise found.damaged("a span has two bounds")
    read = tuple(span_of(found, start, end) for start, end in spans)
    try:
        _require_own(read)
    except UsageError as error:
        raise found.damaged(error.what) from error
    return PushMode(name, read, optional_timestamp_of(found, "built_at"))


def _require_own(spans: Iterable[Span]) -> None:
    for span in spans:
        is_plain = span.end is not None and span.end <= RESERVED
        if not is_plain and span.start < FIRST_ROW:
            raise UsageError(
                f"a push cannot replace keys from {printable(span.start)} on",
                "a prefix of plain keys does not begin with nine bytes ff",
            )


def _instant(built_at: TimeLike) -> Timestamp:
    now = Clock().wall_ns
    found = to_timestamp(built_at, name="built_at", now=now)
    if found > now():
        raise UsageError(
            (Argument("built_at", str(found)), " lies in the future"), "pass the time of the build"
        )
    return found


# --------------------------------------------------------------------------------------------------
# The log.


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
    origin: BatchOrigin = BatchOrigin()

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
    INTEGER.check("number", number)
    found = []
    for event in newest:
        found.append(event)
        if event.push is not None and event.number <= number:
            break
    if not found or found[-1].push is None or found[-1].number != number:
        raise UsageError(
            f"there is no push {number!r}",
            (Argument("pushes.list()"), " names all pushes"),
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
    return MicroBatch(found.hexed("position"), found.integer("batch"), BatchOrigin.of_text(origin))


def _import(found: JsonObject) -> PushImport:
    text = found.text("import_id")
    if not re.fullmatch(r"[0-9a-f]{16}", text) or not 0 < int(text, 16) <= IMPORT_ID_MAX:
        raise found.damaged(f"{text[:20]!a} is no import id")
    rows, size = found.integer("rows"), found.integer("bytes")
    return PushImport(int(text, 16), found.text("checksum"), rows, size)


# --------------------------------------------------------------------------------------------------
# Reports of the stores of a root: one small object for each store, replaced by its next number.
#
#     status/<name>/<20 digits>.json := {"format": 1, "name", "store": id, "shard", "position",
#         "told": ns, "free", "error",
#         "pushes": {"<push>": {"state", "at": ns, "error", "seconds": {stage: s}}}}
#
# The first `error` says why the store cannot read the next event of the log. `position` counts the
# events that the store has passed. The states of a push are added, reverted, refused and waiting;
# its `error` says why it was refused, or why it waits. A status has the last `PUSHES_TOLD` pushes,
# and as many pushes whose states are the newest.

ERROR_CHARS_MAX: Final = 500
"""Characters of an error in a status: a whole status stays small."""

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
STORE_NAME: Final = text(pattern=_NAME, hint="use letters, digits, . _ and -, 100 at most")
_NUMBERED: Final = re.compile(rf"status/({_NAME})/([0-9]{{20,}})\.json")
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
            if named := _NUMBERED.fullmatch(each.name):
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
