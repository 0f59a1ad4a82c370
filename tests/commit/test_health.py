"""Health alone: the first failure counts, and every later call raises it."""

from __future__ import annotations

import pytest

from kvstore.errors import ClosedError, OutOfSpaceError, PoisonedError, StorageError
from kvstore.timeline.durability import Health
from kvstore.timeline.frontiers import Frontiers


@pytest.fixture
def frontiers() -> Frontiers:
    return Frontiers(since=0, upper=1)


@pytest.fixture
def health(frontiers: Frontiers) -> Health:
    return Health(frontiers, "the bench")


def fail(error: BaseException) -> None:
    raise error


def test_a_sound_store_goes_on(frontiers: Frontiers, health: Health) -> None:
    done: list[int] = []
    health.guarded(done.append, 1)
    with health.poisoning():
        done.append(2)
    health.require()
    assert done == [1, 2]
    assert frontiers.is_healthy


@pytest.mark.parametrize("error", [StorageError("the disk is gone"), OutOfSpaceError("/d")])
def test_a_write_that_fails_poisons_and_says_why(
    frontiers: Frontiers, health: Health, error: StorageError
) -> None:
    with pytest.raises(type(error)):
        health.guarded(fail, error)
    assert not frontiers.is_healthy
    with pytest.raises(PoisonedError, match=f"the bench.*{error.what}"):
        health.require()


def test_an_error_that_is_none_of_ours_poisons_by_the_block_around_it(health: Health) -> None:
    with pytest.raises(KeyboardInterrupt), health.poisoning():
        health.guarded(fail, KeyboardInterrupt())
    with pytest.raises(PoisonedError, match="interrupted: KeyboardInterrupt"):
        health.require()


def test_the_first_failure_is_the_one_that_is_told(health: Health) -> None:
    with pytest.raises(StorageError), health.poisoning():
        health.guarded(fail, StorageError("first"))
    with pytest.raises(KeyboardInterrupt), health.poisoning():
        fail(KeyboardInterrupt())
    with pytest.raises(PoisonedError, match="first"):
        health.require()


def test_the_end_is_told_before_any_poison_and_is_none(
    frontiers: Frontiers, health: Health
) -> None:
    health.finish()
    health.interrupted(KeyboardInterrupt())
    assert not health.poison
    assert not frontiers.is_healthy
    with pytest.raises(ClosedError, match="the bench is closed"):
        health.require()


def test_every_end_wakes_the_threads_that_wait(
    frontiers: Frontiers, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes: list[bool] = []
    monkeypatch.setattr(frontiers, "wake", lambda: wakes.append(frontiers.is_healthy))
    health.interrupted(KeyboardInterrupt())
    health.finish()
    assert wakes == [False, False], "and the waiters find what has happened"
