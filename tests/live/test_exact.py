"""Live readers beside a writer, both killed at random: every answer is the writer's at that time.

A writer changes a store by every kind of write, and reports the state behind each commit. Readers
follow it and report the states that they see at their `upper` and at older times. Both are killed
at random and started again. A reader is exact if each state that it saw is the writer's state of
that time.
"""

from __future__ import annotations

import random
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

import kvstore
from tests.harness.seeds import seed_of
from tests.harness.writer import check, key
from tests.live import children
from tests.live.children import Seen

pytestmark = pytest.mark.on_disk

SEED = "KVSTORE_LIVE_SEED"


class Cast:
    """A writer and its readers, which are killed and started again."""

    def __init__(self, spawn: Any, place: Path, seed: int, *, readers: int) -> None:
        self._spawn, self._place = spawn, place
        self.rng = random.Random(seed)
        self._readers = readers
        self._started = 0
        self._parts: dict[Connection, tuple[Any, Any]] = {}
        self.states: list[Seen] = []
        self.seen: list[Seen] = []
        self.kills = {children.write: 0, children.read: 0}

    def __enter__(self) -> Cast:
        with kvstore.open(self._place / "store") as store:
            store.put(key(0), b"first")
        for part in [children.write, *[children.read] * self._readers]:
            self._start(part)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in list(self._parts):
            self._kill(pipe)
        with kvstore.open(self._place / "store") as store:  # with the commit of the last kill
            self.states.append((int(store.upper), dict(store.scan())))

    def play(self, kills: int) -> None:
        """Kill `kills` processes, each after some reports, and start others in their place."""
        while sum(self.kills.values()) < kills:
            self._listen(self.rng.randint(1, 12))
            doomed = self.rng.choice(list(self._parts))
            _, part = self._parts[doomed]
            self._kill(doomed)
            self.kills[part] += 1
            self._start(part)
        self._listen(12)

    def _start(self, part: Any) -> None:
        ours, theirs = self._spawn.Pipe()
        self._started += 1
        seed = self.rng.getrandbits(32)
        process = self._spawn.Process(target=part, args=(self._place, self._started, seed, theirs))
        process.start()
        theirs.close()
        self._parts[ours] = process, part

    def _listen(self, words: int) -> None:
        """Receive `words` reports of the writer, and the reports of the readers meanwhile."""
        until = len(self.states) + words
        while len(self.states) < until:
            for pipe in wait(list(self._parts)):
                assert isinstance(pipe, Connection)
                self._hear(pipe)

    def _hear(self, pipe: Connection) -> None:
        process, part = self._parts[pipe]
        try:
            word = pipe.recv()
        except EOFError:
            process.join()
            raise AssertionError(f"{part.__name__} ended with {process.exitcode}") from None
        if part is children.write:
            self.states.append(word)
        else:
            self.seen += word

    def _kill(self, pipe: Connection) -> None:
        process, part = self._parts.pop(pipe)
        process.kill()
        process.join()
        with suppress(EOFError, OSError):
            while pipe.poll():
                word = pipe.recv()
                if part is children.write:
                    self.states.append(word)
                else:
                    self.seen += word
        pipe.close()


@pytest.mark.parametrize(
    ("stores", "kills", "readers"),
    [(1, 30, 2), pytest.param(25, 60, 3, marks=pytest.mark.soak)],
    ids=["few", "many"],
)
def test_readers_show_the_writers_states_whoever_is_killed(
    tmp_path: Path, spawn: Any, stores: int, kills: int, readers: int
) -> None:
    for number in range(stores):
        place = tmp_path / str(number)
        place.mkdir()
        with Cast(spawn, place, seed_of(SEED), readers=readers) as cast:
            cast.play(kills)
        assert min(cast.kills.values()) > 0
        assert len({at for at, _ in cast.seen}) > kills
        check(cast.seen, cast.states)
