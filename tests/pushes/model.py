"""A model of one store that takes pushes: the events of its timeline, and what each key shows.

The value of a key is the value of its last event that was not taken back. Nothing else is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Effect = dict[bytes, bytes | None]


class Made(NamedTuple):
    """A push, as its job made it. `prefix=None` adds. Live writes after `built_at` stay, unless it
    is None. A push of changes has rows that delete, and may have others than of its prefix."""

    rows: Mapping[bytes, bytes | None]
    prefix: bytes | None
    built_at: int | None


class Event(NamedTuple):
    """A live write, or the push `number`: the keys that it writes, None where it deletes."""

    at: int
    effect: Effect
    number: int | None = None


class ModelStore:
    """One store of the model."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.taken_back: set[int] = set()

    def copy(self) -> ModelStore:
        """The same timeline, to go another way."""
        made = ModelStore()
        made.events, made.taken_back = [*self.events], {*self.taken_back}
        return made

    def write(self, at: int, effect: Effect) -> None:
        """A live commit."""
        self.events.append(Event(at, effect))

    def last(self, key: bytes) -> Event | None:
        """The event that `key` shows."""
        for event in reversed(self.events):
            if key in event.effect and event.number not in self.taken_back:
                return event
        return None

    def last_change(self, key: bytes) -> Event | None:
        """As `last`, but a delete by a push counts only where it took a value away."""
        last: Event | None = None
        for event in reversed(self.events):
            if key not in event.effect or event.number in self.taken_back:
                continue
            if last is not None and event.effect[key] is not None:
                return last
            last = event
            if event.number is None or event.effect[key] is not None:
                return last
        return last

    def state(self) -> dict[bytes, bytes]:
        """The live keys."""
        shown = {key: self.last(key) for event in self.events for key in event.effect}
        values = {key: event.effect[key] for key, event in shown.items() if event is not None}
        return {key: value for key, value in sorted(values.items()) if value is not None}

    def take(self, at: int, number: int, made: Made) -> None:
        """Add a push. `made.rows` are the rows of this shard."""

        def is_newer(key: bytes) -> bool:
            found = self.last_change(key)
            if made.built_at is None or found is None or found.number is not None:
                return False
            return found.at > made.built_at

        effect: Effect = {key: value for key, value in made.rows.items() if not is_newer(key)}
        if made.prefix is not None:
            for key in self.state():
                if key.startswith(made.prefix) and key not in made.rows and not is_newer(key):
                    effect[key] = None
        self.events.append(Event(at, effect, number))

    def take_back(self, number: int) -> None:
        """Revert a push, if this store has it."""
        if any(event.number == number for event in self.events):
            self.taken_back.add(number)
