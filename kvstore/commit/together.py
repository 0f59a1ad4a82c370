"""Commits that go together: at timestamps of their own, in one engine batch.

An import is an event of its own: no other event has its timestamp. So an import and the writes that
belong to it are two commits, right after each other.

Invariants
1. A crash leaves all of them or none, and `upper` passes all of them at once. A reader of the
   newest state sees all or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvstore.commit.committer import Committer, Count
from kvstore.commit.stage import Stage, each
from kvstore.engine.api import Engine
from kvstore.timestamp import Timestamp


def commit_together(
    committer: Committer,
    engine: Engine,
    stages: Sequence[Stage],
    *,
    check: Callable[[], None] | None = None,
) -> list[Timestamp]:
    """Commit each stage at a timestamp of its own, ascending, durably. Returns the timestamps.

    `check` runs under the lock, before the stages, and may raise to call all of them off.
    """
    with committer.lock:
        committer.require_commits()
        times = committer.next_times(len(stages))
        if check is not None:
            check()
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
    return times
