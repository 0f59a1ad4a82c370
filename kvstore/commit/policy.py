"""Policies: which writes a store takes, and whether its time follows the clock.

    policy       own commits   records   upper follows
    open         taken         taken     the clock
    read only    refused       refused   nothing: it stands still
    live         refused       refused   the process that writes the store
    following    refused       taken     the source, window by window

A record lies beside the timeline: a hold, a frontier, the state of an import. A store that follows
another store, its source, takes the commits of the source at their times (`kvstore.replica`). It
takes no commits of its own until a promotion replaces its policy by `OPEN`.

Invariants
1. A policy is a value. The committer replaces it under the commit lock and never changes it.
2. A refused write reaches no engine, so a refusal never poisons the reads.
3. A store that refuses records refuses commits as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.errors import UsageError


class Refusal(NamedTuple):
    """Why a write is refused, and what the caller can do."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The calls that a store refuses, and the source of its time.

    `source` is the id of the store that this one follows. Entries above `upper` may be stored
    already up to the time `coming`; 0 says that there are none. If `is_live`, another process
    writes the store, and its GC does not know the pins of this one.
    """

    commits: Refusal | None = None
    records: Refusal | None = None
    follows_clock: bool = True
    source: str | None = None
    coming: int = 0
    is_live: bool = False

    def require_commits(self) -> None:
        """Raise `UsageError` unless the store takes commits of its own."""
        if self.commits is not None:
            raise UsageError(*self.commits)

    def require_records(self) -> None:
        """Raise `UsageError` unless the store takes records."""
        if self.records is not None:
            raise UsageError(*self.records)


OPEN: Final = Policy()
"""Every write is taken."""


def read_only_policy(where: str, *, coming: int = 0, is_live: bool = False) -> Policy:
    """The policy of a store that is only read: a checkpoint, or a store that others have open."""
    refusal = Refusal(f"{where} was opened to be read only", "open it with kvstore.open to write")
    return Policy(
        commits=refusal, records=refusal, follows_clock=False, coming=coming, is_live=is_live
    )


def replica_policy(where: str, source: str, *, coming: int = 0) -> Policy:
    """The policy of a replica of the store `source`, until it is promoted."""
    refusal = Refusal(
        f"{where} is a replica of store {source}", "write to its source, or promote it"
    )
    return Policy(commits=refusal, follows_clock=False, source=source, coming=coming)
