"""`python -m benchmarks.peers.commits`: versioned peers commit row by row until the time is up.

A store of a million commits has its own workloads (`benchmarks.committed`). The peers take
milliseconds a commit, and some take more as commits add up. So each makes as many as it can in ten
minutes, and a line tells the cost of the latest commits whenever their number has doubled.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Final

from benchmarks.data import Data
from benchmarks.peers.peer import Peer
from benchmarks.workloads.plan import PEERS

VERSIONED: Final = ("pylance", "deltalake", "arcticdb", "pyiceberg")
SECONDS: Final = 600
_ROWS: Final = 1_000
_LATEST: Final = 20


def main() -> None:
    """Parse, and run one peer after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for each peer")
    parser.add_argument("--peers", default=",".join(VERSIONED), help="which peers, with commas")
    options = parser.parse_args()
    for name in options.peers.split(","):
        run(name, options.seconds)


def run(name: str, seconds: float) -> None:
    """Commit rows of one peer for `seconds`, and print the cost as the commits add up."""
    module, _, kind = PEERS[name].partition(":")
    try:
        made = getattr(import_module(module), kind)
    except ImportError as error:
        print(f"{name}: not installed ({error})")
        return
    data = Data(_ROWS)
    with tempfile.TemporaryDirectory() as directory:
        peer: Peer = made(Path(directory), data)
        peer.fill()()
        latest: deque[float] = deque(maxlen=_LATEST)
        commits, told, end = 0, _LATEST, time.monotonic() + seconds
        while time.monotonic() < end:
            at = commits % _ROWS
            began = time.perf_counter()
            peer.write_next([data.keys[at]], [data.values[at]])
            latest.append(time.perf_counter() - began)
            commits += 1
            if commits == told:
                _tell(peer, commits, latest)
                told *= 2
        _tell(peer, commits, latest)
        peer.close()


def _tell(peer: Peer, commits: int, latest: deque[float]) -> None:
    began = time.perf_counter()
    peer.now()
    opened = time.perf_counter() - began
    print(
        f"{peer.name}: {commits} commits, "
        f"{statistics.median(latest) * 1e3:.1f} ms a commit, {opened * 1e3:.1f} ms to open",
        flush=True,
    )


if __name__ == "__main__":
    main()
