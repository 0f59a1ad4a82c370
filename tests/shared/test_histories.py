"""Histories of several processes that share a store, whose owner is killed, stopped and closed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.remote.presence import read_owner
from tests.harness.seeds import seeded
from tests.shared.linearizability import UNKNOWN, Call, counter, is_linearizable, register
from tests.shared.members import ACCOUNTS, COUNTER, EACH, REGISTERS, member

pytestmark = pytest.mark.on_disk

SEED = "KVSTORE_SHARED_SEED"
STOPPED_S = 0.02
PRELOADED = [
    *("tests.shared.members", "kvstore.remote.server.running", "kvstore.remote.client.guest"),
    *("kvstore.remote.shared", "kvstore.tables", "kvstore.remote.control"),
]


class Group:
    """Members that share a store, one of which is killed, stopped or replaced at a time."""

    def __init__(self, place: Path, members: int, seed: int) -> None:
        self.path, self.place = place / "store", place
        self.draw = random.Random(seed)
        self._spawn = multiprocessing.get_context("forkserver")
        self._spawn.set_forkserver_preload(PRELOADED)
        self._count = 0
        self.members: dict[int, tuple[Any, Any]] = {}
        with kvstore.open(self.path) as store, store.batch() as batch:
            for account in ACCOUNTS:
                batch.put(account, b"%d" % EACH)
        for _ in range(members):
            self.begin()

    def begin(self) -> None:
        """Begin a member, and wait until it has joined."""
        self._count += 1
        ours, theirs = self._spawn.Pipe()
        name, seed = f"m{self._count}", self.draw.getrandbits(32)
        arguments = (self.path, self.place / f"{name}.log", name, seed, theirs)
        process = self._spawn.Process(target=member, args=arguments)
        process.start()
        theirs.close()
        pid = ours.recv()
        self.members[pid] = process, ours

    def disturb(self) -> bool:
        """Kill the owner, or stop it for a moment; returns whether it was killed."""
        owner = read_owner(self.path)
        if owner is None or owner.pid not in self.members:
            return False
        process, pipe = self.members[owner.pid]
        if self.draw.random() < 0.3:
            os.kill(owner.pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            if self.draw.random() < 0.5:
                os.kill(owner.pid, signal.SIGCONT)
                return False
        process.kill()
        process.join()
        pipe.close()
        del self.members[owner.pid]
        self.begin()
        return True

    def require_alive(self) -> None:
        """Raise if a member has failed."""
        assert all(process.is_alive() for process, _ in self.members.values())

    def end(self) -> None:
        """Have all members leave."""
        for process, pipe in self.members.values():
            pipe.send("end")
            process.join()
            assert process.exitcode == 0


def takeovers_of(path: Path) -> int:
    """How often a process has taken the store over."""
    owner = read_owner(path)
    return 0 if owner is None else owner.takeovers


def calls_of(place: Path) -> dict[str, list[Call]]:
    """The recorded calls, by what they concern."""
    found: dict[str, list[Call]] = defaultdict(list)
    for path in sorted(place.glob("*.log")):
        begun: dict[int, dict[str, Any]] = {}
        for line in path.read_text().splitlines():
            told = json.loads(line)
            if "begin" in told:
                begun[told["begin"]] = told
            elif "end" in told:
                first = begun.pop(told["end"])
                found[first["on"]].append(_call(first, told["at"], told["answer"]))
        for first in begun.values():
            if first["name"] != "get":
                found[first["on"]].append(_call(first, None, UNKNOWN))
    return found


def _call(first: dict[str, Any], end: int | None, answer: Any) -> Call:
    argument = first["argument"]
    argument = tuple(argument) if isinstance(argument, list) else argument
    return Call(first["at"], end, first["name"], argument, answer)


# A history of an object is bounded, and so is the time of a test: `make soak` has 20 parts.
@pytest.mark.parametrize(
    ("takeovers", "part"),
    [(24, 0), *(pytest.param(50, part, marks=pytest.mark.soak) for part in range(1, 21))],
)
def test_histories_with_killed_and_stopped_owners_are_linearizable(
    tmp_path: Path, takeovers: int, part: int
) -> None:
    _run(tmp_path, takeovers, seeded(SEED).getrandbits(32) + part)


def _run(place: Path, takeovers: int, seed: int) -> None:
    group, kills = Group(place, 4, seed), 0
    try:
        while takeovers_of(group.path) < takeovers or kills < takeovers // 5:
            time.sleep(group.draw.uniform(0, 0.1))  # at a random moment of the steps
            group.require_alive()
            kills += group.disturb()
        group.end()
    finally:
        for process, _ in group.members.values():
            process.kill()
    calls = calls_of(place)
    with kvstore.open(group.path) as store:
        assert sum(int(value) for _, value in store.scan(prefix=b"account/")) == EACH * len(
            ACCOUNTS
        )
        now = time.monotonic_ns()
        for on, step in [*((each, register) for each in REGISTERS), (COUNTER, counter)]:
            last = store.get(on)
            told = None if last is None else last.decode()
            answer = int(last or 0) if step is counter else told
            history = [*calls[on.decode()], Call(now, now + 1, "get", None, answer)]
            assert len(history) > 10
            assert is_linearizable(history, step), on
        for path in place.glob("*.log"):
            for line in path.read_text().splitlines():
                if mark := json.loads(line).get("moved"):
                    assert [each.value for each in store.history(mark.encode())] == [b""]
