"""Garbage collection: delete the blobs and versions that nobody can reach any more.

A part is needed as long as a live version names it. A version is live until a rollup at or above it
takes over and no leased reader holds it. So a collection moves the earliest live version up to a
rollup, and deletes the blobs that only earlier versions named.

    versions   e ........ r ........ head          e: earliest live; r: the rollup chosen
    delete     named in [e, r), not at r           parts and rollups alike

Order of steps; a crash between any two leaves a state from which the next run continues
1. Delete the blobs. Names are never used again, so a blob without a name at r never gets one.
2. Truncate consensus below r, and remove the witnesses of the truncated versions.
3. Take the rollups below r out of the state. (A later run deletes their blobs, when the versions
   that name them are gone.)

Requests may be stale, repeated or overtaken: then nothing happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvstore.backup.shard.state import codec, witness
from kvstore.backup.shard.state.state_log import StateLog
from kvstore.limits import ROLLUP_EVERY, WRITER_IDLE_NS


@dataclass(frozen=True, slots=True)
class Collected:
    """The figures of one run."""

    blobs: tuple[str, ...] = ()
    versions: int = 0
    rollups: int = 0


def collect_if_due(log: StateLog) -> Collected:
    """Collect if enough versions have piled up and no other process was told to collect."""
    expire_lapsed(log)
    if log.state.gc_target is None:
        return Collected()  # by the state of this handle, which costs nothing
    expire_idle_writers(log)
    target = log.apply(lambda state: state.request_gc()).outcome
    return Collected() if target is None else collect(log, to=target)


def expire_lapsed(log: StateLog) -> None:
    """Forget the readers whose lease has run out: a crashed one would keep all it held."""
    now_ns = log.clock.wall_ns()
    if log.state.lapsed_readers(now_ns):
        log.apply(lambda state: state.expire_lapsed(now_ns))


def expire_idle_writers(log: StateLog) -> None:
    """Forget writers that nobody comes back to: every backup uses a new writer."""
    before_ns = log.clock.wall_ns() - WRITER_IDLE_NS
    if log.state.idle_writers(before_ns):
        log.apply(lambda state: state.expire_idle_writers(before_ns))


def prepare(log: StateLog) -> None:
    """Write a rollup of the newest version that may be collected up to, if that frees parts."""
    expire_lapsed(log)
    expire_idle_writers(log)
    target = log.refresh().seqno_since
    states = [state for state in log.live_states() if state.seqno <= target]
    if not states or states[-1].seqno in log.state.rollups:
        return
    parts = [{name for batch in state.batches for name in batch.names()} for state in states]
    if set().union(*parts) - parts[-1] or len(states) > ROLLUP_EVERY:
        log.write_rollup(states[-1])


def collect(log: StateLog, *, to: int | None = None) -> Collected:
    """Collect up to the newest rollup at or below version `to` (default: the newest that can be
    collected)."""
    state = log.refresh()
    # `seqno_since` only grows: a state that is a little old merely collects a little less.
    target = state.seqno_since if to is None else min(to, state.seqno_since)
    rollup = max((seqno for seqno in state.rollups if seqno <= target), default=None)
    if rollup is None:
        return Collected()
    first, diffs = log.live_diffs()
    earliest = first.seqno
    if earliest > rollup or (diffs[-1].seqno if diffs else earliest) < rollup:
        return Collected()
    upto = [diff for diff in diffs if diff.seqno <= rollup]
    kept = set(codec.apply_diffs(first, upto, where=f"shard {log.shard}").blobs())
    blobs = tuple(sorted(codec.blobs_named(first, upto[:-1]) - kept))
    for name in blobs:
        log.retrying(partial(log.blob.delete, name))
    if earliest < rollup:
        log.retrying(lambda: log.consensus.truncate(log.shard, rollup))
        witness.remove(log.blob, log.shard, below=rollup)
    older = {seqno: name for seqno, name in state.rollups.items() if seqno < rollup}
    removed = log.apply(lambda state: state.remove_rollups(older)).outcome if older else ()
    return Collected(blobs, rollup - earliest, len(removed))
