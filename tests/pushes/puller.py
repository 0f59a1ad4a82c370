"""A process that pulls until it is killed."""

from __future__ import annotations

from multiprocessing.connection import Connection

import kvstore
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from tests.harness.bounds import bounds


def pull_on(path: str, url: str, said: Connection) -> None:
    """Look at the pushes at `url` again and again. `said` gets "begun" before each look, and
    afterwards "taken" or "idle"."""
    with bounds(OBJECT_PIECE_BYTES=256, OBJECT_PIECES_AT_ONCE=2), kvstore.open(path) as store:
        puller = Puller(store, Pushes(url), name="killed")
        while True:
            said.send("begun")
            said.send("taken" if puller.step() else "idle")
