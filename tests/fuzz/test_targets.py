"""Every fuzz target, for some hundred mutations; many more in `make soak`."""

from __future__ import annotations

import pytest

from tests.fuzz.driver import mutations, targets
from tests.harness.seeds import seed_of

TARGETS = targets()


def run(name: str, rounds: int, seed: int) -> None:
    """Run a target on mutations of its seeds."""
    target = TARGETS[name]
    data = b""
    try:
        for data in mutations(target.seeds(), seed=seed, count=rounds):
            target.run(data)
    except BaseException:
        print(f"target {name}, input {data!r}")
        raise


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_returns_whatever_it_is_handed(name: str) -> None:
    run(name, TARGETS[name].rounds, seed_of("FUZZ_SEED"))


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_returns_after_a_hundred_times_as_many(name: str) -> None:
    run(name, 100 * TARGETS[name].rounds, seed_of("FUZZ_SEED"))
