"""kvstore as a subject after many commits, of one row each: a million of them must weigh nothing.

Each block of `BLOCK` commits writes the keys of its own, `VERSIONS` times each. So the history of a
key stays as long, whatever the number of commits, and every operation does the same work at each.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import kvstore
from benchmarks.data import Data
from benchmarks.subject import Stopwatch, Subject, Timed, Work
from kvstore import backup

BLOCK: Final = 1000
VERSIONS: Final = 10
_KEYS: Final = BLOCK // VERSIONS
_VALUE: Final = b"v" * 100


class Committed(Subject):
    """A store with a number of commits, and a collection of its backups."""

    name = "kvstore, many commits"
    durability = "none"

    _TIMES = 20

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        self._store: kvstore.Store | None = None
        self._times: list[kvstore.Timestamp] = []
        """The time after each block."""
        self._given_up = 0
        self._pick = random.Random(20_264)

    @property
    def store(self) -> kvstore.Store:
        """The open store."""
        if self._store is None:
            # No cache of newest values: it has room for all keys of a store of few commits.
            options = kvstore.Options(value_cache_bytes=0)
            self._store = kvstore.open(self.directory / "db", durability="async", options=options)
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def reopen(self, commits: int) -> Work:
        """Open and close the store."""
        self._commit_upto(commits)

        def work() -> int:
            for _ in range(self._TIMES):
                self.close()
                assert self.store.upper
            return self._TIMES

        return work

    def commit(self, commits: int) -> Work:
        """Commit a block, unsynced."""
        self._commit_upto(commits)

        def work() -> int:
            self._commit_block()
            return BLOCK

        return work

    def get_as_of(self, commits: int) -> Work:
        """Read the keys of a random block at its end, again and again: cold memory is not the
        subject."""
        self._commit_upto(commits)
        block = self._kept_block()
        keys, time = [_key(block, number) for number in range(_KEYS)], self._times[block]

        def work() -> int:
            for _ in range(self._TIMES):
                for key in keys:
                    assert self.store.get(key, as_of=time) is not None
            return self._TIMES * _KEYS

        return work

    def history(self, commits: int) -> Work:
        """List the versions of the keys of a random block."""
        self._commit_upto(commits)
        block = self._kept_block()
        keys = [_key(block, number) for number in range(_KEYS)]

        def work() -> int:
            for _ in range(self._TIMES):
                for key in keys:
                    assert len(self.store.history(key)) == VERSIONS
            return self._TIMES * _KEYS

        return work

    def gc(self, commits: int) -> Work:
        """Give up the history of the oldest blocks, one after the other."""
        self._commit_upto(commits + BLOCK)

        def work() -> Timed:
            watch = Stopwatch()
            for _ in range(self._TIMES):
                self._commit_block()
                before = self._times[self._given_up]
                self._given_up += 1
                with watch:
                    report = self.store.gc(before=before)
                assert not report.held_back
                assert report.versions >= BLOCK - 2 * _KEYS
            return watch.median(1)

        return work

    def backup(self, commits: int) -> Work:
        """Write increments of a block each, by a handle that stays open."""
        self._commit_upto(commits)
        collection = backup.Collection(str(self.directory / "backup"))
        collection.backup(self.store)

        def work() -> Timed:
            watch = Stopwatch()
            for _ in range(self._TIMES):
                self._commit_block()
                with watch:
                    assert collection.backup(self.store).rows == BLOCK
            return watch.median(1)

        return work

    def _kept_block(self) -> int:
        """A random block whose history is kept."""
        return self._pick.randrange(self._given_up, len(self._times))

    def _commit_upto(self, commits: int) -> None:
        if len(self._times) * BLOCK >= commits:
            return
        while len(self._times) * BLOCK < commits:
            self._commit_block()
        for family in ("data", "changes"):
            self.store._engine.compact(family)

    def _commit_block(self) -> None:
        block = len(self._times)
        for at in range(BLOCK):
            time = self.store.put(_key(block, at % _KEYS), _VALUE)
        self._times.append(time)


class CommittedFew(Committed):
    """The same store with fewer commits, in a process of its own."""

    name = "kvstore, few commits"


def _key(block: int, number: int) -> bytes:
    return b"%06d%04d" % (block, number)
