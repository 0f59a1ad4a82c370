"""The drills of a collection: restores that were tried, as its record remembers them.

    drill := {"chain": shard name, "at", "drilled_at": ns, "depth", "problem": text, "" for a proof}

Invariants
1. Of each chain the newest `DRILLS_KEPT` drills are kept, and its newest proof.
2. A chain that has expired leaves no drill.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvstore.codec.json import JsonObject
from kvstore.limits import DRILLS_KEPT
from kvstore.timestamp import TIMESTAMP_MAX


class Drill(NamedTuple):
    """A restore of a chain as of `at` that was tried at `drilled_at`, and its problem, if any."""

    chain: str
    at: int
    drilled_at: int
    depth: str
    problem: str = ""


Drills = tuple[Drill, ...]


def drills_of(fields: JsonObject) -> Drills:
    """The drills in the record of a collection."""
    found = fields.items_of("drills", dict)
    return tuple(_drill(JsonObject(each, where=fields.where)) for each in found)


def _drill(fields: JsonObject) -> Drill:
    return Drill(
        fields.text("chain"),
        fields.integer("at"),
        fields.integer("drilled_at"),
        fields.text("depth"),
        fields.text("problem"),
    )


def newest_proof(
    drills: Sequence[Drill], chain: str, *, lower: int = 0, upper: int = TIMESTAMP_MAX
) -> Drill | None:
    """The newest drill that has proved an instant of `chain` in `[lower, upper)`."""
    proofs = (
        drill
        for drill in reversed(drills)
        if drill.chain == chain and not drill.problem and lower <= drill.at < upper
    )
    return next(proofs, None)


def with_drill(drills: Sequence[Drill], drill: Drill, chains: Collection[str]) -> Drills:
    """`drills` and one more, without the drills that need not be kept. `chains` are all chains."""
    others = [each for each in drills if each.chain in chains and each.chain != drill.chain]
    mine = [*(each for each in drills if each.chain == drill.chain), drill]
    kept = mine[-DRILLS_KEPT:]
    proof = newest_proof(mine, drill.chain)
    if proof is not None and proof not in kept:
        kept[0] = proof
    return (*others, *kept)
