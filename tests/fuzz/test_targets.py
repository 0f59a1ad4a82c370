"""Every fuzz target, for some hundred mutations; many more in `make soak`."""

from __future__ import annotations

import os
import secrets

import pytest

from tests.fuzz.driver import mutations, targets

TARGETS = targets()


def run(name: str, rounds: int, seed: int) -> None:
    """Mutate and run. The seed is printed where a test fails: FUZZ_SEED takes it."""
    seed = int(os.environ.get("FUZZ_SEED", seed))
    target = TARGETS[name]
    data = b""
    try:
        for data in mutations(target.seeds(), seed=seed, count=rounds):
            target.run(data)
    except BaseException:
        print(f"FUZZ_SEED={seed}, target {name}, input {data!r}")
        raise


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_returns_whatever_it_is_handed(name: str) -> None:
    run(name, TARGETS[name].rounds, secrets.randbits(32))


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_returns_after_a_hundred_times_as_many(name: str) -> None:
    run(name, 100 * TARGETS[name].rounds, secrets.randbits(32))
