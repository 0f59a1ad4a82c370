"""Changes as JSON lines, for pipes: plain lines, and envelopes of the shape that Debezium gives."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Protocol

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.changes.events import Change, Event, Expand, Images, Op, Operation
from kvstore.errors import UsageError
from kvstore.feeds.feed import FeedBatch

# --------------------------------------------------------------------------------------------------
# Changes as JSON lines, for pipes: the output of `kvstore changes`.
#
#     {"timestamp": "2013-01-01T05:00:00.000000001Z", "seq": 0, "op": "put", "key": "AA1",
#      "value": "on time", "changeset": "<domain>.<serial>", "stream": "...", "end_of_batch": true}
#
# A put whose value expires has `"expires": "2013-01-01T06:00:00.000000000Z"` at the end.
#
# Bytes that are valid UTF-8 become text, and other bytes an object `{"base64": "..."}`. Fields
# without a value are left out. Each event is one line.


class Follows(Protocol):
    """The feeds of a store."""

    def follow(
        self, since: TimeLike, *, span: Span | None, images: Images, expand: Expand
    ) -> Iterator[FeedBatch]:
        """See `Feeds.follow`."""
        ...


class EventSource(Protocol):
    """The source of the lines: a store."""

    @property
    def feeds(self) -> Follows:
        """See `Store.feeds`."""
        ...

    def events(
        self, since: TimeLike, *, span: Span | None, images: Images, expand: Expand
    ) -> Iterator[Event]:
        """As `Store.events`."""
        ...


def changes_json_lines(
    store: EventSource,
    since: TimeLike,
    follow: bool = False,
    *,
    span: Span | None = None,
    images: Images = "delta",
    expand: Expand = "imports",
) -> Iterator[str]:
    """A line per event after `since`, until now; with `follow` also for all later events.

    Raises as `Store.events`. History is kept while the lines are being read.
    """
    if not follow:
        for event in store.events(since, span=span, images=images, expand=expand):
            yield json_line(event)
        return
    for batch in store.feeds.follow(since, span=span, images=images, expand=expand):
        for event in batch.events:
            yield json_line(event)


def restored_json_lines(changes: Iterable[Change], images: Images) -> Iterator[str]:
    """Lines of changes in time order that have no changeset and no stream, as in a backup."""
    for _, commit in groupby(changes, lambda change: change.timestamp):
        for sequence, change in enumerate(commit):
            yield _line(
                {
                    "timestamp": str(change.timestamp),
                    "seq": sequence,
                    "op": _OPERATIONS[change.op].name.lower(),
                    "key": as_text(change.key),
                    "end_key": as_text(change.end_key),
                    "value": None if images == "none" else as_text(change.value),
                    "expires": as_time(change.expires),
                }
            )


def json_line(event: Event) -> str:
    """One event as one line, without the line end."""
    fields = {
        "timestamp": str(event.timestamp),
        "seq": event.sequence,
        "op": event.op.name.lower(),
        "key": event.key.hex() if event.op in _BY_ID else as_text(event.key),
        "end_key": as_text(event.end_key),
        "value": as_text(event.value),
        "pre": as_text(event.pre),
        "post": as_text(event.post),
        "changeset": f"{event.changeset.domain:016x}.{event.changeset.serial:016x}",
        "stream": event.stream.hex(),
        "end_of_batch": event.end_of_batch,
        "expires": as_time(event.expires),
    }
    return _line(fields)


def _line(fields: dict[str, Any]) -> str:
    return json.dumps(
        {name: value for name, value in fields.items() if value is not None}, ensure_ascii=False
    )


_BY_ID = (Operation.IMPORT, Operation.REVERT)

_OPERATIONS: dict[Op, Operation] = {
    "put": Operation.PUT,
    "delete": Operation.DELETE,
    "delete_range": Operation.DELETE_RANGE,
}


def as_time(time: Timestamp | None) -> str | None:
    """A time as a field of a line."""
    return None if time is None else str(time)


def as_text(raw: bytes | None) -> str | dict[str, str] | None:
    """Bytes as a field of a line: text where they are UTF-8, else an object `{"base64": ...}`."""
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


# --------------------------------------------------------------------------------------------------
# Events in envelopes of the shape that Debezium gives, for consumers of such envelopes.
#
#     {"key": "AA1", "before": "late", "after": "on time", "op": "u", "ts_ms": 1357016400000,
#      "source": {"connector": "kvstore", "name": "flights", "ts_ns": 1357016400000000001, "seq": 0,
#                 "snapshot": "false"}}
#
#     op     "r" a row of the state | "c" a key that was absent before | "u" a put | "d" a delete
#
# The source of a row that expires also has `"expires_ns"`, the time at which it does.
#
# `before` needs a feed with `images="pre"`; without it `before` is null, and no put is a "c". Bytes
# are written as in plain lines, see above.


def debezium_lines(batch: FeedBatch, *, name: str, has_before: bool = False) -> Iterator[str]:
    """A line of JSON per event of a batch. `name` names the store in `source`.

    `has_before` says that the feed has pre-images, so that a put without one is a new key. Raises
    `UsageError` for a range delete, an import or a revert that comes whole: open the feed with
    `expand="all"`.
    """
    for event in batch.events:
        fields = _envelope(event, name, is_state=batch.is_state, has_before=has_before)
        yield json.dumps(fields, ensure_ascii=False)


def _envelope(event: Event, name: str, *, is_state: bool, has_before: bool) -> dict[str, Any]:
    if event.op not in (Operation.PUT, Operation.DELETE):
        raise UsageError(
            f"an event {event.op.name} at {event.timestamp} has no envelope",
            'open the feed with expand="all"',
        )
    op = "u" if event.pre is not None or not has_before else "c"
    if is_state:
        op = "r"
    elif event.op == Operation.DELETE:
        op = "d"
    source = {
        "connector": "kvstore",
        "name": name,
        "ts_ns": int(event.timestamp),
        "seq": event.sequence,
        "snapshot": "true" if is_state else "false",
    }
    if event.expires is not None:
        source["expires_ns"] = int(event.expires)
    return {
        "key": as_text(event.key),
        "before": as_text(event.pre),
        "after": as_text(event.value if event.post is None else event.post),
        "op": op,
        "ts_ms": event.timestamp // 1_000_000,
        "source": source,
    }
