"""The checker of lists tried on histories whose verdicts are known: those of Elle's own tests.

`ax1` appends 1 to x, and `rx12` reads 1 and 2 in x, as in Elle's notation. `fail:` and `info:` are
the outcome of a transaction. Where times decide, a transaction ends before the next one begins.
`make conformance` reads Elle's recorded histories too.
"""

from __future__ import annotations

import itertools
import random
import re

import pytest

from tests.harness.seeds import seeded
from tests.txn.appends import Step, Transaction, what_is_wrong

GOOD = {
    "nothing": "",
    "one after the other": "ax1 rx1 ax2 rx12",
    "a read of nothing, and an append": "rx ax1",
    "Adya, figure 3": "az1ax1ay1 rx1ay2 ry12az3 rz13",
    "two appends that nobody saw": "rx ax1 ax2",
    "a transaction appends twice": "rxax1ax2 rx12",
    "what an unknown outcome read tells nothing": "info:ax2ry ax1ay1 rx12ry1",
    "an unknown outcome is seen": "info:ax1 rx1",
    "its own appends are read": "ax1rx1ax2rx12 rx12",
    "a failed append is not seen": "fail:ax1 rx ax2 rx2",
    "a past read": "ax1 ax2 rx1 rx12",
    "a past read in a session": "rxrz1 ax1 rz az1",
    "a write seen before it began": "rx1ay1 ry1 ax1",
}
BAD = {
    "G0": ("ax1ay1 ax2ay2 rx12ry21", "a cycle"),
    "G1a": ("fail:ax1 rx1", "aborted read"),
    "G1b": ("ax1ax2 rx1", "torn"),
    "G1b, and the rest was seen": ("ax1ax2 rx1 rx12", "torn"),
    "G1c": ("ax1ry1 ax2ay1 rx12ry1", "a cycle"),
    "G-single": ("ax1ay1 ax2ry rx12", "a cycle"),
    "G-single of an item": ("ax1ay1 rx1ry", "a cycle"),
    "G2": ("ax1ry ay1rx", "a cycle"),
    "G2-item": ("rxay1 ryax1", "a cycle"),
    "G-nonadjacent": ("ax1 rx1ry ay1 ry1rx", "a cycle"),
    "G-nonadjacent of an item": ("ax1at1 rx1ry ay1az2 rz2rt", "a cycle"),
    "lost update": ("ax0 rx0ax1 rx0ax2", "a cycle"),
    "dirty update": ("fail:ax1 ax2 rx12", "aborted read"),
    "dirty update by an unknown outcome": ("fail:ax1 info:ax2 ax3 rx123", "aborted read"),
    "contradictory orders": ("ax1ry1 ax2 ax3ay1 rx13 rx123", "two orders"),
    "duplicated elements": ("ax1ry1 ax2ay1 rx121", "twice"),
    "internal": ("ax1ax2ax4 ax3rx1234", "own reads"),
    "internal, a read of nothing": ("ax6rx", "own reads"),
    "internal, two reads": ("rxrx2 ax2", "own reads"),
    "future read": ("rx1ax1", "own reads"),
    "future read inside": ("ax1rx01ax0ax3", "own reads"),
    "an unseen write comes last": ("ax1ay1 ax2ay2 ax3ay3 rx12 ry2", "a cycle"),
    "a part of a transaction is seen": ("ax1ax2 ax3 rx13", "torn"),
    "one between two of another": ("ax1ax2 ax3 rx132", "torn"),
    "from nowhere": ("ax1 rx13", "from nowhere"),
}
BAD_IN_TIME = {
    "strong snapshot isolation": "ax1 ax2 rx1 rx12",
    "G-nonadjacent by the order of a session": "rxrz1 ax1 rz az1",
    "G1c by the order of a session": "rx1ay1 ry1 ax1",
}
"""Serialisable, and not strictly."""


def parsed(text: str, *, timed: bool = False) -> list[Transaction]:
    history = []
    for number, word in enumerate(text.split()):
        outcome, _, steps = word.rpartition(":")
        found = re.findall(r"([ar])([a-z])(\d*)", steps)
        assert "".join(map("".join, found)) == steps
        history.append(
            Transaction(
                tuple(
                    Step("append" if verb == "a" else "r", key.encode(), tuple(map(int, digits)))
                    for verb, key, digits in found
                ),
                outcome or "ok",
                *((2 * number, 2 * number + 1) if timed else ()),
            )
        )
    return history


@pytest.mark.parametrize("name", GOOD)
def test_a_serialisable_history_passes(name: str) -> None:
    assert what_is_wrong(parsed(GOOD[name])) is None


@pytest.mark.parametrize("name", BAD)
def test_a_history_that_is_not_serialisable_fails(name: str) -> None:
    text, wrong = BAD[name]
    assert what_is_wrong(parsed(text)) == wrong


@pytest.mark.parametrize("name", BAD_IN_TIME)
def test_a_history_against_its_times_fails(name: str) -> None:
    text = BAD_IN_TIME[name]
    assert text in GOOD.values()
    assert what_is_wrong(parsed(text, timed=True)) == "a cycle"


def test_what_is_right_in_its_times_passes() -> None:
    assert what_is_wrong(parsed("ax1 rx1 ax2 rx12ry ay1 ry1rx12", timed=True)) is None


def test_the_graph_agrees_with_trying_all_orders() -> None:
    draw = seeded()
    verdicts = set()
    for _ in range(400):
        history = _any_history(draw)
        certain = sum(each.outcome == "ok" for each in history)
        expected = any(
            _runs(order)
            for length in range(certain, len(history) + 1)
            for order in itertools.permutations(history, length)
            if sum(each.outcome == "ok" for each in order) == certain
            and all(each.outcome != "fail" for each in order)
        )
        assert (what_is_wrong(history) is None) == expected, history
        verdicts.add(expected)
    assert verdicts == {True, False}


def _any_history(draw: random.Random) -> list[Transaction]:
    """What transactions do one after the other, some of it read wrongly, in another order."""
    state: dict[bytes, tuple[int, ...]] = {b"x": (), b"y": ()}
    history = []
    for number in range(draw.randint(1, 4)):
        outcome = draw.choices(("ok", "info", "fail"), (8, 1, 1))[0]
        steps, before = [], dict(state)
        for element in range(draw.randint(1, 3)):
            key = draw.choice((b"x", b"y"))
            if draw.random() < 0.5:
                steps.append(Step("append", key, (10 * number + element,)))
                state[key] += steps[-1].elements
            else:
                shown = state[key]
                if draw.random() < 0.15:
                    shown = draw.choice((shown[:-1], before[key], shown[::-1], (*shown, 99)))
                steps.append(Step("r", key, shown))
        if outcome == "fail" or (outcome == "info" and draw.random() < 0.5):
            state = before
        history.append(Transaction(tuple(steps), outcome))
    draw.shuffle(history)
    return history


def _runs(order: tuple[Transaction, ...]) -> bool:
    state: dict[bytes, tuple[int, ...]] = {}
    for each in order:
        for verb, key, elements in each.steps:
            shown = state.get(key, ())
            if verb == "append":
                state[key] = shown + elements
            elif each.outcome == "ok" and shown != elements:
                return False
    return True
