"""A checker of recorded histories: are the reads and writes of transactions serialisable?

The direct serialization graph is built from the versions that each committed transaction read and
wrote. It has an edge from A to B if B read a version of A, overwrote a version of A, or overwrote a
version that A had read. A history is serialisable if the graph has no cycle.

Source: Adya, "Weak Consistency" (1999); Cerone and others use the same graph.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

Version = int
"""The timestamp of the commit that wrote it; 0 for a key that was never written."""


@dataclass(slots=True)
class Record:
    """One committed transaction."""

    name: str
    reads: dict[bytes, Version] = field(default_factory=dict)
    writes: set[bytes] = field(default_factory=set)
    timestamp: Version | None = None


def edges(history: list[Record]) -> dict[str, set[str]]:
    """The direct serialization graph."""
    versions: dict[bytes, list[Version]] = defaultdict(list)
    author: dict[Version, str] = {}
    for record in history:
        if record.timestamp is not None:
            author[record.timestamp] = record.name
            for key in record.writes:
                versions[key].append(record.timestamp)
    for of_key in versions.values():
        of_key.sort()
    graph: dict[str, set[str]] = {record.name: set() for record in history}
    for of_key in versions.values():
        for older, newer in pairwise(of_key):
            graph[author[older]].add(author[newer])
    for record in history:
        for key, version in record.reads.items():
            if version in author:
                graph[author[version]].add(record.name)
            following = next((v for v in versions[key] if v > version), None)
            if following is not None:
                graph[record.name].add(author[following])
    for name, followers in graph.items():
        followers.discard(name)
    return graph


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
