"""Whether a history of transactions that append to lists, and read them, is serialisable.

Each element is appended to a list once, so a read tells the order of all appends before it, and
the history needs no times of commits: Elle calls it list-append. What the orders and single reads
rule out is found here, and the rest by the graph of `serialization`.

Source: Kingsbury and Alvaro, "Elle: Inferring Isolation Anomalies from Experimental Observations"
(2020).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.txn.serialization import Record, cycle, edges


class Step(NamedTuple):
    """An append of one element, or a read of all."""

    verb: Literal["append", "r"]
    key: bytes
    elements: tuple[int, ...]


@dataclass(frozen=True)
class Transaction:
    """One transaction with its answer: `ok`, `fail` for one that was called off, or `info` for one
    whose outcome nobody knows, whose reads tell nothing."""

    steps: tuple[Step, ...]
    outcome: str = "ok"
    begin: int | None = None
    end: int | None = None


def what_is_wrong(history: Sequence[Transaction]) -> str | None:
    """What no serialisable store does, in one word or two; None for a history without it. With
    times, what no strictly serialisable store does."""
    certain = [each for each in history if each.outcome == "ok"]
    for each in certain:
        if wrong := _inside(each):
            return wrong
    orders: dict[bytes, tuple[int, ...]] = defaultdict(tuple)
    shown = [(key, elements) for each in certain for key, elements in _shown(each)]
    for key, elements in shown:
        orders[key] = max(orders[key], elements, key=len)
    for key, elements in shown:
        if orders[key][: len(elements)] != elements:
            return "two orders"
    by = {(step.key, step.elements[0]): each for each in history for step in _appends(each)}
    for key, order in orders.items():
        if max(Counter(order).values(), default=1) > 1:
            return "twice"
        for element in order:
            if (key, element) not in by:
                return "from nowhere"
            if by[key, element].outcome == "fail":
                return "aborted read"
    seen = {id(by[key, element]) for key, order in orders.items() for element in order}
    took_place = [each for each in history if each.outcome == "ok" or id(each) in seen]
    for each in took_place:
        for key, appended in _appended(each).items():
            found = [place for place, element in enumerate(orders[key]) if element in appended]
            if found and orders[key][found[0] :][: len(appended)] != appended:
                return "torn"
    records = []
    for number, each in enumerate(took_place):
        record = Record(f"T{number}", begin=each.begin, end=each.end)
        for key, appended in _appended(each).items():
            order = orders[key]
            is_seen = appended[-1] in order
            record.writes[key] = 1 + (order.index(appended[-1]) if is_seen else len(order))
        if each.outcome == "ok":
            for key, elements in _read_of_others(each).items():
                following = orders[key][len(elements) :]
                torn = elements and following and by[key, elements[-1]] is by[key, following[0]]
                if torn:
                    return "torn"
                record.reads[key] = len(elements)
        records.append(record)
    return None if cycle(edges(records)) is None else "a cycle"


def _appends(each: Transaction) -> list[Step]:
    return [step for step in each.steps if step.verb == "append"]


def _appended(each: Transaction) -> dict[bytes, tuple[int, ...]]:
    """What a transaction appended to each list, in order."""
    found: dict[bytes, tuple[int, ...]] = {}
    for _, key, elements in _appends(each):
        found[key] = found.get(key, ()) + elements
    return found


def _shown(each: Transaction) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """What each read of a transaction tells of the order of a list: where the read shows an append
    of its own, those to come follow at once."""
    own = _appended(each)
    for verb, key, elements in each.steps:
        if verb == "r":
            others = tuple(element for element in elements if element not in own.get(key, ()))
            yield key, elements if others == elements else others + own[key]


def _read_of_others(each: Transaction) -> dict[bytes, tuple[int, ...]]:
    """What a transaction saw of each list, without its own appends."""
    own = _appended(each)
    found: dict[bytes, tuple[int, ...]] = {}
    for verb, key, elements in each.steps:
        if verb == "r":
            found[key] = tuple(element for element in elements if element not in own.get(key, ()))
    return found


def _inside(each: Transaction) -> str | None:
    """What is wrong in a transaction by itself: a read shows what its reads and appends before it
    say, and no append to come."""
    own: dict[bytes, tuple[int, ...]] = defaultdict(tuple)
    known: dict[bytes, tuple[int, ...]] = {}
    all_own = _appended(each)
    for verb, key, elements in each.steps:
        if verb == "append":
            own[key] += elements
            continue
        ours = tuple(element for element in elements if element in all_own.get(key, ()))
        others = elements[: len(elements) - len(own[key])]
        if ours != own[key] or elements != others + own[key] or known.get(key, others) != others:
            return "own reads"
        known[key] = others
    return None
