"""A process is killed by SIGKILL in the middle of an import or a backup, and the next process
completes the task."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvstore
import kvstore.backup.tasks
import kvstore.bulk.tasks
from kvstore.backup import Collection
from kvstore.backup.tasks import submit_backup
from kvstore.base.clock import ManualClock
from kvstore.bulk.tasks import submit_import
from kvstore.store import Store
from kvstore.tasks import Outcome, Retry, Worker, dead_letters, progress_of

CHILD = """
import sys
import kvstore, kvstore.backup.tasks, kvstore.bulk.tasks
from kvstore.base.clock import ManualClock
from kvstore.tasks import Retry, Worker

path, now, last = sys.argv[1:]

def tell(line):
    print(line, flush=True)
    if line == last:
        sys.stdin.read()  # until it is killed

def telling(handler):
    def handle(job):
        save = job.save
        def save_and_tell(progress):
            save(progress)
            tell(progress.decode())
        job.save = save_and_tell
        inserts = handler(job)
        tell("handled")
        return inserts
    return handle

with kvstore.open(path, clock=ManualClock(int(now))) as store:
    handlers = {
        **kvstore.bulk.tasks.handlers(store),
        **kvstore.backup.tasks.handlers(store, every_s=0),
    }
    told = {queue: telling(handler) for queue, handler in handlers.items()}
    Worker(store.tasks, told, hold=30, retry=Retry(attempts_max=10)).run_one()
"""
SECOND = 1_000_000_000
ROWS = 300
PATIENT = Retry(attempts_max=10)


class Killed:
    """A store with a worker that is killed again and again. The clock moves by a minute each
    time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 1000 * SECOND

    @contextmanager
    def opened(self) -> Iterator[Store]:
        self.now += 60 * SECOND
        with kvstore.open(self.path, clock=ManualClock(self.now)) as store:
            yield store

    def work_until(self, last: str) -> list[str]:
        """Let a process work until it reports `last`, and kill it there; returns all its
        reports."""
        self.now += 60 * SECOND
        command = [sys.executable, "-c", CHILD, str(self.path), str(self.now), last]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            told: list[str] = []
            while not told or told[-1] != last:
                line = child.stdout.readline()
                assert line, f"it ended after {told}"
                told.append(line.rstrip("\n"))
            child.send_signal(signal.SIGKILL)
            child.wait()
        return told


def stage(path: Path) -> Path:
    made = kvstore.bulk.Import.create(path)
    for part in range(3):
        with made.writer() as writer:
            for row in range(part * 100, part * 100 + 100):
                writer.put(b"%06d" % row, b"v")
    made.seal()
    return path


def test_an_import_killed_at_each_step_is_added_once(tmp_path: Path) -> None:
    killed = Killed(tmp_path / "store")
    with killed.opened() as store:
        task_id = submit_import(store, stage(tmp_path / "staging"), move=True)
    for attempt, step in enumerate(("prepare", "bring 2 of 3", "link", "add"), 1):
        killed.work_until(f'{{"step": "{step}"}}')
        with killed.opened() as store:
            task = store.tasks.get(task_id)
            assert task is not None
            assert (task.attempt, progress_of(task)) == (attempt, {"step": step})
            assert list(store.scan()) == []
    killed.work_until("handled")  # added, and the task not yet deleted
    with killed.opened() as store:
        (record,) = store.imports.all()
        assert len(list(store.scan())) == ROWS
        worker = Worker(store.tasks, kvstore.bulk.tasks.handlers(store), retry=PATIENT)
        assert worker.run_one() is Outcome.DONE
        assert store.imports.all() == [record]
        assert store.tasks.sizes() == {}
        store.verify().require_ok()


def test_a_backup_killed_at_each_step_is_appended_once(tmp_path: Path) -> None:
    killed, url = Killed(tmp_path / "store"), tmp_path / "backups"
    with killed.opened() as store:
        with store.batch() as batch:
            for row in range(ROWS):
                batch.put(b"%06d" % row, b"v")
        task_id = submit_backup(store, url)
    for attempt, rows in enumerate((0, ROWS), 1):
        killed.work_until(f'{{"rows": {rows}}}')
        with killed.opened() as store:
            task = store.tasks.get(task_id)
            assert task is not None
            assert (task.attempt, progress_of(task)) == (attempt, {"rows": rows})
            assert Collection(url).show().rows == 0
    killed.work_until("handled")  # appended, and the task not yet deleted
    with killed.opened() as store:
        before = Collection(url).show()
        assert before.rows == ROWS
        store.put(b"later", b"v")
        worker = Worker(store.tasks, kvstore.backup.tasks.handlers(store))
        assert worker.run_one() is Outcome.DONE
        after = Collection(url).show()
        assert (after.batches, after.rows, after.upper) == (1, ROWS, before.upper)
        assert store.tasks.sizes() == {}


def test_an_import_that_kills_its_process_each_time_is_set_aside(tmp_path: Path) -> None:
    killed = Killed(tmp_path / "store")
    with killed.opened() as store:
        submit_import(store, stage(tmp_path / "staging"))
    for _ in range(2):
        killed.work_until('{"step": "check"}')
    with killed.opened() as store:
        worker = Worker(
            store.tasks, kvstore.bulk.tasks.handlers(store), retry=Retry(attempts_max=2)
        )
        assert worker.run_one() is Outcome.DEAD
        (dead,) = dead_letters(store.tasks, "import")
        assert dead.error == "its worker died at every attempt"
        assert progress_of(dead) == {"step": "check"}
        assert list(store.scan()) == []
