"""Power cuts that take unsynced names as well as unsynced bytes, at any call of a recorded run."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import KVStoreError
from tests.crash import disk, recorded
from tests.harness.seeds import seed_of
from tests.harness.writer import State, check

STEPS = 60
CUTS = 25

pytestmark = pytest.mark.skipif(disk.compiler() is None, reason="no C compiler to record calls by")


class Run:
    """A recorded process, and power cuts between its calls."""

    def __init__(self, place: Path, engine: str, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)
        root, trace, result = place / "root", place / "trace", place / "result"
        root.mkdir(parents=True)
        command = [sys.executable, "-m", "tests.crash.recorded"]
        subprocess.run(
            [*command, str(root), engine, str(seed), str(STEPS), str(result)],
            env={
                **os.environ,
                "LD_PRELOAD": str(disk.build(place)),
                "KVSTORE_RECORD_ROOT": str(root),
                "KVSTORE_RECORD_TRACE": str(trace),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            check=True,
        )
        self.states: list[tuple[int, State]]
        self.copies: list[tuple[str, int]]
        self.states, self.copies = pickle.loads(result.read_bytes())
        self.records = list(disk.records(trace))
        taken = disk.RecordedDisk(in_order=True)
        for record in self.records:
            taken.take(record)
        real = {
            str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("*")
            # RocksDB's information log is not recorded
            if path.is_file() and not path.name.startswith("LOG")
        }
        made = taken.files()
        assert {path for path in made if "LOG" not in path} == set(real)
        assert all(made[path] == content for path, content in real.items())

    def cut(self, target: Path, count: int) -> None:
        """Cut the power at `count` calls, and check the files each time."""
        moments = set(self.rng.sample(range(len(self.records)), count))
        taken = disk.RecordedDisk(in_order=self.engine == "rocksdb")
        states = copies = 0
        for number, record in enumerate(self.records):
            if record.path == recorded.ACKNOWLEDGED:
                if record.op == "w":
                    states, copies = map(int, record.data.split())
            else:
                taken.take(record)
            if number in moments:
                taken.cut(target, self.rng)
                where = f"call {number}, {states} states and {copies} copies acknowledged"
                try:
                    self.look(target, states, copies)
                except (AssertionError, KVStoreError) as error:
                    raise AssertionError(where) from error
                shutil.rmtree(target)

    def look(self, left: Path, states: int, copies: int) -> None:
        if states or kvstore.opening.engine_at(left / "store"):
            seen = []
            with kvstore.open(left / "store", self.engine) as store:
                if states:
                    seen.append((store.upper - 1, dict(store.scan())))
                    assert store.upper >= self.states[states - 1][0]
                check(seen, self.states)
                assert store.verify().ok
                store.put(b"later", b"v", durability="sync")
        for name, upto in self.copies[:copies]:
            with kvstore.open_read_only(left / name) as copy:
                assert copy.upper == upto + 1
                check([(upto, dict(copy.scan()))], self.states)


@pytest.mark.parametrize(
    ("rounds", "cuts"),
    [(1, CUTS), pytest.param(10, 200, marks=pytest.mark.soak)],
    ids=["few", "many"],
)
@pytest.mark.parametrize("engine", ["rocksdb", "memory"])
def test_what_was_acknowledged_stands_whatever_unsynced_names_are_lost(
    tmp_path: Path, engine: str, rounds: int, cuts: int
) -> None:
    for number in range(rounds):
        run = Run(tmp_path / str(number), engine, seed_of())
        run.cut(tmp_path / "left", cuts)
        shutil.rmtree(tmp_path / str(number))
