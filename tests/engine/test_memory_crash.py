"""The memory engine's journal after power cuts, kills, failed writes and flipped bits."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.engine.api import CHANGES, DATA
from kvstore.engine.memory_engine import CONTENT, MemoryEngine, MemoryState
from kvstore.errors import (
    CorruptionError,
    FormatVersionError,
    JournalDamagedError,
    NotAStoreError,
    OutOfSpaceError,
    PoisonedError,
    StorageError,
)
from kvstore.storage.journal import Journal, Sync
from tests.engine.memory_store import PATH, entries, open_memory, put, stage
from tests.harness.bounds import bounds
from tests.harness.disk import MemoryDisk, ProcessDied
from tests.harness.parts import parts_of


def test_a_store_killed_before_its_first_file_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "LOCK").touch()
    open_memory(tmp_path / "s").close()


def on_disk(disk: MemoryDisk) -> MemoryEngine:
    return MemoryEngine(PATH, files=disk, compact_bytes=200)


def test_every_power_cut_leaves_a_prefix_with_all_that_was_synced() -> None:
    disk = MemoryDisk()
    engine = on_disk(disk)
    states, synced = [entries(engine)], 0
    for number in range(12):
        batch = engine.batch()
        batch.put(b"k%d" % (number % 5), b"%d" % number, engine.families[DATA])
        batch.put(b"%d" % number, b"", engine.families[CHANGES])
        batch.delete(b"k%d" % (number % 3), engine.families[DATA])
        engine.write(batch)
        states.append(entries(engine))
        if number % 4 == 1:
            engine.sync()
            synced = number + 1
        for cut in disk.power_cuts():
            again = MemoryEngine(PATH, files=cut)
            assert entries(again) in states[synced:]
        if number % 5 == 4:
            engine.close()
            engine = on_disk(disk)
            assert entries(engine) == states[-1]
            synced = number + 1


def test_a_flipped_bit_is_named_not_served() -> None:
    disk = MemoryDisk()
    engine = on_disk(disk)
    for number in range(5):
        put(engine, b"%d" % number, b"v")
    engine.sync()
    (live,) = (path for path in disk.inodes if path.endswith("-journal"))
    whole = entries(engine)[DATA]
    for at in range(len(disk.inodes[live].live)):
        image = {path: bytearray(inode.live) for path, inode in disk.inodes.items()}
        image[live][at] ^= 4
        try:
            found = entries(on_disk(MemoryDisk({p: bytes(data) for p, data in image.items()})))[
                DATA
            ]
        except (CorruptionError, NotAStoreError, FormatVersionError):
            continue
        assert list(found.items()) == list(whole.items())[: len(found)]
        assert len(found) >= 4, "only the last record may look torn"


def test_a_failed_write_leaves_the_store_poisoned_and_what_was_there() -> None:
    disk = MemoryDisk()
    engine = on_disk(disk)
    put(engine, b"a", b"1")
    engine.sync()
    disk.fail = lambda step: OSError(28, "full") if step.startswith("write") else None
    with pytest.raises(OutOfSpaceError):
        put(engine, b"a", b"2")
    disk.fail = lambda step: None
    with pytest.raises(PoisonedError):
        put(engine, b"a", b"3")
    engine.close()
    assert entries(on_disk(disk.killed()))[DATA] == {b"a": b"1"}


def test_a_failed_fsync_poisons_too() -> None:
    disk = MemoryDisk()
    engine = on_disk(disk)
    put(engine, b"a", b"1")
    disk.fail = lambda step: OSError(5, "gone") if step.startswith("sync") else None
    with pytest.raises(StorageError):
        engine.sync()
    disk.fail = lambda step: None
    with pytest.raises(PoisonedError):
        engine.sync()


@pytest.mark.parametrize("torn", [0, 7], ids=["before", "inside"])
def test_an_interrupt_at_any_step_of_the_disk_is_settled_by_the_next_call(torn: int) -> None:
    """The engine refused every later call."""
    for at in itertools.count(1):
        disk, told, came = MemoryDisk(), [b"0"], 0
        with bounds({"JOURNAL_FILE_RECORDS": 4}):
            engine = on_disk(disk)
            put(engine, b"n", b"0")
            disk.die_before, disk.die_after_bytes = len(disk.steps) + at, torn
            for number in range(1, 12):
                told.append(b"%d" % number)
                try:
                    put(engine, b"n", told[-1])
                    if number % 5 == 0:
                        engine.sync()
                except ProcessDied:
                    disk.die_before = None
                    came += 1
                    if number % 2:  # otherwise the next write settles it
                        assert engine.get(DATA, b"n") in told[-2:]
                        assert engine.look_again()
                else:
                    assert engine.get(DATA, b"n") == told[-1]
            disk.die_before = None
            put(engine, b"last", b"")
            left = entries(engine)[DATA]
            assert left in ({b"n": told[-1], b"last": b""}, {b"n": told[-2], b"last": b""})
            assert entries(on_disk(disk.killed()))[DATA] == left
        if not came:
            assert at > 20
            break


CHILD = """
import os, sys
import kvstore
store = kvstore.open(sys.argv[1], engine="memory", durability=sys.argv[2])
number = int(store.get(b"n", default=b"0"))
while True:
    number += 1
    print("begin", flush=True)
    with store.batch() as batch:
        batch.put(b"n", b"%d" % number)
        batch.put(b"k%d" % number, b"x" * (number % 700))
    print(number, flush=True)
"""


KILLS_MAX = 20


@pytest.mark.parametrize("durability", ["sync", "group", "async"])
def test_a_killed_store_has_all_that_it_told_of(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "s"
    hits = rounds = 0
    while hits < 2:
        rounds += 1
        assert rounds <= KILLS_MAX, f"{hits} kills hit a commit"
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), durability], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(80)]
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.read().splitlines(keepends=True)
        lines = [line for line in lines if line.endswith("\n")]  # a kill may cut the last record
        hits += lines[-1] == "begin\n"
        told = [int(line) for line in lines if line != "begin\n"]
        with kvstore.open(path, engine="memory") as store:
            newest = int(store.get(b"n") or b"0")
            assert told[-1] <= newest <= told[-1] + 1
            rows = dict(store.scan(prefix=b"k"))
            assert rows == {b"k%d" % n: b"x" * (n % 700) for n in range(1, newest + 1)}


def crash_before(path: Path, engine: MemoryEngine, method: str, nth: int) -> None:
    """Keep a copy of the directory as it is before the `nth` call of `method`."""
    original, calls = getattr(engine, method), itertools.count(1)

    def copying(*arguments: object) -> object:
        if next(calls) == nth:
            copy = path.with_name("crashed")
            copy.mkdir()
            for file in path.iterdir():
                if file.is_file():
                    (copy / file.name).write_bytes(file.read_bytes())
        return original(*arguments)

    setattr(engine, method, copying)


@pytest.mark.parametrize(
    ("method", "nth", "linked"),
    [("_stage", 1, 0), ("_stage", 99, 0), ("_take", 1, 100), ("sync", 2, 100)],
)
def test_an_ingest_cut_off_is_all_there_or_not_at_all(
    tmp_path: Path, method: str, nth: int, linked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.engine.memory_engine.MEMORY_RECORD_BYTES", 100)
    staged = stage(tmp_path / "in", {b"%04d" % n: b"v" * 50 for n in range(100)}, import_id=1)
    store = open_memory(tmp_path / "s")
    crash_before(tmp_path / "s", parts_of(store).engine, method, nth)  # type: ignore[arg-type]
    bulk.ingest(store, staged.staging)
    store.close()
    with open_memory(tmp_path / "crashed") as crashed:
        assert crashed.get(b"0000") is None
        assert len(parts_of(crashed).engine.cursor(DATA).take(1000)[0]) == linked
        bulk.ingest(crashed, staged.staging)
        assert len(list(crashed.scan())) == 100


def test_rows_of_an_ingest_that_failed_are_gone(tmp_path: Path) -> None:
    staged = stage(tmp_path / "in", {b"%05d" % n: os.urandom(60) for n in range(20_000)})
    (part,) = staged.staging.glob("*.sst")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    engine = MemoryEngine(tmp_path / "s")
    put(engine, b"a", b"1")
    with pytest.raises(CorruptionError):
        engine.ingest([part])
    assert engine._state.ingests == {}
    assert part.exists()
    engine.close()
    engine = MemoryEngine(tmp_path / "s")
    assert entries(engine)[DATA] == {b"a": b"1"}
    engine.close()


def test_rows_of_a_dead_process_do_not_outlive_its_successors_first_write(tmp_path: Path) -> None:
    path = tmp_path / "s"
    engine = MemoryEngine(path)
    engine._stage(1, [b"r"], [b""])
    engine.close()
    engine = MemoryEngine(path)
    put(engine, b"a", b"1")
    engine.close()
    state = MemoryState()
    with Journal.open(
        path, restore=state.restore, apply=state.apply, content=CONTENT, sync=Sync.never()
    ):
        assert state.ingests == {}


def test_damage_names_the_journal_file(tmp_path: Path) -> None:
    with open_memory(tmp_path / "s") as store:
        for number in range(5):
            store.put(b"%d" % number, b"v" * 50)
    (live,) = (tmp_path / "s").glob("*-journal")
    content = bytearray(live.read_bytes())
    content[len(content) // 2] ^= 1
    live.write_bytes(content)
    with pytest.raises(JournalDamagedError) as found:
        open_memory(tmp_path / "s")
    assert found.value.path == str(live)
