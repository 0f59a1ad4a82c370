"""The checker of histories, tried on histories whose answer is known."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.harness.seeds import seeded
from tests.shared.linearizability import UNKNOWN, Call, counter, is_linearizable, register


def put(begin: int, end: int | None, value: str) -> Call:
    """A put of a register."""
    return Call(begin, end, "put", value, UNKNOWN if end is None else None)


def get(begin: int, end: int, value: str | None) -> Call:
    """A get of a register."""
    return Call(begin, end, "get", None, value)


GOOD = {
    # Herlihy and Wing (1990): the first write may take effect behind the second one.
    "overlapping writes": [put(0, 9, "x"), put(1, 3, "y"), get(4, 5, "y"), get(10, 11, "x")],
    "a read sees a write under way": [put(0, 9, "x"), get(1, 2, "x"), get(3, 4, "x")],
    "a write without an answer shows late": [put(0, None, "x"), get(5, 6, None), get(7, 8, "x")],
    "a write without an answer never shows": [put(0, None, "x"), get(5, 6, None), get(7, 8, None)],
    "a swap fails between": [
        put(0, 1, "x"),
        put(2, 9, "y"),
        Call(3, 4, "swap", ("x", "z"), False),
        get(10, 11, "y"),
    ],
    # From Porcupine's tests, as the lost reads below: `make conformance` reads its histories too.
    "a later read does not see what an earlier one saw, while both run": [
        put(0, 100, "x"),
        get(25, 75, "x"),
        get(30, 60, None),
    ],
    "calls that take no time": [
        put(0, 100, "x"),
        get(25, 75, "x"),
        get(30, 30, None),
        get(30, 30, None),
    ],
}
BAD = {
    # Herlihy and Wing (1990): once a read has seen a write, no later one sees the state before.
    "a write is seen and lost": [put(0, 9, "x"), get(1, 2, "x"), get(3, 4, None)],
    "what calls that take no time saw is lost": [
        put(0, 100, "x"),
        get(10, 30, "x"),
        get(10, 10, "x"),
        get(10, 10, "x"),
        get(40, 90, None),
    ],
    "a stale read": [put(0, 1, "x"), put(2, 3, "y"), get(4, 5, "x")],
    "two readers disagree": [
        put(0, 1, "x"),
        put(2, 9, "y"),
        get(3, 4, "y"),
        get(5, 6, "x"),
    ],
    "an acknowledged write is gone": [put(0, 1, "x"), get(2, 3, None)],
    "two swaps of one value": [
        put(0, 1, "x"),
        Call(2, 6, "swap", ("x", "y"), True),
        Call(3, 5, "swap", ("x", "z"), True),
    ],
    "a value from nowhere": [put(0, 1, "x"), get(2, 3, "z")],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_passes(name: str) -> None:
    assert is_linearizable(GOOD[name], register)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_fails(name: str) -> None:
    assert not is_linearizable(BAD[name], register)


def test_counters() -> None:
    def add(begin: int, end: int | None, total: int | object = UNKNOWN) -> Call:
        return Call(begin, end, "add", 1, total)

    assert is_linearizable([add(0, 5, 2), add(1, 4, 1)], counter)
    assert is_linearizable([add(0, None), add(1, 4, 2)], counter)
    assert not is_linearizable([add(0, 5, 1), add(1, 4, 1)], counter)  # an addition is lost
    assert not is_linearizable([add(0, 1, 1), add(2, 3, 3)], counter)  # one was done twice


def test_the_search_agrees_with_trying_all_orders() -> None:
    draw = seeded()
    verdicts = set()
    for _ in range(400):
        calls = [_any_call(draw) for _ in range(draw.randint(1, 5))]
        expected = any(
            _runs(order)
            for done in range(len(calls) + 1)
            for order in itertools.permutations(calls, done)
            if all(call in order for call in calls if call.end is not None)
        )
        assert is_linearizable(calls, register) == expected, calls
        verdicts.add(expected)
    assert verdicts == {True, False}


def _any_call(draw: random.Random) -> Call:
    begin = draw.randrange(10)
    end = None if draw.random() < 0.2 else begin + draw.randint(1, 6)
    value = draw.choice("xy")
    name = draw.choice(("put", "get", "swap"))
    argument = {"put": value, "get": None, "swap": (draw.choice("xy"), value)}[name]
    answer = {"put": None, "get": draw.choice(("x", "y", None)), "swap": draw.random() < 0.5}[name]
    return Call(begin, end, name, argument, UNKNOWN if end is None else answer)


def _runs(order: tuple[Call, ...]) -> bool:
    for place, call in enumerate(order):
        if any(later.end is not None and later.end < call.begin for later in order[place:]):
            return False
    state = None
    for call in order:
        is_right, state = register(state, call.name, call.argument, call.answer)
        if not is_right:
            return False
    return True
