"""Actors that take turns: threads of which one runs at a time, switched at every storage call.

A seeded generator draws the next actor, so a schedule repeats exactly. An actor may be crashed at a
call: its work stops there, as in a killed process.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class Crash(BaseException):
    """The actor's process was killed. Only the actor's restart catches this exception."""


class Turns:
    """Runs actors in a seeded order."""

    def __init__(self, seed: int, *, crash_rate: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._crash_rate = crash_rate
        self._gates: dict[int, threading.Semaphore] = {}
        self._local = threading.local()
        self._errors: list[BaseException] = []
        self.crashes = 0

    def run(self, actors: list[Callable[[], None]]) -> None:
        """Run all actors to their end; raises the first error of any."""
        threads = []
        for number, actor in enumerate(actors):
            self._gates[number] = threading.Semaphore(0)
            threads.append(threading.Thread(target=self._live, args=(number, actor), daemon=True))
        for thread in threads:
            thread.start()
        self._gates[0].release()
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive(), "the schedule is stuck"
        if self._errors:
            raise self._errors[0]

    def switch(self) -> None:
        """Called by an actor at each storage call: another actor may go first, or this one dies."""
        number = getattr(self._local, "number", None)
        if number is None:
            return  # not an actor: the test itself
        if self._random.random() < self._crash_rate:
            self.crashes += 1
            raise Crash
        following = self._random.choice(sorted(self._gates))
        if following != number:
            self._gates[following].release()
            self._gates[number].acquire()

    def _live(self, number: int, actor: Callable[[], None]) -> None:
        self._local.number = number
        self._gates[number].acquire()
        try:
            if not self._errors:
                actor()
        except BaseException as error:  # noqa: BLE001  (reported by run)
            self._errors.append(error)
        finally:
            del self._gates[number]
            if self._gates:
                self._gates[self._random.choice(sorted(self._gates))].release()
