"""Seeds of random tests: drawn or given, and always printed."""

from __future__ import annotations

import os
import random
import sys
from typing import Final

SEED: Final = "KVSTORE_TEST_SEED"
"""The variable of the environment that repeats a random test, unless the test names another."""


def seed_of(name: str = SEED, seed: int | None = None) -> int:
    """The seed that is given, else the variable `name` of the environment, else one at random.

    Prints it as `name=seed`, so that a failing test shows how to repeat it.
    """
    if seed is None:
        seed = int(os.environ.get(name) or random.SystemRandom().getrandbits(32))
    sys.stderr.write(f"{name}={seed}\n")
    return seed


def seeded(name: str = SEED) -> random.Random:
    """Random numbers from the seed of `seed_of`."""
    return random.Random(seed_of(name))
