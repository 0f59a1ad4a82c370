"""Commits: one lock, one timeline, three durabilities, and a policy that says who may commit.

Floors, from the top:

    together            commits that go together
    committer           the order of a commit; it composes the parts below
    stage               what a commit adds to its engine batch
    expiries            deletes that wait for their time
    writes              write sets into batches, and to readers
    durability          waiting for the disk; sound, suspended, poisoned, finished
    frontiers policy    what readers see; what a store takes
    durable_mark        how far other processes find the store durable
"""

from __future__ import annotations

from kvstore.commit.committer import Committer
from kvstore.commit.durability import Durability, require_durability
from kvstore.commit.durable_mark import DurableMark, read_durable_mark
from kvstore.commit.expiries import Expires, Expiries, received_expiry, sent_expiry
from kvstore.commit.frontiers import require_readable
from kvstore.commit.policy import OPEN, Policy, read_only_policy, replica_policy
from kvstore.commit.stage import CommitNote, Stage, Staged
from kvstore.commit.together import After, commit_together

__all__ = [
    "After",
    "OPEN",
    "Committer",
    "Durability",
    "CommitNote",
    "DurableMark",
    "Expires",
    "Expiries",
    "Policy",
    "Stage",
    "Staged",
    "commit_together",
    "read_durable_mark",
    "read_only_policy",
    "received_expiry",
    "replica_policy",
    "require_durability",
    "require_readable",
    "sent_expiry",
]
