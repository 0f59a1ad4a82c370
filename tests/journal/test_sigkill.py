"""A child process that appends until it is killed with SIGKILL, on real files."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import chain, repeat
from pathlib import Path

import pytest

from kvstore.storage.journal import Journal, compact
from tests.journal.folds import Payloads

pytestmark = pytest.mark.on_disk

CHILD = """
import sys
from kvstore.storage.journal import Journal, Sync
from tests.journal.folds import Payloads

fold = Payloads()
path, policy = sys.argv[1:]
sync = {"always": Sync.always(), "every": Sync.every(4), "never": Sync.never()}[policy]
with Journal.open(
    path, apply=fold.apply, restore=fold.restore, snapshot=fold.records, sync=sync,
    content="test", file_records=7, compact_bytes=2000,
) as journal:
    number = len(fold.items)
    while True:
        print("begin", flush=True)
        journal.append(b"%d:" % number + bytes(number % 300))
        number += 1
        print(number, flush=True)
"""

KILLS_MORE = 100
"""How many kills may miss. On a busy machine the child keeps appending while its parent waits."""


def run_until_killed(path: Path, policy: str, appends: int) -> tuple[int, bool]:
    """Kill the child when it has begun the append after `appends`. Returns the number of its last
    report, and whether the kill hit an append."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), policy], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        told = [child.stdout.readline() for _ in range(2 * appends + 1)]
        child.send_signal(signal.SIGKILL)
        told += child.stdout.read().splitlines(keepends=True)
        child.wait()
    return max(int(line) for line in told if line != "begin\n"), told[-1] == "begin\n"


@pytest.mark.parametrize("policy", ["always", "every", "never"])
def test_what_a_killed_writer_told_of_is_there(tmp_path: Path, policy: str) -> None:
    hits = 0
    for appends in chain((1, 13, 40), repeat(2, KILLS_MORE)):
        told, hit = run_until_killed(tmp_path, policy, appends)
        hits += hit
        fold = Payloads()
        Journal.open(tmp_path, apply=fold.apply, restore=fold.restore, content="test").close()
        assert len(fold.items) in (told, told + 1)
        assert fold.items == [b"%d:" % n + bytes(n % 300) for n in range(len(fold.items))]
        compact(tmp_path, Payloads())
        if hits >= 2:
            return
    raise AssertionError(f"{hits} kills hit an append")
