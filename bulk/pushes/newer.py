"""Keys of a store that were written after a time, by anything but a push.

The change index names the keys, so the search costs what changed. Where the index is not whole, as
in a store that was restored since, a pass over the versions finds them.

Invariants
1. A row of a push has the stamp of the push, in every store: natively, and where a backup brought
   it. So the stamps that the position of a store has tell pushed rows from live ones.
2. A reverted push has left versions at two stamps: when it was added and when it was reverted. They
   are passed over: a reader sees a value of the newest version at another stamp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from kvstore.changes.event import Operation
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import Timestamp


class PushStamps(NamedTuple):
    """The stamps of the pushes that a store has taken. `standing` has the stamps of pushes that
    hold; `passed` has the stamps of reverted pushes, and of their reverts."""

    standing: frozenset[int] = frozenset()
    passed: frozenset[int] = frozenset()

    def has(self, timestamp: int) -> bool:
        """Whether a push was added or reverted then."""
        return timestamp in self.standing or timestamp in self.passed

    @classmethod
    def of(cls, told: Iterable[Mapping[str, Any]]) -> PushStamps:
        """The stamps that a position has."""
        standing, passed = set[int](), set[int]()
        for each in told:
            if each["state"] == "added":
                standing.add(each["at"])
            elif each["state"] == "reverted":
                passed.update((each["at"], each.get("added") or each["at"]))
        return cls(frozenset(standing), frozenset(passed))

    def last_write(self, store: Store, key: bytes, at: Timestamp) -> LastWrite:
        """The write that made the value of `key` which a reader sees at `at`. O(versions)."""
        for version in store.history(key):
            if version.timestamp <= at and version.timestamp not in self.passed:
                return LastWrite(version.timestamp, version.value)
        return LastWrite(Timestamp(0), None)


class LastWrite(NamedTuple):
    """The time and the value of a write. Time 0 means that the key was never written."""

    timestamp: Timestamp
    value: bytes | None


class NewerWrites(NamedTuple):
    """Keys and spans that were written in a window, each with the time of a write."""

    keys: Mapping[bytes, int]
    spans: Sequence[tuple[Span, int]]


NOTHING: Final = NewerWrites({}, ())


def written(
    store: Store, spans: Iterable[Span], stamps: PushStamps, *, since: int, upto: Timestamp
) -> NewerWrites:
    """The keys in `spans` that were written in `(since, upto]` by anything but a push.

    Raises `HistoryGoneError` if the history since then is gone.
    """
    low = store.to_time(since)
    keys: dict[bytes, int] = {}
    deleted: list[tuple[Span, int]] = []
    for span in spans:
        is_indexed = low >= store.indexed_since
        read = _from_index if is_indexed else _from_versions
        for start, end, time in read(store, span, stamps, low, upto):
            if end is None:
                keys[start] = time
            else:
                deleted.append((Span(start, end), time))
    return NewerWrites(keys, deleted)


_Found: TypeAlias = "Iterator[tuple[bytes, bytes | None, int]]"


def _from_index(
    store: Store, span: Span, stamps: PushStamps, since: int, upto: Timestamp
) -> _Found:
    for event in store.events(since, upto, span=span, images="none", expand="none"):
        if event.op not in (Operation.IMPORT, Operation.REVERT):
            yield event.key, event.end_key, event.timestamp
        elif not stamps.has(event.timestamp):
            for key, _ in store.imports.rows_in(event.key, span):
                yield key, None, event.timestamp


def _from_versions(
    store: Store, span: Span, stamps: PushStamps, since: int, upto: Timestamp
) -> _Found:
    for change in store.changes(since, upto, start=span.start, end=span.end, order="time"):
        if not stamps.has(change.timestamp):
            yield change.key, change.end_key, change.timestamp
