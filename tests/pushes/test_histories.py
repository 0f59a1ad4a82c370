"""Random histories of pushes, reverts, live writes and restores, on two shards, against a model."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.backup import Collection
from kvstore.bulk.pushes import Pushes, shard_of
from kvstore.bulk.pushes.pull import Puller
from kvstore.store import Store
from tests.harness.bounds import bounds
from tests.harness.kills import run_until_killed
from tests.harness.seeds import seed_of
from tests.pushes.made import build_time, push
from tests.pushes.model import Effect, Made, ModelStore
from tests.pushes.puller import (
    CALLS,
    Reached,
    Stage,
    Taken,
    Wrote,
    expired,
    pull_on,
    pull_until,
)

pytestmark = pytest.mark.on_disk

KEYS = [b"%s/%d" % (prefix, number) for prefix in (b"a", b"b") for number in range(6)]
STAGES = [
    Stage(name, is_after, count)
    for name in CALLS
    for is_after in (False, True)
    for count in ((1, 2, 3) if name in ("write", "sync") else (1,))
]


class Host:
    """A store, its model, its last backup, and the states that its timeline must show."""

    keys: Sequence[bytes] = KEYS

    def __init__(self, root: Path, pushes: Pushes, shard: int, pick: random.Random) -> None:
        self.root, self.pushes, self.shard, self.pick = root, pushes, shard, pick
        self.at = root / "store-0"
        self.model = ModelStore()
        self.saved: tuple[ModelStore, dict[int, dict[bytes, bytes]], int] | None = None
        self.shown: dict[int, dict[bytes, bytes]] = {}
        self.passed = 0
        self.open()

    def open(self) -> None:
        self.store: Store = kvstore.open(self.at)
        self.puller = Puller(self.store, self.pushes, name=f"s{self.shard}", shard=self.shard)
        self.store.imports.link = self.linked(self.store.imports.link)  # type: ignore[method-assign]

    def linked(self, link: Callable[[Sequence[Path]], None]) -> Callable[[Sequence[Path]], None]:
        """`link` of a store whose service may write just before it. A push is then between its pass
        over the store and its commit."""

        def write_first(files: Sequence[Path]) -> None:
            if self.pick.random() < 0.5:
                self.write()
            link(files)

        return write_first

    def write(self) -> None:
        """A random write of the service."""
        kind = self.pick.choices(["rows", "range", "expiry"], [6, 2, 2])[0]
        if kind == "rows":
            keys = self.pick.sample(self.keys, self.pick.randint(1, 4))
            value = b"live %d" % self.pick.getrandbits(20)
            self.live({key: self.pick.choice([None, value]) for key in keys})
        elif kind == "range":
            self.delete_range(self.pick.choice([b"a", b"b"]))
        else:
            self.expire(self.pick.choice(self.keys))

    def state(self, as_of: kvstore.Timestamp | None = None) -> dict[bytes, bytes]:
        """The live keys at a time."""
        return dict(self.store.scan(as_of=as_of))

    def note(self) -> None:
        """Remember the present state, and compare it with the model."""
        state = self.state()
        assert state == self.model.state()
        self.shown[int(self.store.upper) - 1] = state

    def live(self, effect: Effect) -> None:
        with self.store.batch() as batch:
            for key, value in effect.items():
                batch.delete(key) if value is None else batch.put(key, value)
        self.model.write(int(self.store.upper) - 1, effect)

    def expire(self, key: bytes) -> None:
        """Put a key that expires at once."""
        for at, value in expired(self.store, key):
            self.model.write(at, {key: value})

    def delete_range(self, prefix: bytes) -> None:
        self.store.delete_range(prefix + b"/", prefix + b"0")
        gone = [key for key in KEYS if key.startswith(prefix)]
        self.model.write(int(self.store.upper) - 1, dict.fromkeys(gone))

    def backup(self) -> None:
        Collection(self.root / "backups").backup(self.store)
        self.saved = self.model.copy(), dict(self.shown), self.passed

    def restore(self) -> None:
        if self.saved is None:
            return
        self.store.close()
        self.at = self.root / f"restored-{self.pick.getrandbits(40)}"
        Collection(self.root / "backups").restore(self.at)
        shutil.rmtree(self.root / "backups")  # the restored store begins a chain of its own
        model, shown, self.passed = self.saved
        self.model, self.shown, self.saved = model.copy(), dict(shown), None
        self.open()

    def require_history(self) -> None:
        """Each time shows its state, and the changes between two of them lead from one to the
        other: as changes by key and by time, and as events."""
        times = sorted(self.shown)
        for at, state in self.shown.items():
            assert self.state(kvstore.Timestamp(at)) == state
        for since, upto in pairwise(times):
            for found in self.changed(self.shown[since], since, upto):
                assert found == self.shown[upto]
        assert self.store.verify().problems == ()

    def changed(
        self, before: dict[bytes, bytes], since: int, upto: int
    ) -> Iterator[dict[bytes, bytes]]:
        """The state to which the changes of a window lead, by each kind of reading them."""
        for order in ("key", "time"):
            state = dict(before)
            found = self.store.changes(since, upto, order=order)
            # By key a range delete comes at its start, so the times tell what it deletes.
            for change in sorted(found, key=lambda change: change.timestamp):
                if change.op == "delete_range":
                    assert change.end_key is not None
                    for key in [k for k in state if change.key <= k < change.end_key]:
                        del state[key]
                elif change.value is None:
                    state.pop(change.key, None)
                else:
                    state[change.key] = change.value
            yield state


class History:
    """One random history."""

    spans: Sequence[bytes | None] = (None, b"a/", b"")
    """A push replaces the keys of one of these prefixes, or nothing."""
    changes = True
    """Whether some pushes are changes, with rows that delete."""
    host: type[Host] = Host

    def __init__(self, root: Path, pick: random.Random, url: str, shards: int) -> None:
        self.pick, self.shards = pick, shards
        self.pushes = Pushes(url)
        self.made: list[Made | int] = []
        """The pushes, and the numbers of pushes that were reverted, as the log has them."""
        self.hosts = [self.host(root / str(n), self.pushes, n, pick) for n in range(shards)]
        self.read_at = 0

    def build(self) -> None:
        """A job reads its data now."""
        self.read_at = build_time(*(host.store for host in self.hosts))

    def push(self) -> None:
        if self.changes and self.pick.random() < 0.3:
            self.push_changes()
            return
        prefix = self.pick.choice(self.spans)
        among = [key for key in self.host.keys if key.startswith(prefix or b"")]
        keys = [key for key in among if self.pick.random() < 0.5]
        rows = {key: b"push %d" % self.pick.getrandbits(20) for key in keys}
        keeps = self.pick.random() < 0.6
        made = Made(rows, prefix, self.read_at if keeps else None)
        mode = "add" if prefix is None else "replace"
        self.send(made, mode=mode, keep_newer=keeps, built_at=made.built_at)
        self.made.append(made)

    def send(self, made: Made, **how: Any) -> None:
        rows = {key: value for key, value in made.rows.items() if value is not None}
        push(self.pushes, rows, shards=self.shards, prefix=made.prefix, **how)

    def push_changes(self) -> None:
        """Push rows that put and delete. Some clear a range too."""
        keys = self.pick.sample(self.host.keys, self.pick.randint(1, 5))
        value = b"changed %d" % self.pick.getrandbits(20)
        rows = {key: self.pick.choice([None, value]) for key in sorted(keys)}
        made = Made(rows, self.pick.choice(self.spans), None)
        cleared = [] if made.prefix is None else [(made.prefix, made.prefix[:1] + b"z" or b"z")]
        with self.pushes.begin_changes(self.shards, cleared=cleared) as building:
            for shard in range(self.shards):
                with building.writer(shard) as writer:
                    for key, value_of in rows.items():
                        if shard_of(key, self.shards) != shard:
                            continue
                        if value_of is None:
                            writer.delete(key)
                        else:
                            writer.put(key, value_of)
            building.seal()
        self.made.append(made)

    def revert(self) -> None:
        pushes = [at for at, made in enumerate(self.made, 1) if isinstance(made, Made)]
        if pushes:
            position = self.pick.choice(pushes)
            number = sum(1 for at in pushes if at <= position)
            events = len([*self.pushes.log.events()])
            self.pushes.revert(number)
            if len([*self.pushes.log.events()]) > events:
                self.made.append(number)

    def pull(self) -> None:
        host = self.pick.choice(self.hosts)
        self.drain(host)
        assert host.puller.status["log"] == len(self.made)

    def drain(self, host: Host) -> None:
        while host.puller.step():
            self.advance(host, host.puller.status["log"])

    def advance(self, host: Host, taken: int) -> None:
        """Have the model of a host take the events of the log that its store has taken."""
        for at in range(host.passed, taken):
            made = self.made[at]
            if isinstance(made, int):
                host.model.take_back(made)
                continue
            rows = {k: v for k, v in made.rows.items() if shard_of(k, self.shards) == host.shard}
            number = sum(isinstance(each, Made) for each in self.made[: at + 1])
            host.model.take(int(host.store.upper) - 1, number, made._replace(rows=rows))
        host.passed = taken

    def step(self) -> None:
        host = self.pick.choice(self.hosts)
        steps: list[tuple[Callable[[], None], int]] = [
            (host.write, 7),
            (self.build, 3),
            (self.push, 4),
            (self.revert, 3),
            (self.pull, 6),
            (host.backup, 2),
            (host.restore, 1),
        ]
        calls, weights = zip(*steps, strict=True)
        self.pick.choices(calls, weights)[0]()
        for each in self.hosts:
            each.note()

    def run(self, steps: int) -> None:
        try:
            for _ in range(steps):
                self.step()
            for host in self.hosts:
                self.drain(host)
                host.note()
                host.require_history()
                assert [*host.at.glob("ingest/*.fetched")] == []
        finally:
            for host in self.hosts:
                host.store.close()


class KilledHistory(History):
    """A history of one store, whose pushes are taken by processes that are killed."""

    hits = 0

    def __init__(self, root: Path, pick: random.Random, url: str, spawn: Any) -> None:
        super().__init__(root, pick, url, 1)
        self.spawn = spawn

    def pull(self) -> None:
        [host] = self.hosts
        if host.passed == len(self.made):
            return
        host.store.close()
        delay = self.pick.uniform(0, 0.05)
        where = str(host.at), self.pushes.where
        said = run_until_killed(self.spawn, pull_on, where, lambda said: bool(said), delay)
        self.hits += said[-1] == "begun" and "idle" not in said
        host.open()
        assert host.store.verify().problems == ()
        self.advance(host, host.puller.status["log"])


class StagedHistory(History):
    """A history of one store, whose pushes are taken by processes that kill themselves, each at a
    stage that few have reached. The service of the store writes beside them."""

    def __init__(
        self, root: Path, pick: random.Random, url: str, spawn: Any, reached: Counter[Stage]
    ) -> None:
        super().__init__(root, pick, url, 1)
        self.spawn, self.reached = spawn, reached

    def pull(self) -> None:
        [host] = self.hosts
        while host.passed == len(self.made):
            self.pick.choice([self.push, self.revert])()
        host.store.close()
        stages = sorted(STAGES, key=lambda stage: (self.reached[stage], self.pick.random()))
        stage = self.pick.choice(stages[: len(stages) // 3])
        where = str(host.at), self.pushes.where
        keys = self.pick.sample(self.written, len(self.written))
        told = stage, keys, self.pick.getrandbits(30)
        said = run_until_killed(
            self.spawn, pull_until, (*where, *told), lambda said: said[-1] == "idle", 0.0
        )
        for each in said:
            if isinstance(each, Wrote):
                host.model.write(each.at, each.effect)
            elif isinstance(each, Taken):
                self.advance(host, each.events)
            elif isinstance(each, Reached):
                self.reached[each.stage] += 1
        assert isinstance(said[-1], Reached) or said[-1] == "idle", said
        host.open()
        assert host.store.verify().problems == ()
        self.advance(host, host.puller.status["log"])
        host.note()

    @property
    def written(self) -> Sequence[bytes]:
        """The keys that the service of a process writes."""
        return self.host.keys


def histories(tmp_path: Path, count: int, steps: int, kind: type[History] = History) -> None:
    pick = random.Random(seed_of("KVSTORE_PUSHES_SEED", None))
    for number in range(count):
        url = f"memory://histories-{os.getpid()}-{pick.getrandbits(60)}/root"
        with bounds(SCAN_CHUNK=pick.choice([1, 3, 1000])):
            kind(tmp_path / str(number), pick, url, 2).run(steps)


def kills(tmp_path: Path, spawn: Any, hits: int, kind: type[KilledHistory] = KilledHistory) -> None:
    """Kill pullers until `hits` of them were in the midst of an event."""
    pick = random.Random(seed_of("KVSTORE_PULLER_SEED", None))
    number = hit = 0
    while hit < hits:
        root = tmp_path / str(number)
        history = kind(root, pick, str(root / "pushes"), spawn)
        history.run(25)
        hit += history.hits
        number += 1
        assert number < 10 * hits, f"{hit} of {number} histories had a kill that hit"


def staged(tmp_path: Path, spawn: Any, pulls: int, least: int) -> None:
    """Kill at least `pulls` pullers at stages, and each stage at least `least` times."""
    pick = random.Random(seed_of("KVSTORE_STAGES_SEED", None))
    reached: Counter[Stage] = Counter()
    number = 0
    while sum(reached.values()) < pulls or min(reached[stage] for stage in STAGES) < least:
        root = tmp_path / str(number)
        StagedHistory(root, pick, str(root / "pushes"), spawn, reached).run(25)
        number += 1
        assert number < 100 * (least + 1), f"after {number} histories: {reached}"


def test_a_random_history_shows_what_the_model_shows(tmp_path: Path) -> None:
    histories(tmp_path, 1, 50)


@pytest.mark.soak
def test_random_histories_show_what_the_model_shows(tmp_path: Path) -> None:
    histories(tmp_path, 150, 80)


def test_a_history_whose_pullers_are_killed_shows_what_the_model_shows(
    tmp_path: Path, spawn: Any
) -> None:
    kills(tmp_path, spawn, 1)


@pytest.mark.soak
def test_histories_whose_pullers_are_killed_show_what_the_model_shows(
    tmp_path: Path, spawn: Any
) -> None:
    kills(tmp_path, spawn, 60)


def test_a_history_whose_pullers_are_killed_at_each_stage_shows_what_the_model_shows(
    tmp_path: Path, spawn: Any
) -> None:
    staged(tmp_path, spawn, 4, 0)


@pytest.mark.soak
def test_histories_whose_pullers_are_killed_at_each_stage_show_what_the_model_shows(
    tmp_path: Path, spawn: Any
) -> None:
    staged(tmp_path, spawn, 0, 5)
