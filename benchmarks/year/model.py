"""The data of the year as a plain dict: for each user's rows the newest value of each key.

An import can be reverted for some days. So a key keeps, above the last ordinary write, the values
of the imports since: reverting one takes its value away, and the newest of the rest shows.

Invariants
1. An ordinary write or a deletion leaves one value or none: reverting an older import does not
   change the key any more.
2. Values are oldest first. The first value may come from an ordinary write; its import is
   `WRITTEN`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

WRITTEN: Final = 0


class Layer(NamedTuple):
    """A value of a key, None if it is a deletion, and the import it came by."""

    import_id: int
    value: bytes | None


def user_of(key: bytes) -> bytes:
    """The beginning that all keys of a user share."""
    return key[: key.rindex(b"/") + 1]


class Model:
    """Newest values, with enough below them to revert imports."""

    def __init__(self) -> None:
        self._users: dict[bytes, dict[bytes, list[Layer]]] = defaultdict(dict)
        self._imports: dict[int, list[bytes]] = {}

    def put(self, key: bytes, value: bytes) -> None:
        self._users[user_of(key)][key] = [Layer(WRITTEN, value)]

    def delete_user(self, user: bytes) -> None:
        self._users.pop(user, None)

    def add(self, import_id: int, rows: Mapping[bytes, bytes | None]) -> None:
        """Add an import. A None is a deletion."""
        self._imports[import_id] = list(rows)
        for key, value in rows.items():
            self._users[user_of(key)].setdefault(key, []).append(Layer(import_id, value))

    def revert(self, import_id: int) -> None:
        for key in self._imports.pop(import_id):
            layers = self._users[user_of(key)].get(key)
            if layers is not None:
                layers[:] = [layer for layer in layers if layer.import_id != import_id]

    def keep(self, import_id: int) -> None:
        """The import is not reverted any more."""
        for key in self._imports.pop(import_id, ()):
            layers = self._users[user_of(key)].get(key, [])
            for place, layer in enumerate(layers):
                if layer.import_id == import_id:
                    layers[: place + 1] = [Layer(WRITTEN, layer.value)]
                    break

    def get(self, key: bytes) -> bytes | None:
        layers = self._users[user_of(key)].get(key)
        return layers[-1].value if layers else None

    def state(self) -> dict[bytes, bytes]:
        """All live keys with their values, in no order."""
        return {
            key: layers[-1].value
            for rows in self._users.values()
            for key, layers in rows.items()
            if layers and layers[-1].value is not None
        }
