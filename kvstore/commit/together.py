"""An event and the writes that belong to it: commits at timestamps of their own, in one batch.

An import is an event of its own: no other event has its timestamp. So an import and the writes that
belong to it are commits right after each other.

Invariants
1. A crash leaves all of them or none, and `upper` passes all of them at once. A reader of the
   newest state sees all or none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from kvstore.commit.committer import Committer, Count
from kvstore.commit.stage import Stage, each
from kvstore.engine.api import Engine
from kvstore.mvcc.write import WriteSet
from kvstore.timestamp import Timestamp

After: TypeAlias = "Callable[[Timestamp], WriteSet]"
"""Makes the writes that follow an event. It is called under the commit lock, with the time of the
event."""


def commit_together(
    committer: Committer,
    engine: Engine,
    event: Stage,
    after: After,
    *,
    check: Callable[[], None] | None = None,
) -> Timestamp:
    """Commit an event, and right above it the writes of `after`, durably. Returns the time of the
    event.

    `check` runs under the lock, before both, and may raise to call both off.
    """
    with committer.lock:
        committer.require_commits()
        times = committer.next_times(2)
        if check is not None:
            committer.expiries.waiting_for(check)
        stages = (event, committer.stage_of(after(times[0])))
        batch = engine.batch()
        counts: list[Count] = []
        publishing: list[Callable[[], None]] = []
        for timestamp, stage in zip(times, stages, strict=True):
            begun = committer.capture.begin_commit(timestamp)
            events, publish = stage(batch, timestamp, begun[0])
            counts.append((begun, events, timestamp + 1))
            publishing.append(publish)
        upper = Timestamp(times[-1] + 1)
        committer.write_commits(batch, partial(each, publishing), upper, counts)
        committer.syncs.sync()
    return times[0]
