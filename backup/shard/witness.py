"""Witnesses: small blobs beside the parts that say which states a shard has had.

    blob "<shard>/witness/v<seqno, 20 digits>" := the digest of the step to that state, as text

Consensus alone cannot tell that its newest versions were cut off, or that it was put back from an
older copy: what is left is a whole, older log. Witnesses lie with the parts, so a log that lost its
end is found by the newest of them. An appending process writes one behind each append. It is not
worth an fsync: a witness that a crash takes back makes the check weaker, never wrong.

Invariants
1. A witness of version v is written after v was committed, and v is never taken back.
2. Collection removes the witnesses below the oldest live version; an end removes all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from backup.shard.blob import FAILURES, Blob
from backup.shard.log import StateLog
from kvstore.digest import digest
from kvstore.errors import StatesLostError, UsageError

FOLDER: Final = "witness"
_NAME = re.compile(rf"(?P<shard>[^/]+)/{FOLDER}/v(?P<seqno>\d{{20}})")
_REMEDY = "put the newest copy of all of it back"


def leave(log: StateLog) -> None:
    """Write down that the newest state of this handle was there.

    A failure leaves it to the next append. Raises `StatesLostError` where another history had a
    state of this number: this append went to an older copy of the shard."""
    state = log.state
    if not state.chain:
        return
    with suppress(*FAILURES):
        try:
            log.blob.put(_name(log, state.seqno), state.chain.encode(), durable=False)
        except UsageError as error:
            known = log.blob.get(_name(log, state.seqno))
            if known is None or known == state.chain.encode():
                raise
            where = f"shard {log.shard}"
            raise StatesLostError(where, found=state.seqno, known=state.seqno) from error


def require(log: StateLog) -> None:
    """Raise `StatesLostError` if there were states that are gone, or others of the same number.

    Costs a listing and a small read, mostly."""
    newest = max(seqnos(log.blob, log.shard), default=0)
    if newest > log.state.seqno and newest > log.refresh().seqno:
        raise StatesLostError(f"shard {log.shard}", found=log.state.seqno, known=newest)
    known = log.retrying(lambda: log.blob.get(_name(log, newest))) if newest else None
    if known is None:
        return
    if newest == log.state.seqno:
        found = log.state.chain
    else:
        versions = log.retrying(lambda: log.consensus.scan(log.shard, start=newest, limit=1))
        if not versions or versions[0].seqno != newest:
            return  # collected since
        found = digest(versions[0].data)
    if known.decode(errors="replace") != found:
        raise StatesLostError(f"shard {log.shard}", found=newest, known=newest, remedy=_REMEDY)


def remove(blob: Blob, shard: str, *, below: int | None = None, above: int | None = None) -> None:
    """Remove the witnesses of versions below, or above, a number; all of the shard's by default."""
    for seqno in sorted(seqnos(blob, shard)):
        is_kept = (below is not None and seqno >= below) or (above is not None and seqno <= above)
        if not is_kept:
            with suppress(*FAILURES):
                blob.delete(f"{shard}/{FOLDER}/v{seqno:020}")


def seqnos(blob: Blob, shard: str) -> set[int]:
    """The versions that have a witness."""
    listed = blob.patience.over(lambda: list(blob.list(f"{shard}/{FOLDER}/")))
    found = (_NAME.fullmatch(info.name) for info in listed)
    return {int(match["seqno"]) for match in found if match is not None}


def shards(blob: Blob, prefix: str) -> Iterator[str]:
    """The shards below `prefix` that have a witness. Lists all blobs there."""
    listed = blob.patience.over(lambda: list(blob.list(prefix)))
    yield from {match["shard"] for info in listed if (match := _NAME.fullmatch(info.name))}


def is_witness(name: str) -> bool:
    """Whether a blob of this name is a witness."""
    return _NAME.fullmatch(name) is not None


def _name(log: StateLog, seqno: int) -> str:
    return f"{log.shard}/{FOLDER}/v{seqno:020}"
