"""Commits: one lock, one timeline, three durabilities, and a policy that says who may commit.

Floors, from the top:

    committer           the order of a commit; it composes the parts below
    writes              write sets into batches, and to readers
    durability          waiting for the disk; sound, poisoned, finished
    frontiers policy    what readers see; what a store takes
"""

from __future__ import annotations

from kvstore.commit.committer import CommitNote, Committer, Stage, Staged
from kvstore.commit.durability import Durability, require_durability
from kvstore.commit.frontiers import require_readable
from kvstore.commit.policy import OPEN, Policy, read_only_policy, replica_policy

__all__ = [
    "OPEN",
    "Committer",
    "Durability",
    "CommitNote",
    "Policy",
    "Stage",
    "Staged",
    "replica_policy",
    "read_only_policy",
    "require_durability",
    "require_readable",
]
