"""Drills: a restore for real, into scratch space, which proves that an instant can be had back.

    restore -> open -> verify -> compare with the source -> record the outcome

A drill takes the same way as a person after a disaster. So its proof covers the storage, the key
of an encrypted collection, the parts, the code and the space on this machine.

Invariants
1. A drill that returns has proved its instant. A drill that disproves it raises the error.
2. Both outcomes are recorded, in the record of the collection. A drill that could not be done,
   for want of space or of the storage, is neither.
3. Nothing of the scratch space stays, unless the process is killed.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from kvstore.backup.chains import (
    Chains,
    CollectionRecord,
    Drill,
    covers,
    gone,
    instant_of,
    no_backup,
)
from kvstore.backup.rows import row_batches
from kvstore.backup.shard import Shard
from kvstore.backup.verify import Compared, fingerprint, require_comparison, require_equal, together
from kvstore.base.arguments import word
from kvstore.base.clock import WallClock
from kvstore.base.timestamp import NS_PER_SECOND, Timestamp
from kvstore.errors import (
    AccessDeniedError,
    CorruptionError,
    HistoryGoneError,
    NotYetWrittenError,
    UsageError,
    storage_errors,
)
from kvstore.evidence import write_evidence
from kvstore.limits import (
    DRILL_PROBLEM_CHARS_MAX,
)
from kvstore.opening import open as open_store
from kvstore.store import Store

DrillDepth: TypeAlias = Literal["open", "contents"]
_PICK: Final = random.SystemRandom()
_Range: TypeAlias = tuple[int, int, int]
"""The instants from the first to below the second number, and a weight."""
DRILL_DEPTHS: Final[tuple[DrillDepth, ...]] = ("open", "contents")
_DRILL_DEPTH: Final = word(*DRILL_DEPTHS)


class DrillReport(NamedTuple):
    """A proof: the instant `at` of the chain was restored, opened and verified at `drilled_at`.

    `rows` are the versions of the restored store, `compared` the rows that were compared with the
    source (0 unless the depth is `"contents"`), `digest` their fingerprint, the same on both sides.
    `recorded` is False where the storage refuses writes.
    """

    at: Timestamp
    depth: str
    chain: str
    rows: int
    compared: int
    bytes: int
    seconds: float
    drilled_at: Timestamp
    recorded: bool
    digest: str = ""


class DrillRequest(NamedTuple):
    """One call of `Collection.drill`. `at` is None for a random instant; `address` names the
    collection in the metrics of its source."""

    at: int | None
    depth: DrillDepth
    scratch: Path | None
    address: str
    evidence: Path | None = None


def drill(
    chains: Chains,
    request: DrillRequest,
    restore: Callable[[Path, int], object],
    store: Store | None,
    clock: WallClock,
) -> DrillReport:
    """Drill as `Collection.drill` says. `restore` builds a store at a path, as of a time."""
    record, shards = _drillable(chains, request, store)
    chosen, at = _instant(shards, request, store)
    began = clock.wall_ns()

    def outcome(problem: str = "") -> Drill:
        text = problem.partition("\n")[0][:DRILL_PROBLEM_CHARS_MAX]
        text = text.encode(errors="replace").decode()  # a path may have bytes that are no text
        return Drill(chosen.name, at, clock.wall_ns(), request.depth, text)

    try:
        chains.require_named(record)
        chosen.require_newest()
        rows, (compared, digest), size = _proved(chains.where, at, request, restore, store)
    except CorruptionError as error:
        disproof = outcome(str(error))
        recorded = _record(chains, disproof)
        _write_evidence(request, record, disproof, began, {"recorded": recorded})
        raise
    proof = outcome()
    recorded = _record(chains, proof)
    drilled_at = Timestamp(proof.drilled_at)
    if store is not None:
        store.holds.note_proof(request.address, drilled_at)
    figures = {"rows": rows, "compared": compared, "digest": digest, "bytes": size}
    _write_evidence(request, record, proof, began, {"recorded": recorded, **figures})
    seconds = max(drilled_at - began, 0) / NS_PER_SECOND
    timed = size, seconds, drilled_at, recorded, digest
    return DrillReport(Timestamp(at), request.depth, chosen.name, rows, compared, *timed)


def _write_evidence(
    request: DrillRequest,
    record: CollectionRecord,
    outcome: Drill,
    began: int,
    figures: Mapping[str, object],
) -> None:
    """Write the file for an auditor, where the call names one."""
    if request.evidence is None:
        return
    fields = {
        "collection": request.address,
        "store": record.source,
        "chain": outcome.chain,
        "at": str(Timestamp(outcome.at)),
        "depth": outcome.depth,
        "outcome": "disproved" if outcome.problem else "proved",
        "problem": outcome.problem,
        "seconds": max(outcome.drilled_at - began, 0) / NS_PER_SECOND,
        **figures,
    }
    write_evidence(request.evidence, "drill", Timestamp(outcome.drilled_at), fields)


def _drillable(
    chains: Chains, request: DrillRequest, store: Store | None
) -> tuple[CollectionRecord, Sequence[Shard]]:
    """The record, and the chains with a backup. Raises `UsageError` for a call that cannot be."""
    _DRILL_DEPTH.check("depth", request.depth)
    require_comparison(request.depth, given=store is not None)
    record = chains.read()
    shards = chains.filled(record)
    if record is None or not shards:
        raise no_backup(chains.where)
    if store is not None and store.store_id != record.source:
        raise UsageError(
            f"{chains.where} holds the backups of store {record.source}, not {store.store_id}",
            "pass the store that is backed up there",
        )
    return record, shards


def _record(chains: Chains, outcome: Drill) -> bool:
    """Record an outcome; returns False where the storage refuses writes."""
    try:
        chains.note_drill(outcome)
    except AccessDeniedError:
        return False
    return True


def _instant(
    shards: Sequence[Shard], request: DrillRequest, store: Store | None
) -> tuple[Shard, int]:
    """The instant to be restored, and the newest chain that covers it.

    Raises `HistoryGoneError` where no chain covers the time, or the store to compare with has lost
    it, and `NotYetWrittenError`.
    """
    least = 0 if store is None else int(store.since)
    asked = request.at
    at = _random_instant(shards, least) if asked is None else instant_of(shards, asked)
    if at >= shards[-1].upper:
        raise NotYetWrittenError(as_of=Timestamp(at), upper=Timestamp(shards[-1].upper))
    covering = [shard for shard in shards if covers(shard, at)]
    if not covering and at >= least:
        raise gone(shards, at)
    if at < least:
        since = max(shards[-1].since, least)
        raise HistoryGoneError(as_of=Timestamp(at), since=Timestamp(since))
    return covering[-1], at


def _random_instant(shards: Sequence[Shard], least: int) -> int:
    """An instant at or above `least` that a random chain covers: a kept one, or one where rows lie.
    Of a store that is mostly idle, most other instants would prove the same."""
    chains = [found for shard in shards if (found := _provable(shard, least))]
    if not chains:
        return shards[-1].upper - 1
    ranges = _PICK.choice(_PICK.choice(chains))
    low, high, _ = _PICK.choices(ranges, [weight for *_, weight in ranges])[0]
    return _PICK.randrange(low, high)


def _provable(shard: Shard, least: int) -> list[list[_Range]]:
    """The kept instants of a chain, and the times of its rows: both as ranges with weights. The
    newest instant where there are neither."""
    low = max(shard.since, least)
    kept: list[_Range]
    kept = [(at, at + 1, 1) for at in shard.kept if at >= least and covers(shard, at)]
    rows = [
        (max(part.time_min, low), part.time_max + 1, part.rows)
        for batch in shard.state.batches
        for part in batch.parts
        if part.time_max >= low
    ]
    found = [ranges for ranges in (kept, rows) if ranges]
    return found or [[(at, at + 1, 1)] for at in (shard.upper - 1,) if at >= low]


def _proved(
    where: str,
    at: int,
    request: DrillRequest,
    restore: Callable[[Path, int], object],
    store: Store | None,
) -> tuple[int, tuple[int, str], int]:
    """Restore, open, verify and compare; returns the versions, how many rows were compared and
    their digest, and the bytes."""
    with storage_errors(f"the scratch space {request.scratch or tempfile.gettempdir()}"):
        if request.scratch is not None:
            request.scratch.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="kvstore-drill-", dir=request.scratch))
    try:
        place = scratch / "restored"
        restore(place, at)
        with open_store(place, create=False) as restored:
            if restored.upper - 1 < at:
                problem = f"the store that was restored ends at {restored.upper}, before {at}"
                raise CorruptionError(where, problem, _REMEDY)
            found = restored.verify()
            if not found.ok:
                problem = f"restored as of {Timestamp(at)}, {found.problems[0]}"
                raise CorruptionError(where, problem, _REMEDY)
            compared = (0, "") if store is None else _compared(where, restored, store, at)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        return found.versions, compared, size
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


_REMEDY: Final = (
    "restore another instant to see which is whole, and begin anew with "
    "`kvstore backup run --full` (full=True)"
)


def _compared(where: str, restored: Store, store: Store, at: int) -> tuple[int, str]:
    """Compare the state at the oldest time that both keep, and all changes after it. Returns how
    many rows there are, and their digest."""
    low = max(int(restored.since), int(store.since))
    with store.snapshot(low), restored.snapshot(low):
        found, wanted = (
            (
                fingerprint(row_batches(each.replication.versions(since=low, upto=at))),
                fingerprint(
                    row_batches(each.replication.versions(since=0, upto=low, revisions="latest")),
                    at=low,
                ),
            )
            for each in (restored, store)
        )
    changes, state = (Compared(*pair) for pair in zip(found, wanted, strict=True))
    rows = require_equal(where, changes, state, since=low, upto=at)
    return rows, f"{together([changes.ours, state.ours])[0]:x}"
