"""A fleet takes pushes from one bucket that fails, while pullers crash: nobody misses or doubles
one."""

from __future__ import annotations

import pytest

from benchmarks.fleet import Fleet
from tests.harness.seeds import seed_of


def hold(stores: int) -> None:
    fleet = Fleet(stores, faults=True, seed=seed_of("KVSTORE_FLEET_SEED", None))
    try:
        for number in range(1, 4):
            fleet.push(60)
            fleet.spread()
            fleet.require_exact(number)
        fleet.revert(3)
        fleet.spread()
        fleet.require_exact(3)
        assert fleet.states(2) == ["added"] * stores
        assert fleet.states(3) == ["reverted"] * stores
        assert any(host.crashes for host in fleet.hosts)
    finally:
        fleet.close()


def test_a_fleet_has_each_push_once() -> None:
    hold(12)


@pytest.mark.soak
def test_a_thousand_stores_have_each_push_once() -> None:
    hold(1000)
