"""Long work of the owner of a store, which a client asks for and follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from kvstore.arguments import require_age
from kvstore.claims import HoldRecord, from_fields
from kvstore.client import streams
from kvstore.client.calls import ns, verb
from kvstore.client.pool import Pool
from kvstore.client.reply import Reply
from kvstore.codec.json import JsonObject
from kvstore.counts import WorkCount
from kvstore.errors import IndeterminateError
from kvstore.gc import GcReport
from kvstore.protocol import failure_of
from kvstore.timestamp import TimeLike

Progress = Callable[[int], None]


def work_of(
    pool: Pool, name: str, progress: Progress | None, /, **fields: Any
) -> Mapping[str, Any]:
    """Have the owner do long work, and return its result. An error that `progress` raises ends the
    work at its next step."""
    for batch in streams.rows(pool, verb(name, fields, Reply.json)):
        (row,) = batch.to_pylist()
        if row["result"] is not None:
            result: Mapping[str, Any] = json.loads(row["result"])
            return result
        if row["error"] is not None:
            raise failure_of(json.loads(row["error"]), status=500, where=pool.where)
        if progress is not None:
            about = row.get("is_about") or False  # an older server tells neither
            progress(WorkCount.of(row["done"], row.get("total"), is_about=about))
    raise IndeterminateError(f"{name} by {pool.where}", "the answer ended without a result")


def collect(
    pool: Pool,
    before: TimeLike | None,
    keep: timedelta | None,
    compact: bool,
    progress: Progress | None,
) -> GcReport:
    """See `Store.gc`."""
    age = require_age(keep, name="keep")
    found = work_of(
        pool,
        "gc",
        progress,
        before=ns(before, "before"),
        keep=None if age is None else age.total_seconds(),
        compact=compact,
    )
    claims = {
        name: tuple(hold_record(fields) for fields in found[name])
        for name in ("lost_holds", "held_by")
    }
    return GcReport(**{**found, **claims})


def hold_record(fields: Mapping[str, Any]) -> HoldRecord:
    """The record of a hold, out of an answer."""
    return from_fields(fields["name"], JsonObject(dict(fields), where="the server's answer"))
