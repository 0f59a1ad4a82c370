"""Events in envelopes of the shape that Debezium gives, for consumers of such envelopes.

    {"key": "AA1", "before": "late", "after": "on time", "op": "u", "ts_ms": 1357016400000,
     "source": {"connector": "kvstore", "name": "flights", "ts_ns": 1357016400000000001, "seq": 0,
                "snapshot": "false"}}

    op     "r" a row of the state | "c" a key that was absent before | "u" a put | "d" a delete

The source of a row that expires also has `"expires_ns"`, the time at which it does.

`before` needs a feed with `images="pre"`; without it `before` is null, and no put is a "c". Bytes
are written as in `kvstore.feeds.lines`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvstore.changes.event import Event, Operation
from kvstore.errors import UsageError
from kvstore.feeds.feed import FeedBatch
from kvstore.feeds.lines import as_text


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
    if event.op not in (Operation.UPDATE, Operation.ROW_DELETE):
        raise UsageError(
            f"an event {event.op.name} at {event.timestamp} has no envelope",
            'open the feed with expand="all"',
        )
    op = "u" if event.pre is not None or not has_before else "c"
    if is_state:
        op = "r"
    elif event.op == Operation.ROW_DELETE:
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
