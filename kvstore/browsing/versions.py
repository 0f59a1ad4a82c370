"""Some versions of one key, newest first, each with its origin, in bounded work.

Invariants
1. A page has the versions that `Store.history` has in its window of times, in the same order.
2. A page reads `limit` timed versions, one more, and the key's rows of imports: one an import.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

from kvstore.browsing.excerpt import Excerpt
from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    TAIL_BYTES,
    VALUE,
    decode_suffix,
    encode_suffix,
)
from kvstore.codec.ordered import frame
from kvstore.limits import BROWSE_BYTES_MAX, BROWSE_REFERENCES_MAX, BROWSE_VALUE_BYTES
from kvstore.mvcc import Versions
from kvstore.mvcc.stretches import between
from kvstore.mvcc.version import Revision, Stamps, timeline
from kvstore.timestamp import Timestamp

VersionOrigin: TypeAlias = Literal["put", "delete", "import", "revert", "range delete"]
_REFERENCE_MASK: Final = (1 << 63) - 1
_BEHIND: Final = b"\xff" * (TAIL_BYTES + 1)
"""Sorts behind every tail."""


class VersionRow(NamedTuple):
    """A version: its time, the beginning of its value (None for a deletion), and the kind of write
    that made it. `import_id` is the import that wrote the value."""

    timestamp: Timestamp
    value: Excerpt | None
    origin: VersionOrigin
    import_id: int | None


class VersionPage(NamedTuple):
    """Some versions, newest first. `next` is the time at which the page behind begins, None behind
    the last one. A page `is_cut` if the key has rows of more imports than a page reads."""

    rows: list[VersionRow]
    next: int | None
    is_cut: bool


def version_page(versions: Versions, key: bytes, upto: int, *, limit: int) -> VersionPage:
    """The newest `limit` versions of `key` at or below `upto`."""
    fragments, stamps = versions.view
    stored = _Stored.read(versions, frame(key), upto, limit)
    floor = stored.floor
    deletions = between(fragments.stack(key), floor - 1, upto)
    if len(deletions) > limit:  # then the older entries are of a later page
        deletions = deletions[: limit + 1]
        floor = max(floor, deletions[-1])
    entries = [(tail, tail) for tail in stored.excerpts]
    revisions = timeline(entries, stamps, deletions)
    rows = [stored.row(revision, stamps) for revision in revisions if floor <= revision[0] <= upto]
    following = None
    if len(rows) > limit:
        following = int(rows[limit - 1].timestamp) - 1
    elif floor > 0:
        following = floor - 1
    return VersionPage(rows[:limit], following, stored.is_cut)


class _Stored(NamedTuple):
    """The stored entries of a key that a page needs: by their tails, the beginnings of values. The
    page is whole at or above `floor`."""

    excerpts: dict[bytes, Excerpt]
    floor: int
    is_cut: bool

    @classmethod
    def read(cls, versions: Versions, stem: bytes, upto: int, limit: int) -> _Stored:
        found: dict[bytes, Excerpt] = {}
        ticket, reader = versions.engine.borrow()

        def take(most: int, below: bytes) -> int:
            """Read entries with tails below `below` from here on, `most` at most; their bytes."""
            size = 0
            for _ in range(most):
                stored = reader.key()
                if stored is None or not stored.startswith(stem) or stored[-TAIL_BYTES:] >= below:
                    break
                value = reader.value()
                found[stored[-TAIL_BYTES:]] = Excerpt.of(value, BROWSE_VALUE_BYTES)
                size += len(value)
                reader.next()
                if size >= BROWSE_BYTES_MAX:
                    break
            return size

        reader.seek(stem)
        size = take(BROWSE_REFERENCES_MAX, FIRST_TIMED_SUFFIX)
        is_cut = len(found) == BROWSE_REFERENCES_MAX or size >= BROWSE_BYTES_MAX
        reader.seek(stem + encode_suffix(upto))
        take(limit + 1, _BEHIND)
        stored = reader.key()
        has_more = stored is not None and stored.startswith(stem)
        if stored is None:
            versions.engine.check(reader)
        versions.engine.give_back(ticket, reader)
        timed = [tail for tail in found if tail >= FIRST_TIMED_SUFFIX]
        floor = decode_suffix(timed[-1][:-1]) if has_more and timed else 0
        return cls(found, floor, is_cut)

    def row(self, revision: Revision, stamps: Stamps) -> VersionRow:
        """The row of a revision whose value is the tail of its entry."""
        timestamp, tail = revision
        value = None if tail is None else self.excerpts[tail]
        import_id = None
        if tail is not None and tail < FIRST_TIMED_SUFFIX:
            import_id = int.from_bytes(tail[:-1], "big") & _REFERENCE_MASK
        return VersionRow(Timestamp(timestamp), value, self._origin(timestamp, stamps), import_id)

    def _origin(self, timestamp: int, stamps: Stamps) -> VersionOrigin:
        suffix = encode_suffix(timestamp)
        if suffix + VALUE in self.excerpts:
            return "put"
        if any(tail[:-1] == suffix for tail in self.excerpts):
            return "delete"
        lives = [stamps[tail[:-1]] for tail in self.excerpts if tail[:-1] in stamps]
        if any(life.added == timestamp for life in lives):
            return "import"
        return "revert" if any(life.reverted == timestamp for life in lives) else "range delete"
