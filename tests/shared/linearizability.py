"""Whether a recorded history of one object could have come from one that does an operation at a
time: the search of Wing and Gong (1993), with the memory of Lowe (2017).

A history is a list of `Call`: who waited from when to when, for what, and with which answer. A call
without an answer (its process was killed, or its outcome is unknown) may have had its effect at any
moment behind its beginning, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

State: TypeAlias = Hashable
Step: TypeAlias = "Callable[[Any, str, Any, Any], tuple[bool, Any]]"
"""`(state, name, argument, answer)` to whether the answer is right, and the state behind it. The
answer is `UNKNOWN` where nobody got one."""

UNKNOWN = object()


@dataclass(frozen=True)
class Call:
    """One call: its times are of one clock."""

    begin: int
    end: int | None
    name: str
    argument: Any = None
    answer: Any = UNKNOWN


def register(state: Any, name: str, argument: Any, answer: Any) -> tuple[bool, Any]:
    """A register with `put`, `get` and `swap` of (expected, new), which answers whether it did."""
    if name == "put":
        return True, argument
    if name == "get":
        return answer is UNKNOWN or answer == state, state
    expected, new = argument
    does = expected == state
    return answer is UNKNOWN or answer == does, new if does else state


def counter(state: Any, name: str, argument: Any, answer: Any) -> tuple[bool, Any]:
    """A counter with `add`, which answers the sum, and `get`."""
    total = (state or 0) + (argument if name == "add" else 0)
    return answer is UNKNOWN or answer == total, total


def is_linearizable(history: Sequence[Call], step: Step, state: State = None) -> bool:
    """Whether the calls can be put in an order that keeps their times and gives their answers.

    Exponential in the calls that overlap, and linear in the others.
    """
    calls = sorted(history, key=lambda call: call.begin)
    ends = [float("inf") if call.end is None else call.end for call in calls]
    needed = sum(1 << n for n, call in enumerate(calls) if call.end is not None)
    tried: set[tuple[int, State]] = set()
    stack: list[tuple[int, State]] = [(0, state)]
    while stack:
        done, state = stack.pop()
        if done & needed == needed:
            return True
        if (done, state) in tried:
            continue
        tried.add((done, state))
        first_end = float("inf")  # a call that begins behind an end comes behind that call
        for n in range((~done & (done + 1)).bit_length() - 1, len(calls)):
            if calls[n].begin > first_end:
                break
            if done >> n & 1:
                continue
            first_end = min(first_end, ends[n])
        found: list[tuple[float, int, State]] = []
        for n in range((~done & (done + 1)).bit_length() - 1, len(calls)):
            call = calls[n]
            if call.begin > first_end:
                break
            if done >> n & 1:
                continue
            is_right, after = step(state, call.name, call.argument, call.answer)
            if is_right:
                found.append((ends[n], done | 1 << n, after))
        # What ends first is tried first, and calls without an end last.
        found.sort(key=lambda each: each[0], reverse=True)
        stack += ((done, after) for _, done, after in found)
    return False
