"""RocksDB after damage: damaged blocks, torn and lost logs and manifests are errors, not losses."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import kvstore
from kvstore.engine import DATA
from kvstore.engine import logs as wal
from kvstore.engine.logs import BLOCK_BYTES, find_damage
from kvstore.engine.rocks import RocksEngine, salvage
from kvstore.errors import CorruptionError
from kvstore.testing.engines import fill, read
from tests.harness.parts import data_family

Change = Callable[[bytearray], bytes]


@pytest.fixture
def damaged(tmp_path: Path) -> RocksEngine:
    """An engine with 20,000 rows in one file, whose middle has a flipped bit."""
    path = tmp_path / "engine"
    engine = RocksEngine(path)
    for low in range(0, 20_000, 1000):
        fill(engine, {b"%06d" % n: os.urandom(100) for n in range(low, low + 1000)})
    engine.compact(DATA)
    engine.close()
    largest = max(path.glob("*.sst"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return RocksEngine(path)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_pass_over_a_damaged_block_raises_instead_of_ending_early(
    damaged: RocksEngine, reverse: bool
) -> None:
    with pytest.raises(CorruptionError) as found:
        read(damaged, reverse=reverse, take=1000)
    assert str(damaged.path) in found.value.where
    damaged.close()


def test_a_pass_beside_a_damaged_block_is_served(damaged: RocksEngine) -> None:
    assert len(read(damaged, start=b"001000", end=b"002000", take=1000)) == 1000
    assert len(read(damaged, start=b"018000", end=b"019000", take=999, reverse=True)) == 1000
    damaged.close()


def is_served(engine: RocksEngine, key: bytes) -> bool:
    try:
        return engine.get(DATA, key) is not None
    except CorruptionError:
        return False


def test_gets_and_readers_in_a_damaged_block_raise(damaged: RocksEngine) -> None:
    wrong = [n for n in range(9_000, 11_000, 10) if not is_served(damaged, b"%06d" % n)]
    assert wrong
    ticket, reader = damaged.borrow()
    reader.seek(b"%06d" % wrong[0])
    assert reader.key() is None
    with pytest.raises(CorruptionError):
        damaged.check(reader)
    damaged.give_back(ticket, reader)
    with pytest.raises(CorruptionError):
        damaged.find(b"%06d" % wrong[0], b"", b"z")
    damaged.close()


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A store directory as a kill leaves it: 500 synced batches, all in the log."""
    engine = RocksEngine(tmp_path / "live")
    for number in range(500):
        fill(engine, {b"%04d" % number: os.urandom(200)})
        engine.sync()
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    engine.close()
    return tmp_path / "crashed"


def change_log(path: Path, change: Change) -> Path:
    log = max(path.glob("*.log"), key=lambda file: file.stat().st_size)
    log.write_bytes(change(bytearray(log.read_bytes())))
    return log


def survivors(path: Path) -> int:
    engine = RocksEngine(path)
    rows = read(engine, take=100)
    engine.close()
    assert [key for key, _ in rows] == [b"%04d" % n for n in range(len(rows))]
    return len(rows)


@pytest.mark.parametrize("lost", [1, 5, 100, 219, 230])
def test_torn_tail_of_the_log_is_cut(crashed: Path, lost: int) -> None:
    change_log(crashed, lambda log: bytes(log[:-lost]))
    assert survivors(crashed) >= 498


@pytest.mark.parametrize(
    "tail",
    [
        lambda log: bytes(log) + bytes(100_000),
        lambda log: bytes(log[:-50]) + bytes(50),
        lambda log: bytes(log[:-50]) + bytes(50_000),
        lambda log: bytes(log) + os.urandom(90_000),
    ],
    ids=["zeros after", "zeros inside", "zeros inside and after", "garbage after"],
)
def test_tail_that_a_power_cut_leaves_is_cut(crashed: Path, tail: Change) -> None:
    change_log(crashed, tail)
    assert survivors(crashed) >= 499


def recycled(kind: int, length: int = 64_000) -> bytes:
    """A bad record of a recycled log, which RocksDB would read for ever, and zeros behind it."""
    return b"\1\2\3\4" + struct.pack("<HB", length, kind) + bytes(90_000)


@pytest.mark.parametrize("kind", [5, 6, 7, 8, 11])
def test_tail_that_looks_like_a_recycled_log_is_cut(crashed: Path, kind: int) -> None:
    """The bad record stands at the beginning of the tail, or where the next block begins."""
    log = change_log(crashed, lambda log: bytes(log) + recycled(kind))
    before = log.read_bytes()
    reader = RocksEngine(crashed, read_only=True)
    assert len(read(reader, take=100)) == 500
    reader.close()
    assert log.read_bytes() == before
    assert survivors(crashed) == 500
    assert not log.exists()
    engine = RocksEngine(crashed)
    fill(engine, {b"9999": b"later"})
    engine.sync()
    shutil.copytree(crashed, crashed / "again", ignore=shutil.ignore_patterns("again"))
    engine.close()
    again = crashed / "again"
    change_log(
        again,
        lambda log: bytes(log) + bytes(BLOCK_BYTES - len(log) % BLOCK_BYTES) + recycled(kind, 9),
    )
    engine = RocksEngine(again)
    assert len(read(engine, take=100)) == 501
    engine.close()


@pytest.fixture
def several_logs(tmp_path: Path) -> Path:
    """A copy of a store whose families were flushed one by one: each log has writes that no other
    log has."""
    with kvstore.open(tmp_path / "live") as store:
        store.hold("mine")
        for number in range(4):
            store.put(b"%d" % number, b"v")
            store.delete_range(b"x", b"y%d" % number)
            data_family(store).flush()
        store.put(b"last", b"v")
        shutil.copytree(tmp_path / "live", tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("left", ["nothing", "less"])
def test_a_closed_log_that_is_lost_or_shorter_is_told(
    several_logs: Path, number: int, left: str, read_only: bool
) -> None:
    with kvstore.open_read_only(several_logs) as store:
        assert len(list(store.scan())) == 5
    logs = sorted(several_logs.glob("*.log"))
    assert len(logs) == 5
    log = logs[number]
    if left == "nothing":
        log.unlink()
    else:
        os.truncate(log, [at for at, _ in wal.records_of(log.read_bytes())][-1])
    opening = kvstore.open_read_only if read_only else kvstore.open
    with pytest.raises(CorruptionError, match=r"lost, or shorter") as caught:
        opening(several_logs)
    assert caught.value.where == str(log)
    salvage(several_logs)
    RocksEngine(several_logs).close()


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    "tail",
    [
        bytes(300),
        os.urandom(300),
        recycled(7, 9),
        b"\1\2\3\4" + struct.pack("<HB", 200, 1) + b"half",
    ],
    ids=["zeros", "garbage", "recycled", "half"],
)
def test_a_torn_tail_of_the_manifest_is_cut(crashed: Path, tail: bytes, read_only: bool) -> None:
    manifest = crashed / (crashed / "CURRENT").read_text().strip()
    manifest.write_bytes(manifest.read_bytes() + tail)
    engine = RocksEngine(crashed, read_only=read_only)
    assert len(read(engine, take=100)) == 500
    engine.close()


def test_a_manifest_that_is_broken_and_goes_on_is_damage(crashed: Path) -> None:
    manifest = crashed / (crashed / "CURRENT").read_text().strip()
    broken = bytearray(manifest.read_bytes())
    broken[20] ^= 1
    manifest.write_bytes(broken)
    for read_only in (True, False):
        with pytest.raises(
            CorruptionError, match=r"broken at byte .*, and whole records"
        ) as caught:
            RocksEngine(crashed, read_only=read_only)
        assert caught.value.where == str(manifest)
    assert manifest.read_bytes() == broken


@pytest.mark.parametrize("read_only", [True, False])
def test_a_store_whose_current_is_gone_is_not_begun_again(crashed: Path, read_only: bool) -> None:
    for file in crashed.glob("*.sst"):
        file.unlink()  # as if it was killed before the first file
    current = (crashed / "CURRENT").read_bytes()
    (crashed / "CURRENT").unlink()
    before = sorted(crashed.iterdir())
    with pytest.raises(CorruptionError, match="CURRENT is gone"):
        RocksEngine(crashed, read_only=read_only)
    assert sorted(crashed.iterdir()) == before
    (crashed / "CURRENT").write_bytes(current)


def test_a_record_within_that_looks_recycled_is_damage(crashed: Path) -> None:
    def change(log: bytearray) -> bytes:
        log[BLOCK_BYTES + 6] = 7
        return bytes(log)

    change_log(crashed, change)
    with pytest.raises(CorruptionError, match=f"byte {BLOCK_BYTES},"):
        RocksEngine(crashed)
    salvage(crashed)
    assert 0 < survivors(crashed) < 500


@pytest.mark.parametrize(
    "at", [0, 5, 6, 20, 30_000, BLOCK_BYTES, BLOCK_BYTES + 4, BLOCK_BYTES + 40]
)
def test_damage_inside_the_log_is_an_error_not_a_silent_loss(crashed: Path, at: int) -> None:
    def flip(log: bytearray) -> bytes:
        log[at] ^= 0x10
        return bytes(log)

    log = change_log(crashed, flip)
    with pytest.raises(CorruptionError) as found:
        RocksEngine(crashed)
    assert found.value.where == str(log)
    damage = find_damage(crashed)
    assert damage is not None
    assert damage.offset <= at


def test_a_hole_inside_the_log_is_an_error(crashed: Path) -> None:
    change_log(crashed, lambda log: bytes(log[:5000]) + bytes(900) + bytes(log[5900:]))
    with pytest.raises(CorruptionError):
        RocksEngine(crashed)


def test_salvage_keeps_what_precedes_the_damage(crashed: Path) -> None:
    change_log(crashed, lambda log: bytes(log[:60_000]) + b"x" * 100 + bytes(log[60_100:]))
    with pytest.raises(CorruptionError):
        RocksEngine(crashed)
    salvage(crashed)
    assert 100 < survivors(crashed) < 300


def test_an_intact_log_has_no_damage(crashed: Path) -> None:
    assert find_damage(crashed) is None
    assert survivors(crashed) == 500


_KILLED = """
import os, sys
from pathlib import Path
from kvstore.engine.rocks import RocksEngine
from kvstore.testing.engines import fill
engine = RocksEngine(Path(sys.argv[1]))
fill(engine, {b"%d" % n: b"v" for n in range(100)})
engine.sync()
os._exit(0)
"""


def test_recovery_writes_what_the_log_holds_into_new_files(tmp_path: Path) -> None:
    """So nothing depends on pages of the log that a failed fsync may have dropped."""
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "s")], check=True)
    assert not list((tmp_path / "s").glob("*.sst"))
    with closing(RocksEngine(tmp_path / "s")) as engine:
        found = read(engine)
        shutil.copytree(tmp_path / "s", tmp_path / "no log", ignore=shutil.ignore_patterns("*.log"))
    with closing(RocksEngine(tmp_path / "no log")) as engine:
        assert found
        assert read(engine) == found
