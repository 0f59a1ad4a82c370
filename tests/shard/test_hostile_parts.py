"""Hostile parts: reading a part gives its rows or the documented error, in bounded memory, and
never ends the process, whatever the part declares."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from kvstore.backup.shard.rows.part_format import read_struct
from kvstore.backup.shard.rows.part_reader import translated
from kvstore.errors import CorruptionError, DeterminateError
from tests.harness.seeds import seed_of
from tests.shard import hostile_parts, thrift

ROOT = Path(__file__).parents[2]


def attack(seed: int, count: int) -> None:
    """Read bombs and `count` altered parts in a process of their own, with little memory."""
    command = [sys.executable, "-m", "tests.shard.hostile_parts", str(seed), str(count)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = f"seed {seed}\n{run.stdout}\n{run.stderr[-2000:]}"
    assert (run.returncode, run.stdout) == (0, f"{hostile_parts.END}\n"), said


def test_hostile_parts_are_refused_in_bounded_memory() -> None:
    attack(1, 400)


@pytest.mark.soak
def test_many_hostile_parts_are_refused_in_bounded_memory() -> None:
    for _ in range(5):
        attack(seed_of(), 10_000)


def test_a_bomb_of_a_dictionary_is_refused_for_its_dictionary() -> None:
    """It was refused for its columns, and the check of dictionaries was never asked."""
    (bomb,) = (each for each in hostile_parts.bombs() if each[0] == hostile_parts.DICTIONARY_BOMB)
    with pytest.raises(CorruptionError, match="dictionary"):
        hostile_parts.read(bomb[1], bomb[2])


def test_bounds_narrower_than_the_rows_are_found_by_reading_all(tmp_path: Path) -> None:
    data, part = hostile_parts.written(50)
    for lie in (
        {"key_min": b"000001"},
        {"key_max": b"000040"},
        {"time_min": 50},
        {"time_max": 50},
    ):
        with pytest.raises(CorruptionError, match="bounds"):
            hostile_parts.read(data, replace(part, **lie))


def test_no_memory_is_no_damage() -> None:
    _, part = hostile_parts.written(5)
    for error in (MemoryError(), pa.ArrowMemoryError("malloc"), DeterminateError("get", "503")):
        with pytest.raises(type(error)), translated(part):
            raise error
    for damage in (pa.ArrowInvalid("x"), OSError("x"), ValueError("x")):
        with pytest.raises(CorruptionError, match=part.name), translated(part):
            raise damage


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x15",
        b"\x15\x80",
        b"\x15" + b"\xff" * 20,
        b"\x18\xff\xff\xff\xff\x07",
        b"\x19\xf5\xff\xff\xff\xff\x07",
        b"\x1c" * 100,
        b"\x19\x19" * 100,
        b"\x15\x02\x05\x02\x02\x00",
        b"\x1b\x00\x00",
        b"\x1e\x00",
    ],
)
def test_a_malformed_header_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        read_struct(data)


def test_headers_of_any_bytes_are_read_or_refused() -> None:
    rng = random.Random(3)
    footer = thrift.write(hostile_parts.footer(hostile_parts.written(50)[0])[0])
    read_struct(footer)
    for _ in range(2_000):
        altered = bytearray(footer[: rng.randrange(len(footer))])
        for _ in range(rng.randrange(1, 5)):
            if altered:
                altered[rng.randrange(len(altered))] = rng.randrange(256)
        try:
            _, end = read_struct(bytes(altered))
        except ValueError:
            continue
        assert end <= len(altered)
