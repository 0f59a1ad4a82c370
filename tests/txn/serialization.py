"""A checker of recorded histories: are the reads and writes of transactions serialisable?

The direct serialization graph is built from the versions that each committed transaction read and
wrote. It has an edge from A to B if B read a version of A, overwrote a version of A, or overwrote a
version that A had read. A history is serialisable if the graph has no cycle. Where records have
times, A has an edge to B also if A ended before B began: without a cycle, the history is strictly
serialisable.

Source: Adya, "Weak Consistency" (1999); Kingsbury and Alvaro, "Elle" (2020), use the same graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

Version = int
"""Orders what was written to a key, as the timestamp of the commit does; 0 is the key before all.
Versions that are equal came in an order that nobody saw."""


@dataclass(slots=True)
class Record:
    """One committed transaction."""

    name: str
    reads: dict[bytes, Version] = field(default_factory=dict)
    writes: dict[bytes, Version] = field(default_factory=dict)
    begin: int | None = None
    end: int | None = None
    """When it was answered; None if it never was."""


def edges(history: list[Record]) -> dict[str, set[str]]:
    """The direct serialization graph."""
    authors: dict[bytes, dict[Version, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in history:
        for key, version in record.writes.items():
            authors[key][version].add(record.name)
    followed = {key: dict(pairwise([0, *sorted(found)])) for key, found in authors.items()}
    graph: dict[str, set[str]] = {record.name: set() for record in history}
    for key, found in authors.items():
        for older, newer in followed[key].items():
            for name in found.get(older, ()):
                graph[name] |= found[newer]
    for record in history:
        for key, version in record.reads.items():
            assert version == 0 or version in authors[key], "a version that nobody wrote"
            for name in authors[key].get(version, ()):
                graph[name].add(record.name)
            following = followed.get(key, {}).get(version)
            if following is not None:
                graph[record.name] |= authors[key][following]
    for earlier, later in _in_time(history):
        graph[earlier].add(later)
    for name, followers in graph.items():
        followers.discard(name)
    return graph


def _in_time(history: list[Record]) -> Iterator[tuple[str, str]]:
    """Pairs of which the first ended before the second began: those that imply all others."""
    begins = [(each.begin, True, each.name) for each in history if each.begin is not None]
    ends = [(each.end, False, each.name) for each in history if each.end is not None]
    last: set[str] = set()  # what ended, and is not implied by something that ended later
    before: dict[str, set[str]] = {}
    for _, is_begin, name in sorted([*begins, *ends], key=lambda event: (event[0], not event[1])):
        if is_begin:
            before[name] = set(last)
            yield from ((earlier, name) for earlier in last)
        else:
            last -= before[name]
            last.add(name)


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """A cycle of the graph; None if there is none."""
    state: dict[str, int] = {}
    for root in graph:
        if root in state:
            continue
        path, stack = [root], [iter(graph[root])]
        state[root] = 1
        while stack:
            follower = next(stack[-1], None)
            if follower is None:
                stack.pop()
                state[path.pop()] = 2
            elif state.get(follower) == 1:
                return path[path.index(follower) :]
            elif follower not in state:
                state[follower] = 1
                path.append(follower)
                stack.append(iter(graph[follower]))
    return None
