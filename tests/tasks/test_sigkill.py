"""A worker process killed with SIGKILL, again and again: every task is done once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from kvstore.clock import ManualClock
from kvstore.tasks import NewTask, Tasks

CHILD = """
import sys
from kvstore.clock import ManualClock
from kvstore.tasks import NewTask, Tasks, Worker

def handler(job):
    job.save(b"begun")
    print(job.value.decode(), flush=True)
    return [NewTask("done", job.value)]

with Tasks.open(sys.argv[1], clock=ManualClock(int(sys.argv[2]))) as tasks:
    worker = Worker(tasks, {"work": handler}, hold=10)
    while worker.run_one() is not None:
        pass
print("end", flush=True)
"""
COUNT = 60


def run_until_killed(path: Path, now: int, lines: int) -> bool:
    """Let a child work until it has told of `lines` tasks; says whether it came to the end."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(now)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        told = [child.stdout.readline() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        told += child.stdout.read().splitlines(keepends=True)
        child.wait()
    return "end\n" in told


def test_a_killed_worker_does_each_task_once(tmp_path: Path) -> None:
    now = 1_000_000_000
    with Tasks.open(tmp_path, clock=ManualClock(now)) as tasks:
        tasks.modify(inserts=[NewTask("work", b"%d" % number) for number in range(COUNT)])
    for lines in (1, 7, 15, COUNT):
        now += 20_000_000_000
        ended = run_until_killed(tmp_path, now, lines)
        with Tasks.open(tmp_path, clock=ManualClock(now)) as tasks:
            values = [task.value for queue in ("work", "done") for task in tasks.list(queue)]
            assert sorted(values, key=int) == [b"%d" % number for number in range(COUNT)]
            assert len(tasks.list("done")) >= min(lines - 1, COUNT - 1)
            if ended:
                assert tasks.list("work") == []
    with Tasks.open(tmp_path, clock=ManualClock(now)) as tasks:
        assert len(tasks.list("done")) >= COUNT - 1
