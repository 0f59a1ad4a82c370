"""Fuzz targets, and mutations of sound bytes by a seed.

A target must return for any bytes: an error that it lets out is a defect.
A target catches documented errors, and checks each answer by assertions.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import tests.fuzz


@dataclass(frozen=True, slots=True)
class Target:
    """One format under fuzzing."""

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    """Sound bytes of the format, from which mutations start."""
    modules: tuple[ModuleType, ...] = ()
    """The code whose coverage should steer the fuzzer."""
    rounds: int = 300
    """Mutations of the short form, some 200 ms."""


def targets() -> dict[str, Target]:
    """The targets of all modules in this package, by name."""
    found: dict[str, Target] = {}
    for module in pkgutil.iter_modules(tests.fuzz.__path__):
        if module.name.startswith(("test_", "__")):
            continue
        loaded = importlib.import_module(f"tests.fuzz.{module.name}")
        for target in getattr(loaded, "TARGETS", ()):
            assert target.name not in found
            found[target.name] = target
    return found


_SOUND_MAX = 20

_EDGES = [0, 1, 2, 7, 0x7F, 0x80, 0xFE, 0xFF]
_NUMBERS = [0, 1, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def mutations(seeds: Sequence[bytes], *, seed: int, count: int) -> Iterator[bytes]:
    """Sound bytes first, then bytes that differ from sound ones in a few places."""
    source = random.Random(seed)
    yield from source.sample(list(seeds), min(len(seeds), _SOUND_MAX))
    for _ in range(count):
        data = bytearray(source.choice(seeds))
        for _ in range(source.choice((1, 1, 2, 5))):
            _mutate(data, source, seeds)
        yield bytes(data)


def _mutate(data: bytearray, source: random.Random, seeds: Sequence[bytes]) -> None:
    at = source.randrange(len(data) + 1)
    match source.randrange(8):
        case 0 if data:
            data[at % len(data)] ^= 1 << source.randrange(8)
        case 1 if data:
            data[at % len(data)] = source.choice(_EDGES)
        case 2:
            del data[at:]
        case 3:
            del data[at : at + source.choice((1, 2, 4, 8))]
        case 4:
            data[at:at] = bytes(source.choices(_EDGES, k=source.choice((1, 2, 4, 9))))
        case 5:
            width, order = source.choice((2, 4, 8)), source.choice(("little", "big"))
            number = source.choice(_NUMBERS) % (1 << 8 * width)
            data[at : at + width] = number.to_bytes(width, order)
        case 6:
            other = source.choice(seeds)
            begin = source.randrange(len(other) + 1)
            data[at:at] = other[begin : begin + source.choice((1, 8, 40))]
        case _:
            data[at:at] = data[at : at + 16] * source.choice((1, 2, 30))
