"""Scripts and owners that are killed at random, under load: the next run resumes, and nothing is
lost, doubled or held for ever."""

from __future__ import annotations

import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from tests.control import owners
from tests.control.owners import Owner
from tests.control.scripting import ROWS, Script, imported, staging, typed
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

pytestmark = pytest.mark.on_disk


class Rounds:
    """Kills of scripts and owners beside one store."""

    def __init__(self, spawn: Any, place: Path, engine: str, rng: random.Random) -> None:
        self.spawn, self.place, self.engine, self.rng = spawn, place, engine, rng
        self.path = place / "store"
        self.owner = self.new_owner()
        self.stamps: dict[int, int] = {}
        """When imports were acknowledged, by number."""
        self.uppers: list[int] = []
        self.number = 0
        self.hits = 0
        self.turn_s = 0.2
        """Seconds that the longest recent turn took. A kill comes within this time."""
        self.script = self.new_script()

    def new_owner(self) -> Owner:
        return Owner(self.spawn, self.path, self.engine, owners.acknowledged(self.path))

    def new_script(self) -> Script:
        return Script(self.spawn, self.place, self.rng.getrandbits(32), self.number)

    def kill(self) -> None:
        """Let some turns pass, kill one of the two or both at a random moment of the next, and
        start the victims anew."""
        for _ in range(self.rng.choice([0, 0, 1])):
            self.note(self.script.wait("begun"))
            begun = time.monotonic()
            self.note(self.script.wait("done"))
            self.turn_s = max(time.monotonic() - begun, self.turn_s * 0.8)
        self.note(self.script.wait("begun"))
        time.sleep(self.rng.random() * self.turn_s)  # the moment of the kill is the subject
        victim = self.rng.choice(["script", "script", "owner", "both"])
        if victim != "script":
            self.owner.kill()
            self.owner = self.new_owner()
        if victim != "owner":
            told = self.script.kill()
            self.hits += (bool(told) and told[-1][0] == "begun") or not told
            self.note(told)
            self.script = self.new_script()
        else:
            self.hits += 1

    def note(self, told: list[tuple[Any, ...]]) -> None:
        for kind, turn, *facts in told:
            if kind == "done" and turn == "import":
                number, stamp = facts
                assert self.stamps.setdefault(number, stamp) == stamp
                self.number = max(self.number, number + 1)
            elif kind == "done" and turn == "backup":
                self.uppers.append(facts[1])

    def finish(self) -> None:
        """Let turns pass without a kill until a backup and an import were made, then end script and
        owner."""
        self.note(self.script.wait("done"))
        while not (self.stamps and self.uppers):
            self.note(self.script.wait("done"))
        self.note(self.script.kill())
        self.owner.stop()

    def check(self) -> None:
        """Check the store and the collection from this process."""
        collection = Collection(self.place / "collection")
        with kvstore.open(self.path, self.engine) as store:
            assert store.verify().ok
            for number in range(owners.acknowledged(self.path)):
                key, value = owners.row(number)
                assert store.get(key) == value
            self.check_imports(store)
            info = collection.backup(store)
            uppers = [each.upper for each in collection.list()]
            assert uppers == sorted(set(uppers))
            assert set(self.uppers) <= set(uppers), "an acknowledged backup is there"
            assert collection.verify("contents", store).rows
            (hold,) = store.holds.all()
            assert (hold.timestamp, hold.lost) == (info.upper - 1, False)
            with bounds({"STALE_IMPORT_S": 0.0}):
                report = store.gc(keep=timedelta(0))
            assert report.since == hold.timestamp, "nothing else is held"
            place = self.path / "ingest"
            assert not place.exists() or not list(place.iterdir())
            expected = dict(store.scan(as_of=info.upper - 1))
        collection.restore(self.place / "restored")
        with kvstore.open_read_only(self.place / "restored") as restored:
            assert dict(restored.scan()) == expected

    def check_imports(self, store: kvstore.Store) -> None:
        for number in range(self.number + 1):
            directory = staging(self.place, number)
            if not (directory / "import.json").exists():
                assert number not in self.stamps
                continue
            stamp = bulk.ingest(store, directory)
            assert stamp == self.stamps.setdefault(number, stamp), "added once"
            rows = imported(number)
            assert dict(store.scan(prefix=b"import/%04d/" % number)) == rows
            table = store.table("users")
            for row in typed(number):
                assert list(table.find("by_mail", row["mail"])) == [table.get(row["id"])] == [row]
            assert [seen.timestamp for seen in table.history(number * ROWS)] == [stamp]
            versions = store.history(next(iter(rows)))
            assert [version.timestamp for version in versions] == [stamp]
        assert not [each for each in store.imports.all() if each.added is None]


@pytest.mark.parametrize(
    ("engine", "kills"),
    [
        ("rocksdb", 24),
        pytest.param("rocksdb", 700, marks=pytest.mark.soak),
        pytest.param("memory", 300, marks=pytest.mark.soak),
    ],
)
def test_kills_beside_a_loaded_owner(tmp_path: Path, spawn: Any, engine: str, kills: int) -> None:
    rounds = Rounds(spawn, tmp_path, engine, seeded())
    try:
        for _ in range(kills):
            rounds.kill()
        rounds.finish()
    finally:
        rounds.script.kill()
        rounds.owner.kill()
    assert rounds.hits >= kills // 3, f"{rounds.hits} of {kills} kills hit a turn"
    rounds.check()
