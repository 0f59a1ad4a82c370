"""A worker process killed with SIGKILL inside a task, again and again: every task is done once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.base.clock import ManualClock
from kvstore.tasks import NewTask, Tasks

pytestmark = pytest.mark.on_disk

CHILD = """
import sys
from kvstore.base.clock import ManualClock
from kvstore.tasks import NewTask, Tasks, Worker

lines = int(sys.argv[3])

def handler(job):
    global lines
    job.save(b"begun")
    print(job.value.decode(), flush=True)
    lines -= 1
    if not lines:
        sys.stdin.read()  # the kill comes here
    return [NewTask("done", job.value)]

with Tasks.open(sys.argv[1], clock=ManualClock(int(sys.argv[2]))) as tasks:
    worker = Worker(tasks, {"work": handler}, hold=10)
    while worker.run_one() is not None:
        pass
"""
COUNT = 60


def kill_inside(path: Path, now: int, lines: int) -> None:
    """Let a child work, and kill it inside the task of its report number `lines`."""
    command = [sys.executable, "-c", CHILD, str(path), str(now), str(lines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(lines):
            assert child.stdout.readline(), "the child ended by itself"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


def test_a_killed_worker_does_each_task_once(tmp_path: Path) -> None:
    now = 1_000_000_000
    with Tasks.open(tmp_path, clock=ManualClock(now)) as tasks:
        tasks.modify(inserts=[NewTask("work", b"%d" % number) for number in range(COUNT)])
    done = 0
    for lines in (1, 7, 15, COUNT - 20):
        now += 20_000_000_000
        kill_inside(tmp_path, now, lines)
        done += lines - 1
        with Tasks.open(tmp_path, clock=ManualClock(now)) as tasks:
            values = [task.value for queue in ("work", "done") for task in tasks.list(queue)]
            assert sorted(values, key=int) == [b"%d" % number for number in range(COUNT)]
            assert len(tasks.list("done")) == done
