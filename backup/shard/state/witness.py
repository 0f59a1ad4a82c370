"""Witnesses: small blobs beside the parts that say which states a shard has had.

    blob "<shard>/witness/v<seqno, 20 digits>" := the digest of the step to that state, as text

Consensus alone cannot tell that its newest versions were cut off, or that it was put back from an
older copy: the rest is a whole, older log. Witnesses lie with the parts, so the newest witness
betrays a log that lost its end. A process writes a witness behind each append, without an fsync: a
witness that a crash takes back, or leaves without its bytes, makes the check weaker, never wrong.
The name of such a torn witness still tells that its state was there.

Invariants
1. A witness of version v is written after v was committed, and v is never taken back.
2. Collection removes the witnesses below the oldest live version; `finalise` removes all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from kvstore.backup.shard.state.state_log import StateLog
from kvstore.base.digest import digest
from kvstore.errors import CorruptionError, StatesLostError, UsageError
from kvstore.storage.contract import FAILURES, Blob

FOLDER: Final = "witness"
_NAME = re.compile(rf"(?P<shard>[^/]+)/{FOLDER}/v(?P<seqno>\d{{20}})")
_DIGEST = re.compile(r"blake3:[0-9a-f]{32}", re.ASCII)
_REMEDY = "put back the newest copy of all its files"


def leave(log: StateLog) -> None:
    """Write a witness of the newest state of this handle.

    After a failure of the storage the next append does so. Raises `StatesLostError` where another
    history had a state of this number: then this append went to an older copy of the shard.
    """
    state = log.state
    with suppress(*FAILURES):
        try:
            log.blob.put(_name(log, state.seqno), state.step_digest.encode(), durable=False)
        except (UsageError, CorruptionError) as error:
            known = _told(log, state.seqno)
            if known is None:
                return  # the witness there is torn, and stays: blobs are written once
            if known == state.step_digest:
                raise
            where = f"shard {log.shard}"
            raise StatesLostError(where, found=state.seqno, known=state.seqno) from error


def require(log: StateLog) -> None:
    """Raise `StatesLostError` if a witnessed state is gone, or another has its number.

    Costs a listing and mostly one small read.
    """
    noted = sorted(seqnos(log.blob, log.shard), reverse=True)
    newest = noted[0] if noted else 0
    if newest > log.state.seqno and newest > log.refresh().seqno:
        raise StatesLostError(f"shard {log.shard}", found=log.state.seqno, known=newest)
    told = ((seqno, log.retrying(partial(_told, log, seqno))) for seqno in noted)
    seqno, known = next((each for each in told if each[1] is not None), (0, None))
    if known is None:
        return
    if seqno == log.state.seqno:
        found = log.state.step_digest
    else:
        versions = log.retrying(lambda: log.consensus.scan(log.shard, start=seqno, limit=1))
        if not versions or versions[0].seqno != seqno:
            return  # collected since
        found = digest(versions[0].data)
    if known != found:
        raise StatesLostError(f"shard {log.shard}", found=seqno, known=seqno, remedy=_REMEDY)


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
    """The shards with a witness whose name begins with `prefix`. Lists all blobs there."""
    listed = blob.patience.over(lambda: list(blob.list(prefix)))
    yield from {match["shard"] for info in listed if (match := _NAME.fullmatch(info.name))}


def is_witness(name: str) -> bool:
    """Whether a blob of this name is a witness."""
    return _NAME.fullmatch(name) is not None


def _told(log: StateLog, seqno: int) -> str | None:
    """The digest in a witness; None where there is no witness or a crash has left it torn."""
    try:
        data = log.blob.get(_name(log, seqno))
    except CorruptionError:  # an encrypted blob that is torn
        return None
    text = "" if data is None else data.decode("ascii", "replace")
    return text if _DIGEST.fullmatch(text) else None


def _name(log: StateLog, seqno: int) -> str:
    return f"{log.shard}/{FOLDER}/v{seqno:020}"
