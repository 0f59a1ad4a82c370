"""SIGKILL at random moments, many times: acknowledged writes stand, and no write is half there.

A kill loses bytes in the memory of the process, but no bytes that the system had taken.
`test_power_cut.py` has the loss of power.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from bulk.manifest import parse_manifest
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.errors import UsageError
from kvstore.store import Store
from kvstore.testing.model import state_after
from tests.crash import children
from tests.harness.kills import SEED, run_until_killed
from tests.harness.seeds import seeded

pytestmark = pytest.mark.on_disk

Child = Callable[[Path, Any, int], None]
Said = list[tuple[Any, ...]]

ROUNDS = 4
KILL_AFTER_S_MAX = 0.25


class Killer:
    """Kills children at random moments, and counts the kills that hit a call."""

    def __init__(self, spawn: Any, rng: random.Random) -> None:
        self.spawn, self.rng = spawn, rng
        self.kills = self.hits = 0

    def run(self, child: Child, place: Path) -> Said:
        """Start the child, kill it a random time after its first call; returns all its messages."""
        arguments = (child, place, self.rng.randrange(1 << 30))
        delay_s = self.rng.random() * KILL_AFTER_S_MAX
        said = run_until_killed(
            self.spawn, children.start, arguments, lambda said: acknowledged(said) != [], delay_s
        )
        begun = sum(kind == "begun" for kind, *_ in said)
        self.kills += 1
        self.hits += begun > len(said) - begun
        return said


@pytest.fixture
def killer(spawn: Any) -> Iterator[Killer]:
    """Fails a test whose kills came between calls: such kills prove nothing."""
    killer = Killer(spawn, seeded(SEED))
    yield killer
    assert killer.hits > killer.kills // 2, f"{killer.hits} of {killer.kills} kills hit a call"


def acknowledged(said: Said) -> Said:
    return [what for what in said if what[0] != "begun"]


def rounds(soak: int) -> Any:
    return pytest.mark.parametrize(
        "count", [ROUNDS, pytest.param(soak, marks=pytest.mark.soak)], ids=["few", "many"]
    )


def places(root: Path, count: int) -> Iterator[Path]:
    """A directory for each round: the same for some rounds, then a new one, so that checks of the
    whole directory stay cheap."""
    for number in range(count):
        place = root / f"{number // ROUNDS}"
        place.mkdir(exist_ok=True)
        yield place


def check_feed(store: Store) -> None:
    """The changes since the beginning are the state, by both orders."""
    state = dict(store.scan())
    for order in ("time", "key"):
        rows = [tuple(row) for row in store.changes(0, order=order)]  # type: ignore[arg-type]
        assert state_after({}, rows) == state
    rows = [tuple(row) for row in store.changes(0, revisions="latest")]
    assert state_after({}, rows) == state


@pytest.mark.usefixtures("each_engine")
@rounds(200)
@pytest.mark.parametrize("child", [children.commits, children.pieces])
def test_acknowledged_commits_stand_and_batches_are_whole(
    killer: Killer, tmp_path: Path, child: Child, count: int
) -> None:
    kvstore.open(tmp_path / "store").close()
    for place in places(tmp_path, count):
        said = acknowledged(killer.run(child, place))
        with kvstore.open(place / "store") as store:
            found = dict(store.scan())
            check_feed(store)
        for kind, name, number, durability in said:
            if durability == "async":
                continue
            first = b"%s/%s/%06d" % (kind.encode(), name, number)
            assert (first if kind == "put" else first + b"/0") in found
        check_batches(found)


def check_batches(found: dict[bytes, bytes]) -> None:
    numbers: dict[bytes, int] = {}
    for key in found:
        if key.startswith(b"batch/"):
            batch = key.rpartition(b"/")[0]
            numbers[batch] = numbers.get(batch, 0) + 1
    assert set(numbers.values()) <= {children.KEYS_PER_BATCH}
    replaced = [value for key, value in found.items() if key.startswith(b"replaced/")]
    assert len(replaced) in (0, children.KEYS_PER_BATCH)
    assert len(set(replaced)) <= 1


@pytest.mark.usefixtures("each_engine")
@rounds(200)
def test_imports_are_whole_or_not_there_and_go_on(
    killer: Killer, tmp_path: Path, count: int
) -> None:
    kvstore.open(tmp_path / "store").close()
    for place in places(tmp_path, count):
        said = acknowledged(killer.run(children.imports, place))
        stamps = {name: stamp for kind, name, stamp in said if kind == "import"}
        reverted = {name for kind, name, _ in said if kind == "revert"}
        with kvstore.open(place / "store") as store:
            for name, stamp in stamps.items():
                assert len(rows_of(store, name, stamp)) == children.ROWS_PER_IMPORT
                assert rows_of(store, name, stamp - 1) == []
            for name in reverted:
                assert rows_of(store, name) == []
            check_feed(store)
            for staging in place.glob("staged-*"):
                name = staging.name.removeprefix("staged-").encode()
                if not (staging / "import.json").exists():
                    assert rows_of(store, name) == []
                    continue
                assert len(rows_of(store, name)) in (0, children.ROWS_PER_IMPORT)
                manifest = parse_manifest((staging / "import.json").read_bytes(), where="staging")
                known = store.imports.get(manifest.import_id)
                if known is not None and known.reverted is not None:
                    with pytest.raises(UsageError, match="was reverted"):
                        bulk.ingest(store, staging)
                    assert rows_of(store, name) == []
                    continue
                stamp = bulk.ingest(store, staging)  # continues where the killed one was
                assert stamp == stamps.get(name, stamp)
                assert len(rows_of(store, name, stamp)) == children.ROWS_PER_IMPORT
            assert all(record.added is not None for record in store.imports.all())


def rows_of(store: Store, name: bytes, as_of: int | None = None) -> list[tuple[bytes, bytes]]:
    return list(store.scan(prefix=b"import/%s/" % name, as_of=as_of))


@pytest.mark.usefixtures("each_engine")
@rounds(100)
def test_finished_backups_verify_and_the_chain_goes_on(
    killer: Killer, tmp_path: Path, count: int
) -> None:
    kvstore.open(tmp_path / "store").close()
    collection = Collection(tmp_path / "backups")
    for number in range(count):
        said = acknowledged(killer.run(children.backups, tmp_path))
        collection.verify()
        assert collection.upper >= max(upper for _, upper in said)
        with kvstore.open(tmp_path / "store") as store:
            if number % 3 == 0:
                check_restore(store, collection, tmp_path / f"restored-{number}")
            collection.backup(store)
            assert collection.upper == store.upper
    lowers = [info.lower for info in collection.list()]
    assert lowers == [0, *(info.upper for info in collection.list())][:-1]


def check_restore(store: Store, collection: Collection, path: Path) -> None:
    instant = collection.restore(path)
    with kvstore.open(path) as restored:
        assert dict(restored.scan(as_of=instant)) == dict(store.scan(as_of=instant))
        assert list(restored.changes(0)) == list(store.changes(0, instant))


@rounds(100)
def test_a_restore_appears_whole_or_not_at_all(killer: Killer, tmp_path: Path, count: int) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        for number in range(300):
            store.put(b"%03d" % (number % 100), b"%d" % number)
        Collection(tmp_path / "backups").backup(store)
        state, changes = dict(store.scan()), list(store.changes(0))
    for _ in range(count):
        said = killer.run(children.restores, tmp_path)
        for kind, name in said:
            path = Path(name)
            assert path.exists() or kind == "begun"
            if path.exists():
                with kvstore.open(path) as restored:
                    assert dict(restored.scan()) == state
                    if path.name.endswith("-0"):
                        assert list(restored.changes(0)) == changes


@rounds(100)
def test_a_store_killed_at_birth_opens(killer: Killer, tmp_path: Path, count: int) -> None:
    for _ in range(count):
        said = killer.run(children.births, tmp_path)
        with kvstore.open(said[-1][1], "rocksdb") as store:
            assert dict(store.scan()) in ({}, {b"k": b"v"})
