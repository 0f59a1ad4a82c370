"""Keys of a store that were written after a time, by anything but a push.

The change index names the keys, so the search costs what changed. Where the index is not whole, as
in a store that was restored since, a pass over the versions finds them.

Invariants
1. A row of a push has the stamp of the push, in every store: natively, and where a backup brought
   it. So the stamps that the position of a store has tell pushed rows from live ones.
2. A reverted push has left versions at two stamps: when it was added and when it was reverted. They
   are passed over: a reader sees a value of the newest version at another stamp. Where GC has taken
   that version, the version of a revert has its value, unless a push below was reverted later.
3. A push may have a delete over a key that is dead already: a service deleted the key after the
   pass of a replace, or the job did not know that it is gone. Such a delete changes nothing, so the
   delete below it is the last write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

from kvstore.changes.event import Operation
from kvstore.errors import HistoryGoneError
from kvstore.mvcc import Version
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import TIMESTAMP_MAX, Timestamp


@dataclass(frozen=True)
class PushStamps:
    """The stamps of the pushes that a store has taken. `standing` has the stamps of pushes that
    hold; `reverts` has two stamps of each reverted push, when it was added and when reverted."""

    standing: frozenset[int] = frozenset()
    reverts: frozenset[tuple[int, int]] = frozenset()

    @cached_property
    def passed(self) -> frozenset[int]:
        """The stamps of reverted pushes, and of their reverts."""
        return frozenset(chain(*self.reverts))

    def has(self, timestamp: int) -> bool:
        """Whether a push was added or reverted then."""
        return timestamp in self.standing or timestamp in self.passed

    @classmethod
    def of(cls, told: Iterable[Mapping[str, Any]]) -> PushStamps:
        """The stamps that a position has."""
        standing, reverts = set[int](), set[tuple[int, int]]()
        for each in told:
            if each["state"] == "added":
                standing.add(each["at"])
            elif each["state"] == "reverted":
                reverts.add((each.get("added") or each["at"], each["at"]))
        return cls(frozenset(standing), frozenset(reverts))

    def without(self, added: int) -> PushStamps:
        """The stamps as they are once the push that was added at `added` is reverted."""
        return PushStamps(self.standing - {added}, self.reverts | {(added, TIMESTAMP_MAX)})

    def last_write(self, store: Store, key: bytes, at: Timestamp) -> LastWrite:
        """The write that made the value of `key` which a reader sees at `at`. O(versions)."""
        for version in store.history(key):
            if version.timestamp <= at and version.timestamp not in self.passed:
                return LastWrite(version.timestamp, version.value)
        return LastWrite(Timestamp(0), None)

    def is_live(self, store: Store, key: bytes, at: Timestamp, *, since: int) -> bool:
        """Whether what a reader sees of `key` at `at` was written after `since` by anything but a
        push. O(versions)."""
        pushed: Version | None = None
        for version in store.history(key):
            if version.timestamp > at or version.timestamp in self.passed:
                continue
            if pushed is not None and version.value is not None:
                return False  # the push deleted a key that was alive
            if version.timestamp not in self.standing:
                return version.timestamp > since
            if version.value is not None:
                return False
            pushed = version
        return False

    def value(self, store: Store, key: bytes, at: Timestamp) -> bytes | None:
        """The value of `key` at `at` without the reverted pushes. O(versions). Raises
        `HistoryGoneError` if GC has taken the version that had it."""
        since, passed = store.since, list[Version]()
        for version in store.history(key):
            if version.timestamp <= at and version.timestamp not in self.passed:
                return version.value
            if version.timestamp <= at:
                passed.append(version)
        ends = {reverted for _, reverted in self.reverts}
        for version in passed:
            if version.timestamp in ends and not self._reverted_over(version.timestamp):
                return version.value
        for version in passed:
            under = self._reverted_over(version.timestamp, since)
            if version.timestamp <= since or any(added <= since for added in under):
                raise HistoryGoneError(as_of=version.timestamp, since=since)
        return None

    def _reverted_over(self, time: int, since: int = 0) -> list[int]:
        """The stamps of the pushes that were added before `time`, and reverted after it and after
        `since`."""
        later = max(time, since)
        return [added for added, reverted in self.reverts if added < time and reverted > later]


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
