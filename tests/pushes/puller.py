"""A process that pulls, to be killed: `python -m tests.pushes.puller STORE URL`.

It prints a line when it is ready, and then pulls until it is killed.
"""

from __future__ import annotations

import sys
import time

import kvstore
from bulk.pushes import Pushes
from bulk.pushes.pull import Puller
from kvstore.testing.bounds import bounds


def main(path: str, url: str) -> None:
    with bounds(OBJECT_PIECE_BYTES=256, OBJECT_PIECES_AT_ONCE=2), kvstore.open(path) as store:
        puller = Puller(store, Pushes(url), name="killed")
        print("ready", flush=True)
        while True:
            if not puller.step():
                time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
