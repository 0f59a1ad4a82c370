"""A child process that appends until it is killed with SIGKILL, on real files."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.journal import Journal, compact
from tests.journal.folds import Payloads

CHILD = """
import sys
from kvstore.journal import Journal, Sync
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
        journal.append(b"%d:" % number + bytes(number % 300))
        number += 1
        print(number, flush=True)
"""


def run_until_killed(path: Path, policy: str, lines: int) -> int:
    """Kill the child when it has told of `lines` appends; returns how many it told of at last."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), policy], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        told = [int(child.stdout.readline()) for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        told += map(int, child.stdout.read().splitlines())
        child.wait()
    return told[-1]


@pytest.mark.parametrize("policy", ["always", "every", "never"])
def test_what_a_killed_writer_told_of_is_there(tmp_path: Path, policy: str) -> None:
    for lines in (1, 13, 40):
        told = run_until_killed(tmp_path, policy, lines)
        fold = Payloads()
        Journal.open(tmp_path, apply=fold.apply, restore=fold.restore, content="test").close()
        assert len(fold.items) in (told, told + 1)
        assert fold.items == [b"%d:" % n + bytes(n % 300) for n in range(len(fold.items))]
        compact(tmp_path, Payloads())
