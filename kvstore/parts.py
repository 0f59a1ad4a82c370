"""The parts of an open store that garbage collection, clears, transactions and checks work on."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.changes.index import ChangeIndex
from kvstore.clears import Clears
from kvstore.commit import Committer
from kvstore.holds import Holds
from kvstore.imports import Imports
from kvstore.mvcc import Versions


@dataclass(frozen=True, slots=True)
class Parts:
    """One of each; `kvstore.store.opened` puts them together."""

    versions: Versions
    index: ChangeIndex
    committer: Committer
    holds: Holds
    imports: Imports
    clears: Clears
